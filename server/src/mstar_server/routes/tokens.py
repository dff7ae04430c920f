"""``POST /tokenize`` and ``POST /detokenize``, with vLLM's bodies: what a prompt is in tokens, without a step."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from mstar.runtime.family import family_code
from mstar.spec.errors import RequestError
from mstar.spec.processor import Processor, Tokenizes
from mstar.spec.tasks import ChatTask, CompletionTask
from mstar_server.openai.chat_media import chat_tasks
from mstar_server.openai.chat_request import ChatMessage, ChatRequest
from mstar_server.protocols import Service
from mstar_server.state import ServerState

__all__ = ["router"]

router = APIRouter(tags=["tokens"])

T = TypeVar("T")


class TokenizeBody(BaseModel):
    """A prompt, or the messages of a chat."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(None, description="May be left out when the server has one model.")
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = Field(None, description="Of a chat.")
    add_special_tokens: StrictBool | None = Field(
        None, description="What the tokenizer puts around a prompt; default true. A chat's template writes its own."
    )
    add_generation_prompt: StrictBool | None = Field(None, description="Of a chat; default true.")
    return_token_strs: StrictBool | None = Field(None, description="Also say how the vocabulary writes each token.")


class DetokenizeBody(BaseModel):
    """Ids of tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(None, description="May be left out when the server has one model.")
    tokens: list[Annotated[int, Field(strict=True)]]


@router.post("/tokenize", summary="The tokens of a prompt or a chat")
async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
    state: ServerState = request.app.state.mstar
    service = state.ready(body.model, None)
    tokenizer = _tokenizer(service, await state.processor(service))
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either 'prompt' or 'messages'", param="prompt", code="invalid_value")

    chat = None if body.messages is None else await _chat(body, service, state)

    def work() -> dict[str, Any]:
        if chat is None:
            ids = tokenizer.tokenize(_completion(body, service, state), body.add_special_tokens is not False)
        else:
            ids = tokenizer.tokenize(chat)
        told: dict[str, Any] = {"count": len(ids), "max_model_len": tokenizer.max_model_len, "tokens": ids}
        return {**told, "token_strs": tokenizer.token_strings(ids) if body.return_token_strs else None}

    return await _in_thread(service, work)


@router.post("/detokenize", summary="The text of tokens")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, str]:
    state: ServerState = request.app.state.mstar
    service = state.ready(body.model, None)
    tokenizer = _tokenizer(service, await state.processor(service))
    limit = state.options.max_text_chars
    if len(body.tokens) > limit:
        message = f"{len(body.tokens)} tokens are more than the limit of {limit}"
        raise RequestError(message, param="tokens", code="too_many_tokens")
    return {"prompt": await _in_thread(service, lambda: tokenizer.detokenize(body.tokens))}


def _tokenizer(service: Service, processor: Processor) -> Tokenizes:
    if not isinstance(processor, Tokenizes):
        message = f"the model {service.spec.key!r} has no tokenizer"
        raise RequestError(message, param="model", code="unsupported_route")
    return processor


def _completion(body: TokenizeBody, service: Service, state: ServerState) -> CompletionTask:
    assert body.prompt is not None
    for name in ("tools", "add_generation_prompt"):
        if getattr(body, name) is not None:
            raise RequestError(f"{name!r} goes with 'messages', not with 'prompt'", param=name)
    limit = state.options.max_text_chars
    if len(body.prompt) > limit:
        message = f"'prompt' of {len(body.prompt)} characters is longer than the limit of {limit}"
        raise RequestError(message, param="prompt", code="text_too_long")
    return CompletionTask(knobs=service.spec.knobs(), prompt=body.prompt)


async def _chat(body: TokenizeBody, service: Service, state: ServerState) -> ChatTask:
    """The task that the chat route would make of the messages."""
    state.ready(body.model, "chat")
    if body.add_special_tokens:
        message = "'add_special_tokens' is for 'prompt': a chat's template writes its special tokens itself"
        raise RequestError(message, param="add_special_tokens")
    chat = ChatRequest(model=service.spec.key, messages=body.messages or [], tools=body.tools)
    adapter = state.adapter("chat", service)
    with family_code(f"{service.spec.key!r} could not read a chat", type(adapter).__module__):
        task, *_ = cast(
            list[ChatTask], await chat_tasks(adapter, chat, service.spec, state.media, await state.sampling(service))
        )
    return dataclasses.replace(task, add_generation_prompt=body.add_generation_prompt is not False)


async def _in_thread(service: Service, work: Callable[[], T]) -> T:
    def guarded() -> T:
        with family_code(f"{service.spec.key!r} could not tokenize", service.spec.processor):
            return work()

    return await asyncio.to_thread(guarded)
