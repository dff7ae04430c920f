from __future__ import annotations

import sys
from pathlib import Path

# The helpers of this folder are a plain module beside the tests (pytest's importlib mode adds no path by itself).
sys.path.insert(0, str(Path(__file__).parent))
