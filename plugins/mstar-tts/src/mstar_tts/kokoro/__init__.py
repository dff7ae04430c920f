"""Kokoro-82M: text to speech without an autoregressive step."""
