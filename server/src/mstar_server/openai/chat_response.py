"""What ``POST /v1/chat/completions`` answers, whole or in chunks.

A chunk is put together from fragments that are encoded once per answer: per token only the new text is encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mstar.spec.processor import Delta, TextDelta
from mstar.spec.request import TokenLogprob
from mstar_server.openai.text_answers import Head, finish_reason, texts, usage_object
from mstar_server.protocols import Answer

__all__ = ["ChatChunks", "chat_completion", "logprob_entries"]

_encode = msgspec.json.Encoder().encode


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
        self._token_bytes, self._usage = token_bytes, usage
        self.keepalive = self._choice(0, b'{"content":""}')

    def begin(self, index: int) -> bytes:
        return self._choice(index, b'{"role":"assistant","content":""}')

    def delta(self, index: int, delta: Delta) -> bytes:
        if not isinstance(delta, TextDelta) or not (delta.text or delta.logprobs):
            return b""
        logprobs = b"null"
        if self._token_bytes is not None and delta.logprobs:
            entries = logprob_entries(delta.logprobs, self._token_bytes)
            logprobs = _encode({"content": entries, "refusal": None})
        return self._choice(index, b'{"content":' + _encode(delta.text) + b"}", logprobs)

    def finish(self, index: int, answer: Answer) -> bytes:
        # an empty text rather than no field: some clients choke on a delta with neither role nor content
        return self._choice(index, b'{"content":""}', finish=_encode(finish_reason(answer.finish_reason)))

    def usage(self, answers: Sequence[Answer]) -> bytes:
        return self._prefix + b'],"usage":' + _encode(usage_object(answers)) + b"}\n\n" if self._usage else b""

    def _choice(self, index: int, delta: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._prefix, index, delta, logprobs, finish, self._suffix,
        )  # fmt: skip


def chat_completion(
    head: Head,
    answers: Sequence[Answer],
    deltas: Sequence[Sequence[Delta]],
    token_bytes: Callable[[int], bytes] | None,
) -> bytes:
    """The whole answer: one choice per answer, from its *deltas*."""
    choices = []
    for index, (answer, said) in enumerate(zip(answers, deltas, strict=True)):
        parts, logprobs = texts(said), None
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
