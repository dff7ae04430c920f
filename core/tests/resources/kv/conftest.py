import sys
from pathlib import Path

# Test helpers beside the tests: the suite is collected with importlib, which adds no folder to the path.
sys.path.insert(0, str(Path(__file__).parent))
