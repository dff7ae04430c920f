"""The parts of ``tts_gpu.py``."""
