"""The codec as a node: frames of codes to sound, each request's state kept between its pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from mstar.nn.node import Node, Step
from mstar.spec.graph import Entry, Port
from mstar.spec.resources import RecurrentState
from mstar.weights.names import WeightMap
from mstar_tts.codec_blocks import settle
from mstar_tts.qwen3_tts.codec_config import FOLDER, CodecConfig
from mstar_tts.qwen3_tts.codec_decoder import CodecDecoder, DecoderState

__all__ = ["STATE", "Codec", "codec_entries", "codec_state", "codec_weights"]

STATE = "codec"
"""Name of the resource with the codec's state."""

_UNUSED = (r"encoder\..*", r"decoder\.quantizer\.rvq_(first|rest)\.input_proj\..*")


def codec_state(config: CodecConfig, dtype: str = "float32") -> RecurrentState:
    """What a request keeps between pieces of sound: 5 MB at the published sizes."""
    shapes = CodecDecoder.state_shapes(config.decoder)
    return RecurrentState({"done": ((), "int64"), **{name: (shape, dtype) for name, shape in shapes.items()}})


def codec_entries(config: CodecConfig, sizes: Sequence[int]) -> tuple[Entry, Entry]:
    """The node's entries. *sizes*: frames of the pieces that are captured before the first request."""
    codes = Port("codes", "int64", ("C", config.groups), "stacked")
    samples = Port("samples", "float32", ("S",), "stacked")
    captured = tuple({"C": size} for size in sizes)
    speak = Entry(inputs=(codes,), outputs=(samples,), resources=(STATE,), graph_sizes=captured)
    return speak, Entry("prime", inputs=(Port("frames", "int64", ("R", config.groups)),), resources=(STATE,))


def codec_weights(module: Codec) -> WeightMap:
    """Everything is read in float32; :meth:`Codec.settle` rounds."""
    return WeightMap.from_module(module, ignore=_UNUSED, float32=(".*",), folder=FOLDER)


class Codec(Node):
    """:param dtype: of weights and arithmetic; samples are float32 always."""

    def __init__(self, config: CodecConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.dtype = dtype
        self.decoder = CodecDecoder(config.decoder)

    def settle(self) -> None:
        """Once the published weights are in: compute from them what is used instead."""
        settle(self)
        for parameter in self.parameters():  # buffers, which angles are computed from, stay float32
            parameter.data = parameter.data.to(self.dtype)

    def regions(self) -> Iterator[tuple[str, nn.Module]]:
        """The transformer's layers: what lies between convolutions is one kernel already."""
        path = "decoder.pre_transformer.layers"
        yield from ((f"{path}.{index}", layer) for index, layer in enumerate(self.decoder.pre_transformer.layers))

    def forward(self, step: Step, codes: Tensor) -> dict[str, Tensor]:
        """*codes* ``[rows, C, groups]``: frames that follow those of the steps before. Returns `samples` float32
        ``[rows, C * samples_per_frame]`` in -1…1."""
        view = step[STATE]
        state = DecoderState(**{name: view.read(name) for name in ("done", "lead", "kv", "tail")})
        samples, after = self.decoder(codes, state)
        _write(view, after)
        return {"samples": samples.float()}

    def prime(self, step: Step, frames: Tensor) -> dict[str, Tensor]:
        """Frames that were heard before a request's first: a clone goes on from the end of its clip. *frames*: those of
        all rows, one after the other, ``[N, groups]``."""
        view = step[STATE]
        state = {name: view.read(name) for name in ("done", "lead", "kv", "tail")}
        after = []
        for row, codes in enumerate(torch.split(frames, list(step.lengths))):
            before = DecoderState(**{name: value[row : row + 1] for name, value in state.items()})
            after.append(self.decoder.prime(codes[None], before))
        _write(view, DecoderState(**{name: torch.cat([getattr(one, name) for one in after]) for name in state}))
        return {}


def _write(view: object, state: DecoderState) -> None:
    for name in ("done", "lead", "kv", "tail"):
        view.write(name, getattr(state, name))  # type: ignore[attr-defined]
