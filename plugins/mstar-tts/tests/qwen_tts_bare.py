"""Imported first by programs that run ``qwen_tts``: its packages without what they import, which is a user interface, a
phonemizer and a codec that the 12 Hz models do not have."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers.audio_utils  # before librosa seems to be there: it would want more of it than is made here

_found = importlib.util.find_spec("qwen_tts")
assert _found is not None
assert _found.submodule_search_locations
_root = Path(next(iter(_found.submodule_search_locations)))
for _name in (
    "qwen_tts",
    "qwen_tts.core",
    "qwen_tts.core.models",
    "qwen_tts.core.tokenizer_12hz",
    "qwen_tts.inference",
):
    _bare = ModuleType(_name)
    _bare.__path__ = [str(_root.joinpath(*_name.split(".")[1:]))]
    sys.modules[_name] = _bare


def _mel(*, sr: int, n_fft: int, n_mels: int, fmin: float, fmax: float) -> Any:
    """What the reference takes from librosa, from transformers, which has the same."""
    return transformers.audio_utils.mel_filter_bank(
        n_fft // 2 + 1, n_mels, fmin, fmax, sr, norm="slaney", mel_scale="slaney"
    ).T


_MADE: dict[str, dict[str, Any]] = {
    "librosa": {},
    "librosa.filters": {"mel": _mel},
    "qwen_tts.inference.qwen3_tts_tokenizer": {"Qwen3TTSTokenizer": None},  # imports the other codec
}
for _name, _members in _MADE.items():
    sys.modules[_name] = ModuleType(_name)
    vars(sys.modules[_name]).update(_members)
