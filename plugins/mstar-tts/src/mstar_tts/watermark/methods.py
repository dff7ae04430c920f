"""The kinds of marks behind one interface: what a deployment's option stands for."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from mstar.nn.node import Node, Step
from mstar.spec.errors import SetupError
from mstar.spec.graph import Fixed, Ramp, Whole
from mstar.spec.resources import RecurrentState, ResourceSpec
from mstar.weights.names import WeightMap
from mstar_tts.codec_blocks import Carry
from mstar_tts.seanet_config import SeanetConfig
from mstar_tts.watermark.audioseal import HOP, Generator, audioseal_sizes, audioseal_weights
from mstar_tts.watermark.options import AudioWatermark, message_bits
from mstar_tts.watermark.perth import Perth, installed_perth, perth_weights

__all__ = ["NODE", "Method", "method_of"]

NODE = "watermark"
"""Name of the node that marks, and of its resource."""

_ENDS = "ends"


class Method(abc.ABC):
    """A way to mark sound. Made from the option when a model starts.

    :raises SetupError: what it needs is not there.
    """

    @abc.abstractmethod
    def check(self, pieces: Fixed | Ramp | Whole) -> None:
        """:raises SetupError: sound cannot be marked in such pieces."""

    def resources(self) -> Mapping[str, ResourceSpec]:
        """What the node keeps of a request, under :data:`NODE`."""
        return {}

    @abc.abstractmethod
    def node(self) -> Node:
        """The node, which gets `samples` ``[rows, S]`` in -1…1 and gives `marked`, the same with their mark."""

    @abc.abstractmethod
    def weights(self, node: Node) -> WeightMap:
        """Of a *node* that :meth:`node` has made."""

    def loaded(self, node: Node) -> None:
        """Called when its weights are in."""


def method_of(option: AudioWatermark, rate: int) -> Method:
    """What *option*, which is enabled, asks for. *rate*: samples a second of the sound."""
    return _AudioSeal(option) if option.method == "audioseal" else _Perth(option, rate)


def _given_file(option: AudioWatermark) -> Path | None:
    if option.generator is None:
        return None
    file = Path(option.generator).expanduser()
    if not file.exists():
        raise SetupError(f"audio_watermark.generator: there is no {option.generator!r}")
    return file


# --- AudioSeal --------------------------------------------------------------------------------------------------------
class _AudioSeal(Method):
    """Piece by piece, with the state of a request between them."""

    def __init__(self, option: AudioWatermark):
        file = _given_file(option)
        if file is None:
            raise SetupError(
                "audio_watermark.enabled needs audio_watermark.generator: the file generator_streaming.pth of "
                "https://huggingface.co/facebook/audioseal, which "
                "'hf download facebook/audioseal generator_streaming.pth --local-dir DIR' fetches"
            )
        self._file, self._sizes = file, audioseal_sizes(file)
        self._bits, self._strength = message_bits(option.message), option.alpha

    def check(self, pieces: Fixed | Ramp | Whole) -> None:
        sizes = () if isinstance(pieces, Whole) else pieces.sizes if isinstance(pieces, Ramp) else (pieces.size,)
        if any(size % HOP for size in sizes):
            raise SetupError(f"pieces of {sizes} samples cannot be marked one by one; multiples of {HOP} can")

    def resources(self) -> Mapping[str, ResourceSpec]:
        with torch.device("meta"):
            size = Generator(self._bits, self._sizes).carried
        return {NODE: RecurrentState({_ENDS: ((size,), "float32")})}

    def node(self) -> Node:
        made = _AudioSealNode(self._bits, self._strength, self._sizes)
        audioseal_weights(made.generator, self._file)
        return made

    def weights(self, node: Node) -> WeightMap:
        assert isinstance(node, _AudioSealNode)
        found = audioseal_weights(node.generator, self._file)
        places = tuple(replace(place, target=f"generator.{place.target}") for place in found.placements)
        return replace(found, placements=places)

    def loaded(self, node: Node) -> None:
        assert isinstance(node, _AudioSealNode)
        node.generator.settle()


class _AudioSealNode(Node):
    """Float32 always."""

    def __init__(self, message: Sequence[int], strength: float, sizes: SeanetConfig):
        super().__init__()
        self.strength = strength
        self.generator = Generator(message, sizes)

    def forward(self, step: Step, samples: Tensor) -> dict[str, Tensor]:
        """*samples* follow those of the steps before."""
        view = step[NODE]
        ends = view.read(_ENDS)
        carry = Carry(ends)
        mark = self.generator(samples, carry)
        view.write(_ENDS, carry.state(ends))
        return {"marked": (samples + self.strength * mark).clamp(-1, 1)}


# --- PerTh ------------------------------------------------------------------------------------------------------------
class _Perth(Method):
    """Whole sounds."""

    def __init__(self, option: AudioWatermark, rate: int):
        if option.message not in (0, "0" * 16):
            raise SetupError("audio_watermark.message: PerTh's mark carries none; leave it out, or use audioseal")
        self._file = _given_file(option) or installed_perth()
        self._strength, self._rate = option.alpha, rate

    def check(self, pieces: Fixed | Ramp | Whole) -> None:
        if not isinstance(pieces, Whole):
            raise SetupError(
                "audio_watermark.method: PerTh marks whole sounds, and this model's sound is sent while it is made; "
                "use audioseal"
            )

    def node(self) -> Node:
        return _PerthNode(self._strength, self._rate)

    def weights(self, node: Node) -> WeightMap:
        assert isinstance(node, _PerthNode)
        found = perth_weights(node.perth, self._file)
        places = tuple(replace(place, target=f"perth.{place.target}") for place in found.placements)
        return replace(found, placements=places)


class _PerthNode(Node):
    """Float32 always."""

    def __init__(self, strength: float, rate: int):
        super().__init__()
        self.strength, self.rate = strength, rate
        self.perth = Perth()

    def regions(self) -> Iterator[tuple[str, nn.Module]]:
        """None: sounds are of many lengths."""
        return iter(())

    def forward(self, step: Step, samples: Tensor) -> dict[str, Tensor]:
        """*samples*: whole sounds."""
        return {"marked": (samples + self.strength * self.perth(samples, self.rate)).clamp(-1, 1)}
