"""The HTTP server of M*."""

__version__ = "0.1.0"
