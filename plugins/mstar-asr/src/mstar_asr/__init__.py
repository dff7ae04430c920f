"""Speech to text."""

__version__ = "0.1.0"
