"""The server, as a plugin: its routes and its adapters enter through the same hooks as anyone's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mstar.hookspecs import hookimpl

if TYPE_CHECKING:
    from mstar.spec.model import ModelSpec

_ADAPTERS = {
    "chat": "mstar_server.openai.chat_adapter:ChatAdapter",
    "completion": "mstar_server.openai.completion_request:CompletionAdapter",
    "embedding": "mstar_server.openai.embeddings:EmbeddingAdapter",
    "transcription": "mstar_server.openai.transcription_request:TranscriptionAdapter",
    "translation": "mstar_server.openai.transcription_request:TranscriptionAdapter",
}


@hookimpl
def mstar_api() -> Sequence[Any]:
    """The built-in routers. Imported here, so that loading plugins stays cheap."""
    from mstar_server.routes import (
        chat,
        completions,
        embeddings,
        generate,
        generate_ws,
        health,
        models,
        realtime,
        requests,
        responses,
        tokens,
        transcriptions,
    )

    modules = (
        health, models, chat, completions, responses, embeddings, transcriptions, realtime, tokens, generate,
        generate_ws, requests,
    )  # fmt: skip
    return [module.router for module in modules]


@hookimpl
def mstar_openai(spec: ModelSpec) -> dict[str, str]:
    """The server's own adapters for *spec*'s abilities."""
    return {ability: name for ability, name in _ADAPTERS.items() if ability in spec.abilities}
