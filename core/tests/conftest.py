"""Makes the scripted worker and family and the tests' plugins importable by name, here and in worker processes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent / folder) for folder in ("cluster", "engine", "parallel", "plugins", "runtime")]
