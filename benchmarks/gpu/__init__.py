"""The parts of ``decode_gpu.py``, one subject a module."""
