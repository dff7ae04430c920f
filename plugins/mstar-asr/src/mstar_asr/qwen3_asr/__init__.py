"""Qwen3-ASR: an audio encoder before a Qwen3 language model, for whole clips and for speech that goes on."""
