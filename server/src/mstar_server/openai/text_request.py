"""What requests for text have in common, on every route that takes them: the fields, and what is made of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator
from pydantic_core import PydanticCustomError

from mstar.spec.errors import RequestError, nearest
from mstar.spec.knobs import Knobs
from mstar.spec.tasks import Task
from mstar_server.openai.knobs import knobs_of
from mstar_server.options import ServerOptions

__all__ = [
    "Closed",
    "Number",
    "StreamOptions",
    "TextRequest",
    "Whole",
    "check_stream_options",
    "choices",
    "knob_values",
    "logit_bias",
    "samples",
    "stop_strings",
]

T = TypeVar("T", bound=Task)

Number = Annotated[float, Field(strict=True)]
Whole = Annotated[int, Field(strict=True)]


class Closed(BaseModel):
    """An object inside the body. It has no fields but its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _no_other_field(cls, value: Any) -> Any:
        """As ``extra="forbid"``, which the schema shows, but with the nearest field in the error."""
        for name in value if isinstance(value, Mapping) else ():
            if name not in cls.model_fields:
                known = nearest(str(name), cls.model_fields)
                raise PydanticCustomError("extra_forbidden", "unknown", {"field": str(name), "nearest": known})
        return value


class StreamOptions(Closed):
    include_usage: StrictBool | None = Field(None, description="End the stream with a chunk that carries the usage.")
    include_obfuscation: StrictBool | None = Field(None, description="Accepted and ignored.")


class TextRequest(BaseModel):
    """Fields of every request for text. A model's further knobs are fields of the same object."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: Whole | None = Field(None, description="How many choices.")

    temperature: Number | None = None
    top_p: Number | None = None
    seed: Whole | None = None
    max_tokens: Whole | None = Field(None, description="In a chat the older name of max_completion_tokens.")
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, Number] | None = Field(None, description="Token id → -100…100, added to its logit.")

    top_k: Whole | None = Field(None, description="Extension.")
    min_p: Number | None = Field(None, description="Extension.")
    repetition_penalty: Number | None = Field(None, description="Extension.")
    min_tokens: Whole | None = Field(None, description="Extension.")
    ignore_eos: StrictBool | None = Field(None, description="Extension.")
    include_stop_str_in_output: StrictBool | None = Field(
        None, description="Extension: keep the stop string that ended it."
    )
    user: Any = Field(None, description="Accepted and ignored.")

    def further_knobs(self, knobs: type[Knobs]) -> dict[str, Any]:
        """What other fields of the request say in *knobs*' words."""
        return {}

    def token_limit(self) -> tuple[str, int | None]:
        """The field that bounds the answer's tokens, and its value."""
        return "max_tokens", self.max_tokens


_KNOBS = (
    "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "top_k", "min_p", "repetition_penalty",
    "min_tokens", "ignore_eos",
)  # fmt: skip


def knob_values(body: TextRequest, knobs: type[Knobs]) -> Knobs:
    """The knobs that the client set, validated as the model wants them. A field sent as ``null`` counts as not sent."""
    values = {name: value for name in _KNOBS if (value := getattr(body, name)) is not None}
    values |= body.further_knobs(knobs)
    field, limit = body.token_limit()
    if limit is not None:
        values["max_tokens"] = limit
    try:
        return knobs_of(body, knobs, values)
    except RequestError as error:
        if error.param == "max_tokens" and limit is not None:  # name the field as the client spelled it
            error.param = field
            error.message = error.message.replace("'max_tokens'", repr(field))
        raise


def check_stream_options(body: TextRequest) -> None:
    """Refuse ``stream_options`` where nothing is streamed, as OpenAI's server does."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("'stream_options' needs 'stream': true", param="stream_options")


def choices(n: int | None, options: ServerOptions) -> int:
    """How many choices ``n`` asks for."""
    limit = options.max_choices
    if n is not None and not 1 <= n <= limit:
        near = min(max(n, 1), limit)
        raise RequestError(f"'n' must be 1…{limit}, got {n}; the nearest valid value is {near}", param="n")
    return n or 1


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """``stop`` as a tuple, whichever way it came."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    """``logit_bias`` by token id; a 400 about it if one is no id or beyond ±100."""
    result: dict[int, float] = {}
    for token, value in (bias or {}).items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 18):  # more digits are beyond 64 bits
            raise RequestError(f"'logit_bias': {token[:40]!r} is not a token id", param="logit_bias")
        if not (math.isfinite(value) and -100 <= value <= 100):
            raise RequestError(f"'logit_bias': {value} for token {token[:40]} is not in -100…100", param="logit_bias")
        result[int(token)] = value
    return result


def samples(task: T, n: int) -> list[T]:
    """*task* for each of *n* choices. Each has its own seed when the request has one."""
    seed = getattr(task.knobs, "seed", None)
    if seed is None:
        return [task] * n
    # seeds are 64-bit: the last ones wrap round
    seeds = [(seed + i + 2**63) % 2**64 - 2**63 for i in range(n)]
    return [dataclasses.replace(task, knobs=task.knobs.model_copy(update={"seed": s})) for s in seeds]
