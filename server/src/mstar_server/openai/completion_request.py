"""``POST /v1/completions``: the body as OpenAI's clients send it, and the tasks that it asks for.

Reference: OpenAI's API reference of completions and the request types of its Python client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, StrictBool

from mstar.spec.errors import RequestError
from mstar.spec.model import ModelSpec
from mstar.spec.tasks import CompletionTask
from mstar_server.openai.text_request import (
    TextRequest,
    Whole,
    check_stream_options,
    choices,
    knob_values,
    logit_bias,
    samples,
    stop_strings,
)
from mstar_server.options import ServerOptions

__all__ = ["CompletionAdapter", "CompletionRequest", "text_inputs"]

Ids = list[Whole]


class CompletionRequest(TextRequest):
    """A request to go on with a text. A model's further knobs are fields of the same object."""

    prompt: str | list[str] | Ids | list[Ids] = Field(description="A text, its token ids, or a list of either.")
    logprobs: Whole | None = Field(None, ge=0, le=20, description="Alternatives per token; 0: the chosen one only.")
    echo: StrictBool | None = Field(None, description="Begin the answer with the prompt.")
    best_of: Whole | None = Field(None, description="Must equal `n`.")
    suffix: str | None = Field(None, description="Not supported.")


class CompletionAdapter:
    """Builds the tasks of one request: for each prompt one per choice, prompts in the client's order."""

    def __init__(self, spec: ModelSpec, options: ServerOptions):
        self.spec, self.options = spec, options

    def tasks(self, body: CompletionRequest) -> Sequence[CompletionTask]:
        if body.suffix:
            raise _unsupported("'suffix' is not supported", "suffix")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise _unsupported(f"'best_of' must equal 'n' ({body.n or 1}), got {body.best_of}", "best_of")
        if body.echo and body.logprobs is not None:
            raise _unsupported("'echo' with 'logprobs' is not supported: prompts have no log-probabilities", "echo")
        check_stream_options(body)
        number, found = choices(body.n, self.options), []
        common: dict[str, Any] = {
            "knobs": knob_values(body, self.spec.knobs),
            "want": ("text",),
            "stop": stop_strings(body.stop),
            "include_stop": bool(body.include_stop_str_in_output),
            "logprobs": body.logprobs,
            "logit_bias": logit_bias(body.logit_bias),
        }
        for prompt in text_inputs(body.prompt, "prompt", self.options):
            found += samples(CompletionTask(prompt=prompt, **common), number)
        return found


def text_inputs(
    value: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], param: str, options: ServerOptions
) -> list[str | Sequence[int]]:
    """The texts (or their ids) that *value* holds: one, or a list. *param*: its name in errors."""
    found: list[Any] = [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else list(value)
    if not found:
        raise RequestError(f"{param!r} is empty", param=param)
    if len(found) > options.max_inputs:
        raise RequestError(f"{len(found)} texts are more than the limit of {options.max_inputs}", param=param)
    size = sum(map(len, found))
    if size > options.max_text_chars:
        message = f"{param!r} of {size} characters is longer than the limit of {options.max_text_chars}"
        raise RequestError(message, param=param, code="text_too_long")
    for i, text in enumerate(found):
        if not len(text):
            where = f"{param}[{i}]" if len(found) > 1 else param
            raise RequestError(f"{where!r} is empty", param=where)
    return found


def _unsupported(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="unsupported_parameter")
