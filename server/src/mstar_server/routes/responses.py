"""``/v1/responses``: create, stream, retrieve, list the input of, delete."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from mstar.runtime.family import family_code
from mstar.spec.errors import RequestError
from mstar.spec.tasks import Task
from mstar_server.answers import Merged, begin
from mstar_server.errors import as_request_error
from mstar_server.openai.adapters import check_body
from mstar_server.openai.chat_media import chat_tasks
from mstar_server.openai.responses.items import Event, Items
from mstar_server.openai.responses.request import ResponseRequest, Translation, translate
from mstar_server.openai.responses.store import ResponseStore, Stored
from mstar_server.openai.text_answers import collect, token_bytes_of
from mstar_server.openapi import answers
from mstar_server.protocols import Answer, Service
from mstar_server.sse import EventStream, named_event
from mstar_server.state import ServerState

__all__ = ["router"]

router = APIRouter(tags=["OpenAI"])

_encode = msgspec.json.Encoder().encode


@router.post(
    "/v1/responses",
    summary="Answer a turn",
    response_model=None,
    responses=answers("A response, or its events", "application/json", "text/event-stream"),
)
async def create_response(body: ResponseRequest, request: Request) -> Response:
    state: ServerState = request.app.state.mstar
    service = state.ready(body.model, "chat")
    tenant = state.tenant(request)
    history: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        history = await state.responses.chain(tenant, body.previous_response_id, "previous_response_id")
    translation = translate(body, history)
    adapter = state.adapter("chat", service)
    with family_code(f"{service.spec.key!r} could not read a response's input", type(adapter).__module__):
        tasks = await _tasks(adapter, translation, state, service)
    token_bytes = token_bytes_of(await state.processor(service)) if translation.chat.logprobs else None
    turn = Turn(body, service.spec.key, Items(token_bytes), state.responses, tenant)
    try:
        if not body.stream:
            return await _whole(service, tasks, turn)
        keepalive_s = state.options.keepalive_s
        merged = await begin(service, tasks, turn.id, keepalive_s)
    except RequestError as error:
        raise translation.blame(error) from None
    return EventStream(_stream(merged, turn, keepalive_s), "text/event-stream", merged.close)


async def _tasks(adapter: Any, translation: Translation, state: ServerState, service: Service) -> Sequence[Task]:
    try:
        check_body(adapter, translation.chat)
        sampling = await state.sampling(service)
        return await chat_tasks(adapter, translation.chat, service.spec, state.media, sampling)
    except RequestError as error:
        raise translation.blame(error) from None


@router.get(
    "/v1/responses/{response_id}",
    summary="A stored response",
    response_model=None,
    responses=answers("The response", "application/json"),
)
async def get_response(
    response_id: str, request: Request, stream: bool = Query(False, description="Not supported.")
) -> Response:
    if stream:
        raise RequestError(
            "'stream' is not supported here: a stored response has ended", param="stream", code="unsupported_parameter"
        )
    state: ServerState = request.app.state.mstar
    stored = await state.responses.get(state.tenant(request), response_id)
    return Response(_encode(stored.response), media_type="application/json")


@router.get(
    "/v1/responses/{response_id}/input_items",
    summary="What a stored response answers",
    response_model=None,
    responses=answers("A page of items", "application/json"),
)
async def list_input_items(
    response_id: str,
    request: Request,
    limit: int = Query(20, ge=1, le=100),
    order: str = Query("desc", pattern="^(asc|desc)$"),
    after: str | None = None,
) -> Response:
    state: ServerState = request.app.state.mstar
    stored = await state.responses.get(state.tenant(request), response_id)
    items = stored.input if order == "asc" else stored.input[::-1]
    if after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise RequestError(f"'after': there is no item {after[:80]!r}", param="after")
        items = items[place + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"] if page else "", "last_id": page[-1]["id"] if page else ""}
    listing = {"object": "list", "data": page, **ends, "has_more": len(items) > len(page)}
    return Response(_encode(listing), media_type="application/json")


@router.delete("/v1/responses/{response_id}", summary="Forget a stored response")
async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
    state: ServerState = request.app.state.mstar
    await state.responses.delete(state.tenant(request), response_id)
    return {"id": response_id, "object": "response", "deleted": True}


class Turn:
    """One response while it is being made."""

    def __init__(self, body: ResponseRequest, model: str, items: Items, store: ResponseStore, tenant: str):
        self.body, self.model, self.items = body, model, items
        self.id, self.created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._store, self._tenant = store, tenant

    def object(self, status: str, answer: Answer | None = None, error: RequestError | None = None) -> dict[str, Any]:
        """The response as its client sees it."""
        body = self.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": self.items.output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "background": False,
            "usage": None if answer is None else self._usage(answer),
            "user": None,
            "metadata": body.metadata or {},
        }

    def _usage(self, answer: Answer) -> dict[str, Any]:
        cached = answer.usage.cached if answer.usage is not None else 0
        return {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.items.reasoning_tokens},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }

    async def keep(self, response: dict[str, Any]) -> None:
        """Store *response*, unless the client said not to."""
        if self.body.store is not False:
            stored = Stored(self.id, self.body.previous_response_id, self._input_items(), response)
            await self._store.put(self._tenant, stored)

    def _input_items(self) -> list[dict[str, Any]]:
        """This turn's input, as items with ids."""
        given = self.body.input
        if isinstance(given, str):
            given = [{"role": "user", "content": [{"type": "input_text", "text": given}]}]
        named = []
        for item in given:
            kind = item.get("type") or "message"
            prefix = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}.get(kind, "item")
            named.append({"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "completed", **item})
        return named


async def _whole(service: Any, tasks: Any, turn: Turn) -> Response:
    (answer,), (deltas,) = await collect(service, tasks, turn.id)
    for delta in deltas:
        _drop(turn.items.add(delta))
    status = _status(answer)
    _drop(turn.items.end(status == "completed"))
    response = turn.object(status, answer)
    await turn.keep(response)
    return Response(_encode(response), media_type="application/json")


def _drop(events: Iterable[Event]) -> None:
    for _ in events:
        pass


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


async def _stream(merged: Merged, turn: Turn, keepalive_s: float) -> AsyncGenerator[bytes, None]:
    send = _Sequence()
    try:
        opening = turn.object("in_progress")
        yield send([{"type": kind, "response": opening} for kind in ("response.created", "response.in_progress")])
        while not merged.done:
            batch = await merged.next_batch(keepalive_s)
            if not batch:  # an event that says nothing new keeps the connection open
                yield send([{"type": "response.in_progress", "response": turn.object("in_progress")}])
            for _, delta in batch:
                if delta is not None and (data := send(turn.items.add(delta))):
                    yield data
        answer = merged.answers[0]
        status = _status(answer)
        if data := send(turn.items.end(status == "completed")):
            yield data
        response = turn.object(status, answer)
        await turn.keep(response)
        yield send([{"type": f"response.{status}", "response": response}])
    except Exception as error:  # the status line is out: the error becomes the stream's last event
        fault = as_request_error(error)
        _drop(turn.items.end(False))
        yield send([{"type": "response.failed", "response": turn.object("failed", error=fault)}])


class _Sequence:
    """Encodes events as server-sent ones, with their names and numbers."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, events: Iterable[Event]) -> bytes:
        return b"".join(map(self._one, events))

    def _one(self, event: Event) -> bytes:
        data = named_event({**event, "sequence_number": self._next})
        self._next += 1
        return data
