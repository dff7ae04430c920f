"""Real weights for a first run of M*."""

__version__ = "0.1.0"
