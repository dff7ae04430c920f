"""``python -m mstar`` is ``mstar``."""

import sys

from mstar.cli.app import main

sys.exit(main())
