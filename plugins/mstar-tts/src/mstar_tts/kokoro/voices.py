"""Kokoro's voices and blends of them.

A voice is a pack of styles, one for each number of phonemes that a text may have. It comes as ``NAME.pt``, a tensor
in torch's format, or as ``NAME.bin``, bare little-endian float32; neither is ever unpickled.
"""

from __future__ import annotations

import logging
import math
import pickle
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mstar.spec.errors import RequestError, WeightsError, nearest
from mstar.spec.processor import Voice
from mstar_tts.kokoro.languages import LANGUAGES, Language

__all__ = ["Voices", "parse_blend"]

log = logging.getLogger(__name__)

_MOST = 8
"""Voices of one blend."""
_KEPT = 64
"""Packs in memory, half a megabyte each."""
_PART = re.compile(r"\s*([^\s+,()]+)\s*(?:\(\s*([^()]*?)\s*\))?\s*")
_GENDERS = {"f": "female", "m": "male"}


class Voices:
    """The voices in *folder*. :param width: numbers of a style."""

    def __init__(self, folder: Path, width: int):
        self._width = width
        files = sorted(file for kind in ("*.pt", "*.bin") for file in folder.glob(kind)) if folder.is_dir() else []
        self._files: Mapping[str, Path] = {file.stem: file for file in files}
        self._pack = lru_cache(_KEPT)(self._read)

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def default(self, preferred: str) -> str:
        """*preferred*, a voice or a blend, or where the folder has none of this name the first voice, which the log
        says.

        :raises WeightsError: there is no voice at all.
        """
        if not self._files:
            raise WeightsError("the weights' folder has no voices (voices/NAME.pt or voices/NAME.bin)")
        try:
            self.blend(preferred, "default_voice")
        except RequestError as error:
            first = next(iter(self._files))
            log.warning("%s; %r speaks instead", error, first)
            return first
        return preferred

    def describe(self, name: str) -> Voice:
        """What the name tells: the language's letter, then the gender's."""
        language = LANGUAGES.get(name[:1])
        person = name.partition("_")[2] or name
        return Voice(
            name,
            person.replace("_", " ").title(),
            None if language is None else language.code,
            _GENDERS.get(name[1:2]),
            "" if language is None else language.name,
        )

    def language(self, blend: Mapping[str, float]) -> Language:
        """That of the first voice of *blend*; American English for a name that tells none."""
        return LANGUAGES.get(next(iter(blend))[:1], LANGUAGES["a"])

    def blend(self, expression: str, param: str = "voice") -> dict[str, float]:
        """:func:`parse_blend`. Raises :class:`RequestError` for a voice that there is not."""
        shares = parse_blend(expression, param)
        for name in shares:
            if name not in self._files:
                message = f"{param!r}: there is no voice {name[:80]!r}{nearest(name, self._files)}"
                raise RequestError(message, param=param, code="voice_not_found")
        return shares

    def style(self, blend: Mapping[str, float], phonemes: int) -> NDArray[np.float32]:
        """The style of a text of so many *phonemes*, float32 ``[width]``: the weighted mean of the voices' ones."""
        total = np.zeros(self._width)
        for name, share in blend.items():
            pack = self._pack(name)
            total += share * pack[min(phonemes, len(pack)) - 1]
        return total.astype(np.float32)

    def _read(self, name: str) -> NDArray[np.float32]:
        file = self._files[name]
        try:
            values: Any = np.fromfile(file, "<f4") if file.suffix == ".bin" else _from_torch(file)
            return np.asarray(values, np.float32).reshape(-1, self._width)
        except (OSError, ValueError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise WeightsError(f"the voice {file} cannot be read: {error}") from error


def _from_torch(file: Path) -> Any:
    import torch  # a processor needs none of it but this

    return torch.load(file, map_location="cpu", weights_only=True).numpy()


def parse_blend(expression: str, param: str = "voice") -> dict[str, float]:
    """``af_bella(2)+af_sky(1)`` as voices with their shares, which sum to one; without numbers shares are equal. ``,``
    is another ``+``.

    :raises RequestError: it is no such expression, or a weight is no number from 1e-6 to 1e6.
    """
    parts = re.split(r"[+,]", expression)
    if len(parts) > _MOST:
        raise RequestError(f"{param!r} blends {len(parts)} voices; {_MOST} are the limit", param=param)
    weights: dict[str, float] = {}
    for number, part in enumerate(parts, 1):
        found = _PART.fullmatch(part)
        if found is None and not part.strip():
            rest = "+".join(filter(None, map(str.strip, parts)))
            message = f"{param!r}: part {number} of the blend {expression[:80]!r} is empty"
            raise RequestError(message + (f"; did you mean {rest[:80]!r}?" if rest else ""), param=param)
        if found is None:
            message = f"{param!r}: {part.strip()[:80]!r} is neither a voice nor a voice with its weight, as in "
            raise RequestError(message + "'af_bella(2)+af_sky(1)'", param=param)
        weights[found[1]] = weights.get(found[1], 0.0) + _weight(found[2], param)
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _weight(text: str | None, param: str) -> float:
    try:
        weight = 1.0 if text is None else float(text)
    except ValueError:
        weight = math.nan
    if not (1e-6 <= weight <= 1e6):
        message = (
            f"{param!r}: the weight {str(text)[:40]!r} must be a number from 0.000001 to 1000000; a plain one is 1"
        )
        raise RequestError(message, param=param)
    return weight
