"""AudioSeal: a mark that carries sixteen bits, added to sound as it streams, and the detector that finds it.

The generator is causal. It is run piece by piece with everything that it carries on, in encoder and decoder, so that a
sound in pieces gets the mark of the whole one; the reference's own streaming carries the encoder alone.

Reference: ``audioseal`` 0.2.0 (San Roman et al., 2024), cards ``audioseal_wm_streaming`` and
``audioseal_detector_streaming``. Rates are not converted: the detector finds the mark at the rate at which it was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from mstar.spec.errors import WeightsError
from mstar.weights.checkpoint import TensorInfo, open_checkpoint
from mstar.weights.names import Placement, WeightMap
from mstar_tts.codec_blocks import Carry, CausalConv, CausalUpsample, carried, settle
from mstar_tts.seanet import LSTM, decoder_layers, encoder_layers, run
from mstar_tts.seanet_config import SeanetConfig
from mstar_tts.watermark.options import BITS

__all__ = ["HOP", "SEANET", "Detector", "Generator", "audioseal_sizes", "audioseal_weights"]

SEANET = SeanetConfig(filters=32, width=128, ratios=(2, 4, 5, 8), lstm=2)
"""Sizes of the published models."""

HOP = 320
"""Samples of one of the network's vectors: all pieces but the last are multiples."""

_DETECTED = 32


class _Half(nn.Module):
    def __init__(self, layers: Iterable[nn.Module]):
        super().__init__()
        self.model = nn.ModuleList(layers)

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        return run(self.model, x, carry)


class _Message(nn.Module):
    """A vector for each value of each bit."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * BITS, width), requires_grad=False)


class Generator(nn.Module):
    """The mark of a sound.

    :param message: its bits. :param config: sizes.
    """

    def __init__(self, message: Sequence[int], config: SeanetConfig = SEANET):
        super().__init__()
        self.message = tuple(message)
        self.encoder, self.decoder = _Half(encoder_layers(config)), _Half(decoder_layers(config))
        self.msg_processor = _Message(config.width)

    @property
    def carried(self) -> int:
        """Numbers of a row's :class:`~mstar_tts.codec_blocks.Carry`."""
        return carried(self.encoder) + carried(self.decoder)

    def settle(self) -> None:
        """Once the published weights are in: compute from them what is used instead."""
        _fold(self)
        settle(self)
        rows = 2 * torch.arange(BITS) + torch.tensor(self.message)
        said = self.msg_processor.weight[rows.to(self.msg_processor.weight.device)].sum(0)
        self.said = nn.Parameter(said, requires_grad=False)
        del self.msg_processor

    def forward(self, sound: Tensor, carry: Carry) -> Tensor:
        """*sound* ``[rows, S]``, of which *S* is a multiple of :data:`HOP` unless it ends there. Returns its mark
        ``[rows, S]``, to be added."""
        hidden = self.encoder(sound[:, None], carry) + self.said[:, None]
        mark: Tensor = self.decoder(hidden, carry)
        return mark[:, 0, : sound.shape[1]]


class _Listener(_Half):
    """An encoder whose vectors are spread over their samples again."""

    def __init__(self, config: SeanetConfig):
        super().__init__(encoder_layers(config))
        self.reverse_convolution = nn.ConvTranspose1d(config.width, _DETECTED, HOP, HOP)

    def forward(self, x: Tensor, carry: Carry) -> Tensor:
        y: Tensor = self.reverse_convolution(super().forward(x, carry))
        return y[:, :, : x.shape[2]]


class Detector(nn.Module):
    """Whether a sound is marked, and with what."""

    def __init__(self, config: SeanetConfig = SEANET):
        super().__init__()
        self.detector = nn.ModuleList([_Listener(config), nn.Conv1d(_DETECTED, 2 + BITS, 1)])

    def settle(self) -> None:
        """As :meth:`Generator.settle`."""
        _fold(self)
        settle(self)

    def forward(self, sound: Tensor) -> tuple[Tensor, Tensor]:
        """*sound* ``[rows, S]``. Returns how sure the detector is of a mark at each sample, ``[rows, S]`` in 0…1, and
        that each bit is 1, ``[rows, 16]`` in 0…1."""
        listener, judge = self.detector
        found = judge(listener(sound[:, None], Carry()))
        return found[:, :2].softmax(1)[:, 1], found[:, 2:].mean(2).sigmoid()


# --- published weights ------------------------------------------------------------------------------------------------
_NORMS = (("weight_g", "weight_v"), ("parametrizations.weight.original0", "parametrizations.weight.original1"))


def audioseal_weights(module: Generator | Detector, file: Path) -> WeightMap:
    """The map of *module* from *file*, or the folder that holds it. The file may have weight norms, in either of
    PyTorch's forms; *module* then gets their factors for parameters, until it is settled.

    :raises WeightsError: there is no such file, or it holds no such model.
    """
    tensors, prefix = _opened(file)
    names = set(tensors)
    places = []
    for path, owner in list(module.named_modules()):
        published = prefix + _published(module, path)
        if isinstance(owner, nn.Conv1d | nn.ConvTranspose1d):
            norm = next((norm for norm in _NORMS if f"{published}.{norm[0]}" in names), None)
            if norm is not None:
                _unfold(owner)
                places += [
                    Placement(f"{published}.{own}", f"{path}.{made}") for own, made in zip(norm, _NORMS[0], strict=True)
                ]
        places += [
            Placement(f"{published}.{name}", f"{path}.{name}")
            for name, _ in owner.named_parameters(recurse=False)
            if name not in _NORMS[0]
        ]
    return WeightMap(tuple(places), float32=(".*",), folder=str(file.resolve()))


def audioseal_sizes(file: Path) -> SeanetConfig:
    """Of the model in *file*, or the folder that holds it; where they differ from :data:`SEANET`, it is a test's.

    :raises WeightsError: there is no such file, or it holds no such model.
    """
    tensors, prefix = _opened(file)
    biases = {half: f"{prefix}{half}.model.{{}}.conv.conv.bias" for half in ("encoder", "detector.0")}
    half = next(half for half, name in biases.items() if name.format(0) in tensors)
    last = max(index for index in range(64) if biases[half].format(index) in tensors)
    (filters,), (width,) = (tensors[biases[half].format(index)].shape for index in (0, last))
    return replace(SEANET, filters=filters, width=width)


def _opened(file: Path) -> tuple[Mapping[str, TensorInfo], str]:
    """The tensors of *file*, and what comes before the names of the model's."""
    if not file.exists():
        raise WeightsError(f"there is no {file}")
    tensors = open_checkpoint(file).tensors
    for prefix in ("best_state.model.", "model.", ""):
        if any(f"{prefix}{half}.model.0.conv.conv.bias" in tensors for half in ("encoder", "detector.0")):
            return tensors, prefix
    raise WeightsError(f"{file} holds no AudioSeal model: its tensors are {', '.join(sorted(tensors)[:3])}, …")


def _published(module: nn.Module, path: str) -> str:
    """The published name of the module at *path*: convolutions lie deeper there."""
    parent = path.rpartition(".")[0]
    owner = module.get_submodule(parent) if parent else module
    if isinstance(owner, CausalConv):
        return f"{parent}.conv.conv"
    if isinstance(owner, CausalUpsample):
        return f"{parent}.convtr.convtr"
    if path == "msg_processor":
        return "msg_processor.msg_processor"
    assert not isinstance(owner, LSTM) or path.endswith(".lstm")
    return path


def _unfold(conv: nn.Conv1d | nn.ConvTranspose1d) -> None:
    if hasattr(conv, "weight_g"):
        return
    weight = conv.weight
    del conv.weight
    conv.weight_g = nn.Parameter(weight.new_empty(weight.shape[0], 1, 1), requires_grad=False)
    conv.weight_v = nn.Parameter(weight.data, requires_grad=False)


def _fold(module: nn.Module) -> None:
    """Multiply weight norms out."""
    for part in module.modules():
        if hasattr(part, "weight_g"):
            assert isinstance(part, nn.Conv1d | nn.ConvTranspose1d)
            length = part.weight_v.flatten(1).norm(dim=1)[:, None, None]  # type: ignore[operator]
            weight = part.weight_v * (part.weight_g / length)
            del part.weight_g, part.weight_v
            part.weight = nn.Parameter(weight, requires_grad=False)
