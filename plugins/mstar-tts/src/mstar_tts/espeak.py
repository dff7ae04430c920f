"""espeak-ng's phonemes, through its C library.

The library is GPL-3.0 and comes with the system (Debian: ``apt install espeak-ng``) or with the extra ``espeak``
(``espeakng-loader``). It keeps its state in the process: calls are made one at a time.

Source: espeak-ng's ``speak_lib.h``.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

from mstar.spec.errors import SetupError

__all__ = ["Espeak", "espeak", "in_turn"]

P = ParamSpec("P")
T = TypeVar("T")

_RETRIEVAL, _NO_EXIT = 1, 0x8000
_UTF8 = 1
_IPA, _AS_TIE, TIE = 0x02, 0x80, "^"
_FLAG = re.compile(r"\([\^a-z-]{2,20}\)")
"""What marks words that are spoken as another language's: ``(en)``."""


def in_turn(function: Callable[P, T]) -> Callable[P, T]:
    """*function*, called by one thread at a time."""
    lock = threading.Lock()

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with lock:
            return function(*args, **kwargs)

    return called


@in_turn  # a cache alone lets the first callers in side by side, and the library aborts if it is started twice at once
@cache
def espeak() -> Espeak | None:
    """The library, or ``None`` where there is none."""
    for library, data in _places():
        try:
            return Espeak(ctypes.CDLL(library), data)
        except (OSError, AttributeError, SetupError):
            continue
    return None


def _places() -> list[tuple[str, str | None]]:
    places: list[tuple[str, str | None]] = []
    try:
        import espeakng_loader
    except ImportError:
        pass
    else:
        places.append((espeakng_loader.get_library_path(), espeakng_loader.get_data_path()))
    found = ctypes.util.find_library("espeak-ng")
    if found is not None:
        places.append((found, None))
    return places


class _Voice(ctypes.Structure):
    """``espeak_VOICE``."""

    _fields_ = [
        *((name, ctypes.c_char_p) for name in ("name", "languages", "identifier")),
        *((name, ctypes.c_ubyte) for name in ("gender", "age", "variant", "xx1")),
        ("score", ctypes.c_int),
        ("spare", ctypes.c_void_p),
    ]


class Espeak:
    """:param data: the folder of its data; ``None``: where it looks by itself.

    :raises SetupError: it does not start.
    """

    def __init__(self, library: ctypes.CDLL, data: str | None):
        self._library, self._lock, self._voice = library, threading.Lock(), ""
        self._speak = library.espeak_TextToPhonemes
        self._speak.restype = ctypes.c_char_p
        self._speak.argtypes = (ctypes.POINTER(ctypes.c_char_p), ctypes.c_int, ctypes.c_int)
        if library.espeak_Initialize(_RETRIEVAL, 0, None if data is None else data.encode(), _NO_EXIT) < 0:
            raise SetupError("espeak-ng finds no data")

    def phonemes(self, text: str, voice: str) -> str:
        """IPA of *text* as *voice* (``en-us``) speaks it, with stress; letters of one sound are joined by ``^``.

        Punctuation is lost. :raises SetupError: it has no such voice.
        """
        with self._lock:
            if voice != self._voice:
                language = _Voice(languages=voice.encode())
                by_name = self._library.espeak_SetVoiceByName(voice.encode()) == 0
                if not by_name and self._library.espeak_SetVoiceByProperties(ctypes.byref(language)) != 0:
                    raise SetupError(f"espeak-ng has no voice {voice!r}")
                self._voice = voice
            clauses = []
            rest = ctypes.c_char_p(text.replace("\0", " ").encode("utf-8", "replace"))
            while rest.value:
                clause = self._speak(ctypes.byref(rest), _UTF8, _IPA | _AS_TIE | ord(TIE) << 8)
                clauses.append((clause or b"").decode("utf-8", "replace"))
        return " ".join(_FLAG.sub("", " ".join(clauses)).split())
