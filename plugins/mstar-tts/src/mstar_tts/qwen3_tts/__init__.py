"""Qwen3-TTS: a talker that writes sixteen codes a frame, and its 12 Hz codec."""
