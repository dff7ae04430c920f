"""Chat with text, pictures and videos: Qwen3.5 and Qwen3.8, families of M*."""

__version__ = "0.1.0"
