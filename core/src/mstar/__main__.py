"""``python -m mstar`` is ``mstar``."""

from mstar.cli.app import main

main()
