"""Qwen3-TTS with the 12 Hz codec: built-in speakers, designed voices and cloned ones."""
