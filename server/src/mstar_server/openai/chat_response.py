"""What ``POST /v1/chat/completions`` answers, whole or in chunks.

A chunk is put together from fragments that are encoded once per answer: per token only the new text is encoded.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mstar.spec.processor import AudioDelta, Delta, ReasoningDelta, TextDelta, ToolCallDelta
from mstar.spec.request import TokenLogprob
from mstar_server.media.encode.sound import heavy
from mstar_server.openai.chat_voice import ChatVoice, whole_voice
from mstar_server.openai.text_answers import Head, finish_reason, texts, usage_object
from mstar_server.protocols import Answer

__all__ = ["ChatChunks", "chat_completion", "chat_finish", "logprob_entries"]

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
    :param sound: format of the sound, for answers that are heard: what is said is its transcript then.
    """

    def __init__(self, head: Head, usage: bool, token_bytes: Callable[[int], bytes] | None, sound: str | None = None):
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
        self._reasoning, self._called = 0, set[int]()
        self._sound, self._voices, self._created = sound, dict[int, ChatVoice](), head.created
        self.heavy = sound is not None and heavy(sound)
        self.keepalive = self._choice(0, b'{"content":""}')

    def begin(self, index: int) -> bytes:
        return self._choice(index, b'{"role":"assistant","content":""}')

    def delta(self, index: int, delta: Delta) -> bytes:
        if isinstance(delta, TextDelta):
            if not (delta.text or delta.logprobs):
                return b""
            logprobs = b"null"
            if self._token_bytes is not None and delta.logprobs:
                entries = logprob_entries(delta.logprobs, self._token_bytes)
                logprobs = _encode({"content": entries, "refusal": None})
            if self._sound is not None:
                said = self._voice(index).piece(transcript=delta.text)
                return self._choice(index, _encode({"audio": said}), logprobs)
            return self._choice(index, b'{"content":' + _encode(delta.text) + b"}", logprobs)
        if isinstance(delta, AudioDelta) and self._sound is not None:
            heard = self._voice(index).feed(delta)
            return self._choice(index, _encode({"audio": heard})) if heard else b""
        if isinstance(delta, ReasoningDelta):
            self._reasoning += len(delta.tokens)
            return self._choice(index, b'{"reasoning_content":' + _encode(delta.text) + b"}") if delta.text else b""
        if isinstance(delta, ToolCallDelta) and (delta.name or delta.arguments):
            self._called.add(index)
            return self._choice(index, _encode({"tool_calls": [_call_piece(delta)]}))
        return b""

    def finish(self, index: int, answer: Answer) -> bytes:
        reason = chat_finish(answer.finish_reason, index in self._called)
        ending = b""
        if self._sound is not None:
            ending = b"".join([self._choice(index, _encode({"audio": p})) for p in self._voice(index).finish()])
        # an empty text rather than no field: some clients choke on a delta with neither role nor content
        return ending + self._choice(index, b'{"content":""}', finish=_encode(reason))

    def usage(self, answers: Sequence[Answer]) -> bytes:
        if not self._usage:
            return b""
        return self._prefix + b'],"usage":' + _encode(usage_object(answers, None, self._reasoning)) + b"}\n\n"

    def _voice(self, index: int) -> ChatVoice:
        assert self._sound is not None
        if index not in self._voices:
            self._voices[index] = ChatVoice(self._sound, self._created)
        return self._voices[index]

    def _choice(self, index: int, delta: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._prefix, index, delta, logprobs, finish, self._suffix,
        )  # fmt: skip


def chat_completion(
    head: Head,
    answers: Sequence[Answer],
    deltas: Sequence[Sequence[Delta]],
    token_bytes: Callable[[int], bytes] | None,
    sound: str | None = None,
) -> bytes:
    """The whole answer: one choice per answer, from its *deltas*. *sound*: as for :class:`ChatChunks`."""
    choices, reasoning = [], 0
    for index, (answer, said) in enumerate(zip(answers, deltas, strict=True)):
        logprobs = None
        if token_bytes is not None:
            entries = logprob_entries([item for part in texts(said) for item in part.logprobs], token_bytes)
            logprobs = {"content": entries, "refusal": None}
        reasoning += sum(len(delta.tokens) for delta in said if isinstance(delta, ReasoningDelta))
        message = _message(said)
        if sound is not None and (voice := whole_voice(said, sound, head.created, message["content"])):
            message |= {"content": None, "audio": voice}
        reason = chat_finish(answer.finish_reason, "tool_calls" in message)
        choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason})
    return _encode(
        {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": choices,
            "usage": usage_object(answers, None, reasoning),
        }
    )


def _message(said: Sequence[Delta]) -> dict[str, Any]:
    text = "".join(part.text for part in texts(said))
    calls: dict[int, dict[str, Any]] = {}
    for delta in said:
        if isinstance(delta, ToolCallDelta) and (delta.name or delta.arguments):
            piece = _call_piece(delta)
            if delta.index in calls:
                calls[delta.index]["function"]["arguments"] += delta.arguments
            else:
                calls[delta.index] = {"id": piece["id"], "type": "function", "function": piece["function"]}
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if thoughts := "".join(delta.text for delta in said if isinstance(delta, ReasoningDelta)):
        message["reasoning_content"] = thoughts
    if calls:
        message |= {"content": text or None, "tool_calls": list(calls.values())}
    return message


def _call_piece(delta: ToolCallDelta) -> dict[str, Any]:
    """A call's first piece has its id and the tool's name, further ones have arguments only."""
    if delta.name:
        head = {"id": f"call_{uuid.uuid4().hex}", "type": "function"}
        return {"index": delta.index, **head, "function": {"name": delta.name, "arguments": delta.arguments}}
    return {"index": delta.index, "function": {"arguments": delta.arguments}}


def chat_finish(reason: str | None, called: bool) -> str:
    """OpenAI's finish reason; an answer that came to its end with a call of a tool has one of its own."""
    found = finish_reason(reason)
    return "tool_calls" if called and found == "stop" else found
