"""The server, as a plugin: its routes and its adapters enter through the same hooks as anyone's."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mstar.hookspecs import hookimpl

if TYPE_CHECKING:
    from mstar.spec.model import ModelSpec

_ADAPTERS = {
    "chat": "mstar_server.openai.chat_adapter:ChatAdapter",
    "completion": "mstar_server.openai.completion_request:CompletionAdapter",
    "embedding": "mstar_server.openai.embeddings:EmbeddingAdapter",
    "image": "mstar_server.openai.image_request:ImageAdapter",
    "image_edit": "mstar_server.openai.image_request:ImageAdapter",
    "video": "mstar_server.openai.video_request:VideoAdapter",
    "speech": "mstar_server.openai.speech_request:SpeechAdapter",
    "transcription": "mstar_server.openai.transcription_request:TranscriptionAdapter",
    "translation": "mstar_server.openai.transcription_request:TranscriptionAdapter",
}


_ROUTES = (
    "health",
    "metrics",
    "models",
    "chat",
    "completions",
    "responses",
    "embeddings",
    "speech",
    "voices",
    "transcriptions",
    "realtime",
    "images",
    "videos",
    "tokens",
    "generate",
    "generate_ws",
    "requests",
)
"""Modules of :mod:`mstar_server.routes`, each with a ``router``, in the order of the documentation."""


@hookimpl
def mstar_api() -> Sequence[Any]:
    """The built-in routers. Imported here, so that loading plugins stays cheap."""
    return [import_module(f"mstar_server.routes.{name}").router for name in _ROUTES]


@hookimpl
def mstar_openai(spec: ModelSpec) -> dict[str, str]:
    """The server's own adapters for *spec*'s abilities."""
    return {ability: name for ability, name in _ADAPTERS.items() if ability in spec.abilities}
