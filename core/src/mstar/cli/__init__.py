"""The command line. Importing it keeps the libraries from looking for plugins of their own."""

import os

from mstar.settings import LIBRARIES

for _name, _value in LIBRARIES.items():
    os.environ.setdefault(_name, _value)
