"""``POST /v1/embeddings``: the body, the tasks that it asks for, and the answer.

Reference: OpenAI's API reference of embeddings and the types of its Python client.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from mstar.spec.model import ModelSpec
from mstar.spec.processor import ArrayDelta, Delta
from mstar.spec.tasks import EmbeddingTask
from mstar_server.openai.completion_request import text_inputs
from mstar_server.openai.knobs import knobs_of
from mstar_server.openai.text_answers import Head
from mstar_server.openai.text_request import Whole
from mstar_server.options import ServerOptions
from mstar_server.protocols import Answer

__all__ = ["EmbeddingAdapter", "EmbeddingRequest", "embeddings"]

Ids = list[Whole]


class EmbeddingRequest(BaseModel):
    """Texts to embed. A model's further knobs are fields of the same object."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: str
    input: str | list[str] | Ids | list[Ids] = Field(description="A text, its token ids, or a list of either.")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = Field(None, ge=1, description="Of each vector; only for models that can shorten theirs.")
    user: Any = Field(None, description="Accepted and ignored.")


class EmbeddingAdapter:
    """Builds one task per text."""

    def __init__(self, spec: ModelSpec, options: ServerOptions):
        self.spec, self.options = spec, options

    def tasks(self, body: EmbeddingRequest) -> Sequence[EmbeddingTask]:
        knobs = knobs_of(body, self.spec.knobs)
        inputs = text_inputs(body.input, "input", self.options)
        return [EmbeddingTask(knobs=knobs, input=text, dimensions=body.dimensions) for text in inputs]


def embeddings(head: Head, answers: Sequence[Answer], deltas: Sequence[Sequence[Delta]], *, encode: bool) -> bytes:
    """The whole answer. *encode*: vectors as base64 of little-endian float32."""
    tokens = sum(answer.prompt_tokens for answer in answers)
    data = [
        {"object": "embedding", "index": index, "embedding": _vector(said, encode)} for index, said in enumerate(deltas)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": head.model, "usage": usage})


def _vector(said: Sequence[Delta], encode: bool) -> str | list[float]:
    parts = [delta.data for delta in said if isinstance(delta, ArrayDelta) and delta.modality == "embedding"]
    vector = np.concatenate([np.asarray(part, "<f4").reshape(-1) for part in parts])
    return base64.b64encode(vector.tobytes()).decode() if encode else [float(value) for value in vector]
