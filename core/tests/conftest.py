"""Makes the scripted worker importable by name, here and in worker processes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "cluster"))
