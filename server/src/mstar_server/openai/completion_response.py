"""What ``POST /v1/completions`` answers, whole or in chunks (both have one shape)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mstar.spec.processor import Delta, TextDelta
from mstar.spec.request import TokenLogprob
from mstar_server.openai.text_answers import Head, finish_reason, texts, usage_object
from mstar_server.protocols import Answer

__all__ = ["CompletionChunks", "completion"]

_encode = msgspec.json.Encoder().encode

TokenBytes = Callable[[int], bytes]


class CompletionChunks:
    """Encodes the chunks of one stream.

    :param usage: the client asked for usage: every chunk has the field, null until the last.
    :param token_bytes: set when the client asked for log-probabilities. :param prompts: what each answer begins with.
    :param samples: answers per prompt.
    """

    heavy = False

    def __init__(self, head: Head, usage: bool, token_bytes: TokenBytes | None, prompts: Sequence[str], samples: int):
        self._head, self._usage, self._token_bytes = head, usage, token_bytes
        self._prompts, self._samples = prompts, samples
        self._offsets = [len(prompt) for prompt in prompts]
        self.keepalive = self._chunk([_choice(0, "", None, None)])

    def begin(self, index: int) -> bytes:
        prompt = self._prompts[index]
        return self._chunk([_choice(index, prompt, None, None)]) if prompt else b""

    def delta(self, index: int, delta: Delta) -> bytes:
        if not isinstance(delta, TextDelta) or not (delta.text or delta.logprobs):
            return b""
        logprobs = None
        if self._token_bytes is not None and delta.logprobs:
            logprobs = _logprobs(delta.logprobs, self._token_bytes, self._offsets[index])
        self._offsets[index] += len(delta.text)
        return self._chunk([_choice(index, delta.text, logprobs, None)])

    def finish(self, index: int, answer: Answer) -> bytes:
        return self._chunk([_choice(index, "", None, finish_reason(answer.finish_reason))])

    def usage(self, answers: Sequence[Answer]) -> bytes:
        return self._chunk([], usage_object(answers, self._samples)) if self._usage else b""

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        body = _body(self._head, choices)
        if self._usage:
            body["usage"] = usage
        return b"data: " + _encode(body) + b"\n\n"


def completion(
    head: Head,
    answers: Sequence[Answer],
    deltas: Sequence[Sequence[Delta]],
    *,
    token_bytes: TokenBytes | None,
    prompts: Sequence[str],
    samples: int,
) -> bytes:
    """The whole answer: one choice per answer, from its *deltas*, each after its text of *prompts*."""
    choices = []
    for index, (answer, said) in enumerate(zip(answers, deltas, strict=True)):
        parts, logprobs = texts(said), None
        if token_bytes is not None:
            logprobs = _logprobs([item for part in parts for item in part.logprobs], token_bytes, len(prompts[index]))
        text = prompts[index] + "".join(part.text for part in parts)
        choices.append(_choice(index, text, logprobs, finish_reason(answer.finish_reason)))
    return _encode({**_body(head, choices), "usage": usage_object(answers, samples)})


def _body(head: Head, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
        "choices": choices,
    }


def _choice(index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(reports: Sequence[TokenLogprob], token_bytes: TokenBytes, offset: int) -> dict[str, Any]:
    """*offset*: where the first token's text begins, in characters of the answer."""
    tokens, offsets, top = [], [], []
    for report in reports:
        text = _spelled(report.token, token_bytes)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        # alternatives that spell the same (halves of a character) share a key; the likelier one stays
        alternatives: dict[str, float] = {}
        for token, value in report.top:
            alternatives.setdefault(_spelled(token, token_bytes), _finite(value))
        top.append(alternatives)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(report.logprob) for report in reports],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _spelled(token: int, token_bytes: TokenBytes) -> str:
    return token_bytes(token).decode("utf-8", "replace")


def _finite(value: float) -> float:
    return max(value, -9999.0)  # OpenAI's lowest value; JSON has no minus infinity
