"""Speech from text: families of M*."""

__version__ = "0.1.0"
