"""Which voice a request names: the model's, one that was uploaded, or a clip that comes with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from mstar.runtime.family import family_code
from mstar.spec.errors import RequestError, nearest
from mstar.spec.model import ModelSpec
from mstar.spec.processor import Processor, Voice
from mstar.spec.tasks import Audio, VoiceSample
from mstar_server.media.decoder import Item, Media
from mstar_server.media.values import decode_base64
from mstar_server.openai.speech_request import SpeechRequest
from mstar_server.options import ServerOptions
from mstar_server.voices import VoiceStore, sample_id

__all__ = ["DEFAULT_VOICE", "check_sample", "known_voice", "model_voices", "speaker"]

DEFAULT_VOICE = "default"
_LARGE_CHARS = 1 << 20


async def speaker(
    body: SpeechRequest, spec: ModelSpec, processor: Processor, media: Media, voices: VoiceStore, tenant: str
) -> str | VoiceSample | None:
    """The voice that *body* asks for, as its task has it. Raises :class:`RequestError` for one that there is not."""
    if body.ref_audio is None:
        voice = await _named(body.voice_name, spec, processor, voices, tenant)
        if body.ref_text is None:
            return voice
        if not isinstance(voice, VoiceSample):
            message = "'ref_text' needs the clip that it is said in: 'ref_audio', or an uploaded 'voice'"
            raise RequestError(message, param="ref_text")
        named = await asyncio.to_thread(sample_id, voice.audio, body.ref_text)
        return replace(voice, text=body.ref_text, id=named)
    if body.voice_name not in (None, DEFAULT_VOICE):  # clients that must send a voice send this one
        raise RequestError("'voice' and 'ref_audio' are two voices: send one of them", param="voice")
    check_clones(spec, "ref_audio")
    item = Item("audio", await _content(body.ref_audio), "ref_audio")
    (audio,) = await media.decode([item])
    assert isinstance(audio, Audio)
    check_sample(audio, "ref_audio", media.options)
    text = body.ref_text or ""
    return VoiceSample(audio, text, await asyncio.to_thread(sample_id, audio, text))


async def known_voice(
    name: str | None, spec: ModelSpec, processor: Processor, param: str, further: Sequence[str] = ()
) -> str | None:
    """*name* if the model knows such a voice; ``None`` for its default.

    :param param: the field that named it. :param further: other names that it could have been.
    """
    if name is None or name == DEFAULT_VOICE:
        return None
    if not name:
        raise RequestError(f"{param!r} is empty: leave it out for the model's default voice", param=param)
    known, voices = await asyncio.to_thread(_ask, spec, processor, name)
    if known:
        return name
    names = [*(voice.id for voice in voices), *further]
    near = nearest(name, names)
    if "audio" in spec.inputs:
        near += "; upload it, or send its clip as 'ref_audio'"
    elif not names:
        near = "; 'default' is its only voice"
    message = f"{param!r}: the model {spec.key!r} has no voice {name[:80]!r}{near}"
    raise RequestError(message, param=param, code="voice_not_found")


def model_voices(spec: ModelSpec, processor: Processor) -> list[Voice]:
    """The voices that the model brings. Call it in a thread."""
    with family_code(f"{spec.key!r} could not list its voices", spec.processor):
        return list(processor.voices())


def check_sample(audio: Audio, param: str, options: ServerOptions) -> None:
    """Refuse a clip without sound, and one that is too long."""
    seconds = len(audio.samples) / audio.rate
    if not seconds:
        raise RequestError(f"{param!r} has no sound in it", param=param, code="invalid_audio")
    if seconds > options.max_voice_s:
        message = f"{param!r} of {seconds:.6g} s is longer than the limit of {options.max_voice_s:g} s"
        raise RequestError(message, param=param, code="audio_too_long")


def check_clones(spec: ModelSpec, param: str, what: str = "the voice of a clip") -> None:
    """Refuse a clip as the voice of a model that takes no sound. *what*: how the request brings it."""
    if "audio" not in spec.inputs:
        message = f"{param!r}: the model {spec.key!r} cannot speak with {what}, only with its own"
        raise RequestError(message, param=param, code="unsupported_modality")


async def _named(
    name: str | None, spec: ModelSpec, processor: Processor, voices: VoiceStore, tenant: str
) -> str | VoiceSample | None:
    uploaded = voices.list(tenant)
    clones = "audio" in spec.inputs
    try:
        return await known_voice(name, spec, processor, "voice", [v.name for v in uploaded] if clones else [])
    except RequestError as error:
        stored = voices.find(tenant, name or "")
        if error.code != "voice_not_found" or stored is None:
            raise
    check_clones(spec, "voice", "an uploaded voice")
    return replace(await voices.sample(stored), param="voice")


async def _content(value: str) -> bytes | str:
    """A URL as it is, or base64, decoded."""
    if value.startswith("data:") or "://" in value[:32]:
        return value
    if len(value) < _LARGE_CHARS:
        return decode_base64(value, "ref_audio")
    return await asyncio.to_thread(decode_base64, value, "ref_audio")


def _ask(spec: ModelSpec, processor: Processor, name: str) -> tuple[bool, list[Voice]]:
    with family_code(f"{spec.key!r} could not look a voice up", spec.processor):
        known = processor.knows_voice(name)
        return known, [] if known else list(processor.voices())
