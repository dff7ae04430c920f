"""What ``POST /v1/chat/completions`` answers, whole or in chunks.

A chunk is put together from fragments that are encoded once per answer: per token only the new text is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mstar.spec.errors import RequestError
from mstar.spec.processor import Processor, TextDelta
from mstar.spec.request import TokenLogprob
from mstar_server.protocols import Answer

__all__ = [
    "ChatChunks",
    "Head",
    "chat_completion",
    "finish_reason",
    "logprob_entries",
    "token_bytes_of",
    "usage_object",
]

_encode = msgspec.json.Encoder().encode
_FINISH = {"stop": "stop", "length": "length", "done": "stop", "end_of_input": "stop"}


def finish_reason(reason: str | None) -> str:
    """The engine's finish reason in OpenAI's words; a model's own word is passed on."""
    return "stop" if reason is None else _FINISH.get(reason, reason)


def usage_object(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of all choices. The prompt, which they share, counts once."""
    prompt = answers[0].prompt_tokens
    completion = sum(answer.completion_tokens for answer in answers)
    first = answers[0].usage
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": first.cached if first is not None else 0},
    }


def logprob_entries(logprobs: Sequence[TokenLogprob], token_bytes: Callable[[int], bytes]) -> list[dict[str, Any]]:
    """*logprobs* in OpenAI's shape."""
    return [
        _entry(item.token, item.logprob, token_bytes)
        | {"top_logprobs": [_entry(token, value, token_bytes) for token, value in item.top]}
        for item in logprobs
    ]


def _entry(token: int, logprob: float, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    data = token_bytes(token)
    # OpenAI's lowest value for "practically impossible" is -9999; JSON has no minus infinity
    return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}


def token_bytes_of(processor: Processor) -> Callable[[int], bytes]:
    """How *processor* spells a token: processors that report log-probabilities have ``token_bytes(id) -> bytes``."""
    found: Callable[[int], bytes] | None = getattr(processor, "token_bytes", None)
    if found is None:
        message = "'logprobs' is not supported by this model"
        raise RequestError(message, param="logprobs", code="unsupported_parameter")
    return found


@dataclass(frozen=True)
class Head:
    """What all chunks of an answer, and the answer itself, have in common."""

    id: str
    created: int
    model: str
    fingerprint: str


class ChatChunks:
    """Encodes the chunks of one stream.

    :param usage: the client asked for usage: every chunk has the field, null until the last.
    :param token_bytes: set when the client asked for log-probabilities.
    """

    def __init__(self, head: Head, usage: bool, token_bytes: Callable[[int], bytes] | None):
        common = {
            "id": head.id,
            "object": "chat.completion.chunk",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
        }
        self._prefix = b"data: " + _encode(common)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._token_bytes = token_bytes
        self.keepalive = self._choice(0, b'{"content":""}')

    def role(self, index: int) -> bytes:
        return self._choice(index, b'{"role":"assistant","content":""}')

    def text(self, index: int, delta: TextDelta) -> bytes:
        logprobs = b"null"
        if self._token_bytes is not None and delta.logprobs:
            entries = logprob_entries(delta.logprobs, self._token_bytes)
            logprobs = _encode({"content": entries, "refusal": None})
        return self._choice(index, b'{"content":' + _encode(delta.text) + b"}", logprobs)

    def finish(self, index: int, reason: str) -> bytes:
        # an empty text rather than no field: some clients choke on a delta with neither role nor content
        return self._choice(index, b'{"content":""}', finish=_encode(reason))

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._prefix + b'],"usage":' + _encode(usage) + b"}\n\n"

    def _choice(self, index: int, delta: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._prefix, index, delta, logprobs, finish, self._suffix,
        )  # fmt: skip


def chat_completion(
    head: Head,
    answers: Sequence[Answer],
    deltas: Sequence[Sequence[TextDelta]],
    token_bytes: Callable[[int], bytes] | None,
) -> bytes:
    """The whole answer: one choice per answer, from its *deltas*."""
    choices = []
    for index, (answer, parts) in enumerate(zip(answers, deltas, strict=True)):
        logprobs = None
        if token_bytes is not None:
            entries = logprob_entries([item for part in parts for item in part.logprobs], token_bytes)
            logprobs = {"content": entries, "refusal": None}
        message = {"role": "assistant", "content": "".join(part.text for part in parts), "refusal": None}
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": finish_reason(answer.finish_reason),
            }
        )
    return _encode(
        {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": choices,
            "usage": usage_object(answers),
        }
    )
