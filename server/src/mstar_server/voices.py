"""Voices that clients have uploaded: kept for each client by itself, on disk if the server has a folder for them."""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from mstar.files import write_whole
from mstar.spec.errors import RequestError, SetupError, nearest
from mstar.spec.tasks import Audio, VoiceSample
from mstar_server.names import safe_name

__all__ = ["StoredVoice", "VoiceStore", "sample_id"]

log = logging.getLogger("mstar.server")

T = TypeVar("T")
_DRAFT = ".tmp"


class StoredVoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a voice beside its sound. *created* in Unix seconds; *sample* is :func:`sample_id`."""

    id: str
    tenant: str
    name: str
    created: int
    sample: str
    text: str = ""
    language: str | None = None


def sample_id(audio: Audio, text: str) -> str:
    """The same for the same sound and transcript."""
    digest = hashlib.sha256(f"{audio.rate} {text}".encode("utf-8", "surrogatepass"))
    digest.update(np.ascontiguousarray(audio.samples, "<f4").tobytes())
    return digest.hexdigest()[:32]


class VoiceStore:
    """Uploaded voices. What one tenant uploaded no other sees.

    A voice is two files of its own: ``ID.flac``, and ``ID.json``, whose renaming into place is what makes it exist.
    File names are made here; nothing that a client sends becomes a path. All methods but :meth:`find` and :meth:`list`
    take a thread of the loop's executor.

    :param folder: ``None`` keeps them in memory. :param most: of one tenant.
    :raises SetupError: the folder cannot be used.
    """

    def __init__(self, folder: Path | None, most: int):
        self._folder, self._most = folder, most
        self._lock = threading.Lock()
        self._voices: dict[str, StoredVoice] = {}
        self._memory: dict[str, bytes] = {}
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._load(folder)
            except OSError as error:
                raise SetupError(f"voices cannot be kept in {folder}: {error}") from None

    def list(self, tenant: str) -> list[StoredVoice]:
        """Oldest first."""
        return sorted((v for v in list(self._voices.values()) if v.tenant == tenant), key=lambda v: (v.created, v.id))

    def find(self, tenant: str, name: str) -> StoredVoice | None:
        """The voice whose id or name is *name*."""
        found = self._voices.get(name)
        if found is not None and found.tenant == tenant:
            return found
        return next((voice for voice in self.list(tenant) if voice.name == name), None)

    async def add(self, tenant: str, name: str, audio: Audio, text: str, language: str | None) -> StoredVoice:
        """Keep *audio* under *name*. Raises :class:`RequestError`: 409 if there is such a voice, 400 if there are too
        many."""
        return await self._run(lambda: self._add(tenant, safe_name(name, "name"), audio, text, language))

    async def sample(self, voice: StoredVoice) -> VoiceSample:
        """*voice*'s sound. Raises 404 if it has been deleted meanwhile."""
        return await self._run(lambda: self._sample(voice))

    async def delete(self, tenant: str, voice_id: str) -> StoredVoice:
        """Forget the voice whose id or name is *voice_id*. Raises 404 if there is none."""
        return await self._run(lambda: self._delete(tenant, voice_id))

    async def _run(self, work: Callable[[], T]) -> T:
        def locked() -> T:
            with self._lock:
                return work()

        return await asyncio.to_thread(locked)

    # --- in a thread, one at a time -----------------------------------------------------------------------------------

    def _add(self, tenant: str, name: str, audio: Audio, text: str, language: str | None) -> StoredVoice:
        mine = self.list(tenant)
        if any(name in (voice.name, voice.id) for voice in mine):
            message = f"'name': there is a voice {name!r} already; delete it first, or choose another name"
            raise RequestError(message, param="name", code="voice_exists", status=409)
        if len(mine) >= self._most:
            message = f"{len(mine)} voices are the limit; delete one first"
            raise RequestError(message, param="name", code="too_many_voices")
        voice = StoredVoice(
            id=f"voice_{uuid.uuid4().hex}",
            tenant=tenant,
            name=name,
            created=int(time.time()),
            sample=sample_id(audio, text),
            text=text,
            language=language,
        )
        data = _flac(audio)
        if self._folder is None:
            self._memory[voice.id] = data
        else:
            write_whole(self._folder / f"{voice.id}.flac", data, _DRAFT)
            write_whole(self._folder / f"{voice.id}.json", msgspec.json.encode(voice), _DRAFT)
        self._voices[voice.id] = voice
        return voice

    def _sample(self, voice: StoredVoice) -> VoiceSample:
        if voice.id not in self._voices:
            raise _missing(voice.name)
        if self._folder is None:
            data = self._memory[voice.id]
        else:
            data = (self._folder / f"{voice.id}.flac").read_bytes()
        return VoiceSample(_audio(data), voice.text, voice.sample)

    def _delete(self, tenant: str, voice_id: str) -> StoredVoice:
        voice = self.find(tenant, voice_id)
        if voice is None:
            raise _missing(voice_id, nearest(voice_id, [v.id for v in self.list(tenant)]))
        if self._folder is not None:
            (self._folder / f"{voice.id}.json").unlink(missing_ok=True)  # from here on it does not exist
            (self._folder / f"{voice.id}.flac").unlink(missing_ok=True)
        self._memory.pop(voice.id, None)
        del self._voices[voice.id]
        return voice

    def _load(self, folder: Path) -> None:
        """Read what an earlier server kept; clear away what it did not finish."""
        for file in sorted(folder.glob("voice_*.json")):
            try:
                voice = msgspec.json.decode(file.read_bytes(), type=StoredVoice)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                log.error("the voice in %s cannot be read and is left out: %s", file, error)
                continue
            if voice.id != file.stem or not file.with_suffix(".flac").is_file():
                log.error("the voice in %s is not complete and is left out", file)
                continue
            self._voices[voice.id] = voice
        for file in _leftovers(folder):
            file.unlink(missing_ok=True)


def _leftovers(folder: Path) -> Iterator[Path]:
    yield from folder.glob(f"voice_*{_DRAFT}")
    yield from (file for file in folder.glob("voice_*.flac") if not file.with_suffix(".json").exists())


def _flac(audio: Audio) -> bytes:
    """24 bits: a quiet recording keeps its detail."""
    import soundfile

    out = io.BytesIO()
    soundfile.write(out, np.clip(audio.samples, -1.0, 1.0), audio.rate, format="FLAC", subtype="PCM_24")
    return out.getvalue()


def _audio(data: bytes) -> Audio:
    import soundfile

    samples: Any
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    return Audio(samples, int(rate))


def _missing(name: str, near: str = "") -> RequestError:
    message = f"there is no uploaded voice {name[:80]!r}{near}"
    return RequestError(message, param="voice", code="voice_not_found", status=404)
