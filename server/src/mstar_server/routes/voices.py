"""``/v1/audio/voices`` and ``/v1/audio/models``: who can speak, and with which voices."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Query, Request
from starlette.datastructures import FormData, UploadFile

from mstar.spec.errors import NotReady, RequestError, nearest
from mstar.spec.processor import Voice
from mstar.spec.tasks import Audio
from mstar_server.media.decoder import Item
from mstar_server.media.uploads import open_form, upload_source
from mstar_server.names import safe_name
from mstar_server.on_demand import OnDemand
from mstar_server.openai.speakers import DEFAULT_VOICE, check_sample, model_voices
from mstar_server.protocols import Service
from mstar_server.routes.models import describe_model
from mstar_server.state import ServerState
from mstar_server.voices import StoredVoice

__all__ = ["router"]

router = APIRouter(tags=["OpenAI"])

_SAMPLES, _TEXTS = ("audio_sample", "file"), ("text", "ref_text")
_FIELDS = ("name", *_SAMPLES, *_TEXTS, "language", "consent", "type")
_AUDIO = ("speech", "transcription", "translation", "realtime")
_LANGUAGE_CHARS = 35
"""The longest code of a language that there should be (RFC 5646)."""


@router.get("/v1/audio/models", summary="The models for sound")
async def list_audio_models(request: Request) -> dict[str, Any]:
    state: ServerState = request.app.state.mstar
    found = [s for s in state.services.values() if "audio" in s.spec.outputs or set(_AUDIO) & set(s.spec.abilities)]
    data = [describe_model(service, state) for service in found]
    # Open WebUI, and servers that it was written for, list models for sound under "models"
    return {"object": "list", "data": data, "models": [{"id": model["id"]} for model in data]}


@router.get("/v1/audio/voices", summary="The voices that can be spoken with")
async def list_voices(
    request: Request, model: str | None = Query(None, description="Only those that this model can speak with.")
) -> dict[str, Any]:
    state: ServerState = request.app.state.mstar
    items = await _items(state, state.tenant(request))
    if model is not None:
        key = state.find(model).spec.key
        items = [item for item in items if key in item["models"]]
    # as for models: under "voices"
    voices = [{"id": item["id"], "name": item["name"]} for item in items]
    return {"object": "list", "data": items, "voices": voices}


@router.get("/v1/audio/voices/{voice_id}", summary="One voice")
async def get_voice(voice_id: str, request: Request) -> dict[str, Any]:
    state: ServerState = request.app.state.mstar
    return await _item(state, safe_name(voice_id, "voice_id"), state.tenant(request))


@router.delete("/v1/audio/voices/{voice_id}", summary="Delete an uploaded voice")
async def delete_voice(voice_id: str, request: Request) -> dict[str, Any]:
    state: ServerState = request.app.state.mstar
    tenant, name = state.tenant(request), safe_name(voice_id, "voice_id")
    if state.voices.find(tenant, name) is None and (await _item(state, name, tenant)):
        raise RequestError(f"the voice {name!r} belongs to a model and cannot be deleted", param="voice_id")
    deleted = await state.voices.delete(tenant, name)
    return {"id": deleted.id, "object": "audio.voice.deleted", "deleted": True}


@router.post("/v1/audio/voices", summary="Upload a voice")
async def create_voice(request: Request) -> dict[str, Any]:
    """A form: `name`, `audio_sample` (a file), and perhaps `text` (what is said in it) and `language`."""
    state: ServerState = request.app.state.mstar
    return await _create(request, state)


async def _create(request: Request, state: ServerState) -> dict[str, Any]:
    options, tenant = state.options, state.tenant(request)
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        message = "send a form (Content-Type: multipart/form-data) with 'name' and 'audio_sample'"
        raise RequestError(message, code="unsupported_media_type", status=415)
    async with open_form(request, options, 4 * options.max_speech_chars) as form:
        _check_fields(form)
        name = safe_name(form.get("name"), "name")
        text = _text(form, _one(form, _TEXTS) or "text", options.max_speech_chars)
        language = _text(form, "language", _LANGUAGE_CHARS) or None
        place = _one(form, _SAMPLES) or "audio_sample"
        source = await upload_source(form.get(place), place)
    await _check_free(state, name)
    (audio,) = await state.media.decode([Item("audio", source, place)])
    assert isinstance(audio, Audio)
    check_sample(audio, place, options)
    return _uploaded(state, await state.voices.add(tenant, name, audio, text, language))


def _check_fields(form: FormData) -> None:
    for name in form:
        if name not in _FIELDS:
            message = f"unknown parameter {name!r}{nearest(name, _FIELDS)}"
            raise RequestError(message, param=name, code="unknown_parameter")
        if len(form.getlist(name)) > 1:
            raise RequestError(f"{name!r} is there more than once", param=name)
        if name not in _SAMPLES and isinstance(form[name], UploadFile):
            raise RequestError(f"{name!r} must be a text, not a file", param=name)
    if form.get("type", "audio_sample") != "audio_sample":
        message = "'type': voices are made of audio samples only; the only valid value is 'audio_sample'"
        raise RequestError(message, param="type", code="unsupported_parameter")


def _one(form: FormData, names: Sequence[str]) -> str | None:
    """Which of *names*, two spellings of one field, there is."""
    found = [name for name in names if name in form]
    if len(found) > 1:
        raise RequestError(f"{found[0]!r} and {found[1]!r} are the same: send one of them", param=found[1])
    return found[0] if found else None


def _text(form: FormData, name: str, longest: int) -> str:
    text = str(form.get(name, "")).strip()
    if len(text) > longest:
        message = f"{name!r} of {len(text)} characters is longer than the limit of {longest}"
        raise RequestError(message, param=name, code="text_too_long")
    return text


async def _check_free(state: ServerState, name: str) -> None:
    """A model's voices go first, so that an upload of such a name could never be spoken with."""
    taken = {DEFAULT_VOICE}
    for service in _speaking(state):
        taken |= {voice.id for voice in await _voices(service)}
    if name in taken:
        message = f"'name': {name!r} is a voice of a model; choose another name"
        raise RequestError(message, param="name", code="voice_exists", status=409)


def _speaking(state: ServerState) -> list[Service]:
    return [s for s in state.services.values() if "audio" in s.spec.outputs]


async def _voices(service: Service) -> list[Voice]:
    if isinstance(service, OnDemand):
        return await service.voices()
    try:
        return await asyncio.to_thread(model_voices, service.spec, service.processor)
    except NotReady:  # the server is starting
        return []


async def _item(state: ServerState, name: str, tenant: str) -> dict[str, Any]:
    """The voice called *name*; raises 404."""
    items = await _items(state, tenant)
    for key in ("id", "name"):
        for item in items:
            if item[key] == name and (key == "id" or item["uploaded"]):
                return item
    near = nearest(name, [item["id"] for item in items])
    raise RequestError(f"there is no voice {name!r}{near}", param="voice_id", code="voice_not_found", status=404)


async def _items(state: ServerState, tenant: str) -> list[dict[str, Any]]:
    """All voices: each model's own in its order, then those that the client uploaded."""
    own: dict[Voice, list[str]] = {}
    for service in _speaking(state):
        for voice in await _voices(service):
            own.setdefault(voice, []).append(service.spec.key)
    items = [_own(state, voice, models) for voice, models in own.items()]
    return items + [_uploaded(state, voice) for voice in state.voices.list(tenant)]


def _cloning(state: ServerState) -> list[str]:
    """The models that can speak with an uploaded voice."""
    return [s.spec.key for s in state.services.values() if "speech" in s.spec.abilities and "audio" in s.spec.inputs]


def _own(state: ServerState, voice: Voice, models: Sequence[str]) -> dict[str, Any]:
    facts = {"language": voice.language, "gender": voice.gender, "description": voice.description}
    return _shaped(voice.id, voice.name or voice.id, state.created, facts, models, uploaded=False)


def _uploaded(state: ServerState, voice: StoredVoice) -> dict[str, Any]:
    facts = {"language": voice.language, "gender": None, "description": ""}
    return _shaped(voice.id, voice.name, voice.created, facts, _cloning(state), uploaded=True)


def _shaped(
    voice_id: str, name: str, created: int, facts: Mapping[str, Any], models: Sequence[str], *, uploaded: bool
) -> dict[str, Any]:
    """Every voice has every field, whatever it is. ``created_at`` and ``type`` are what OpenAI's client reads."""
    return {
        "id": voice_id,
        "object": "audio.voice",
        "name": name,
        "created": created,
        "created_at": created,
        "type": "audio_sample" if uploaded else "built_in",
        **facts,
        "uploaded": uploaded,
        "models": list(models),
    }
