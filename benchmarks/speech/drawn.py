"""As a plugin of a worker process: Qwen3-TTS's checkpoint is not read there, its weights are drawn on the device."""

from __future__ import annotations

from speech.families import FAMILIES, random_weights

_drawing = random_weights(FAMILIES["qwen3_tts"].edit)
_drawing.__enter__()  # for as long as the process lives
