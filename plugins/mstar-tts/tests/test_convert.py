"""The converter, on a small ONNX file with every kind of node that the real one has."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mstar.spec.errors import WeightsError
from mstar_tts.kokoro.convert import FILE, kokoro
from mstar_tts.kokoro.spec import KOKORO
from mstar_tts.onnx_file import read_onnx

RANDOM = np.random.default_rng(3)
KINDS = {"f": 1, "u": 2, "i": 3}


def field(number: int, content: bytes | int) -> bytes:
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def tensor(name: str, values: np.ndarray) -> bytes:
    dims = b"".join(field(1, size) for size in values.shape)
    return field(5, dims + field(2, KINDS[values.dtype.kind]) + field(8, name.encode()) + field(9, values.tobytes()))


def node(kind: str, name: str, *inputs: str) -> bytes:
    words = b"".join(field(1, word.encode()) for word in inputs)
    return field(1, words + field(2, b"out") + field(3, name.encode()) + field(4, kind.encode()))


def model(parts: Iterable[bytes]) -> bytes:
    return field(1, 9) + field(7, b"".join(parts))


def quantised(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return RANDOM.integers(0, 100, shape).astype(dtype)


CONV, LINEAR, WORDS = quantised((4, 3, 5), "u1"), quantised((3, 4), "i1"), quantised((6, 2), "i1")
W, R, BIAS = quantised((2, 3, 8), "i1"), quantised((2, 2, 8), "i1"), RANDOM.normal(size=(2, 16)).astype("f4")
UP, SINES = RANDOM.normal(size=(4, 2, 6)).astype("f4"), RANDOM.normal(size=(9, 1)).astype("f4")
CONV[2] = 7  # a channel that was rounded to zero


def scalar(value: float, dtype: str = "f4") -> np.ndarray:
    return np.array(value, dtype)


def small() -> bytes:
    """Zero points have names of other layers', as equal constants are stored once."""
    bert = "/encoder/bert/encoder/albert_layer_groups.0/albert_layers.0"
    return model(
        [
            node(
                "ConvInteger",
                "/encoder/text_encoder/cnn.0/cnn.0.0/Conv_quant",
                "x",
                "/e/Mul_output_0_quantized",
                "z",
                "seven",
            ),
            node(
                "ConvInteger",
                "/encoder/F0_proj/Conv_quant",
                "x",
                "encoder.predictor.F0_proj.weight_quantized",
                "z",
                "seven",
            ),
            node("MatMulInteger", f"{bert}/ffn/MatMul_quant", "x", "m_quantized", "z", "zeros"),
            node("MatMulInteger", f"{bert}/ffn_1/MatMul_quant", "x", "m_quantized", "z", "zeros"),
            node("MatMulInteger", "/encoder/bert_encoder/MatMul_quant", "x", "m_quantized", "z", "zeros"),
            node(
                "DequantizeLinear",
                "/g/Gather_quant",
                "x",
                "encoder.bert.embeddings.word_embeddings.weight_scale",
                "one",
            ),
            node(
                "DynamicQuantizeLSTM",
                "/encoder/shared/LSTM_quant",
                "x",
                "w",
                "r",
                "b",
                "",
                "",
                "",
                "",
                "ws",
                "wz",
                "rs",
                "wz",
            ),
            node("ConvTranspose", "/decoder/decoder/generator/ups.0/ConvTranspose", "x", "/d/Mul_output_0", "c"),
            node("ConvTranspose", "/decoder/decoder/generator/istft/stft/ConvTranspose", "x", "basis"),
            node("MatMul", "/decoder/decoder/generator/m_source/l_linear/MatMul", "x", "onnx::MatMul_1"),
            node("MatMul", "/encoder/MatMul_1", "x", "y"),
            tensor("/e/Mul_output_0_quantized", CONV),
            tensor("/e/Mul_output_0_scale", scalar(0.5)),
            tensor("encoder.predictor.F0_proj.weight_quantized", CONV[:1]),
            tensor("encoder.predictor.F0_proj.weight_scale", scalar(0.25)),
            tensor("seven", scalar(7, "u1")),
            tensor("m_quantized", LINEAR),
            tensor("m_scale", np.array([1, 2, 3, 4], "f4")),
            tensor("zeros", np.array([0, 1, 2, 3], "i1")),
            tensor("encoder.bert.embeddings.word_embeddings.weight_quantized", WORDS),
            tensor("encoder.bert.embeddings.word_embeddings.weight_scale", scalar(2)),
            tensor("one", scalar(1, "i1")),
            *(tensor("w", W), tensor("r", R), tensor("b", BIAS), tensor("wz", np.zeros(2, "i1"))),
            *(tensor("ws", np.array([1, 2], "f4")), tensor("rs", np.array([3, 4], "f4"))),
            *(tensor("/d/Mul_output_0", UP), tensor("c", scalar(0)), tensor("basis", UP)),
            tensor("onnx::MatMul_1", SINES),
            tensor("decoder.decoder.generator.ups.0.bias", np.ones(2, "f4")),
            tensor("decoder.decoder.generator.resblocks.0.alpha1.0", np.ones((1, 2, 1), "f4")),
            tensor("encoder.text_encoder.cnn.0.1.gamma", np.ones(4, "f4")),
            tensor("encoder.bert.embeddings.LayerNorm.weight", np.ones(2, "f4")),
        ]
    )


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    data = small()
    (folder / "part-1.bin").write_bytes(data[:100])
    (folder / "part-2.bin").write_bytes(data[100:])
    (folder / "vocab.json").write_text('{"vocab": {"a": 1}}')
    (folder / "af_heart.bin").write_bytes(b"\0" * 1024)
    return folder


def test_every_kind_of_tensor_comes_out_under_its_published_name(raw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    kokoro(raw, out, lambda *_: None)
    assert json.loads((out / "config.json").read_text())["vocab"] == {"a": 1}
    assert (out / "voices" / "af_heart.bin").stat().st_size == 1024
    parts: dict[str, dict[str, Any]] = torch.load(out / FILE, weights_only=True)

    def got(part: str, name: str) -> np.ndarray:
        return parts[part].pop(f"module.{name}").numpy()  # type: ignore[no-any-return]

    conv = (CONV.astype("f4") - 7) * 0.5
    g, v = got("text_encoder", "cnn.0.0.weight_g"), got("text_encoder", "cnn.0.0.weight_v")
    assert g[2] == 0
    assert (v[2] == 1).all()
    length = np.sqrt((v**2).sum((1, 2), keepdims=True))
    np.testing.assert_allclose(v * g / length, conv, atol=1e-5)
    np.testing.assert_allclose(got("predictor", "F0_proj.weight"), conv[:1] / 2)
    linear = ((LINEAR.astype("f4") - [0, 1, 2, 3]) * [1, 2, 3, 4]).T
    np.testing.assert_allclose(got("bert", "encoder.albert_layer_groups.0.albert_layers.0.ffn.weight"), linear)
    np.testing.assert_allclose(got("bert_encoder", "weight"), linear)
    np.testing.assert_allclose(got("bert", "embeddings.word_embeddings.weight"), (WORDS.astype("f4") - 1) * 2)
    np.testing.assert_allclose(got("decoder", "generator.m_source.l_linear.weight"), SINES.T)
    up_g, up_v = got("decoder", "generator.ups.0.weight_g"), got("decoder", "generator.ups.0.weight_v")
    np.testing.assert_allclose(up_v * up_g / np.sqrt((up_v**2).sum((1, 2), keepdims=True)), UP, rtol=1e-5)
    order = [0, 1, 4, 5, 6, 7, 2, 3]  # input, forget, cell, output
    for direction, suffix in enumerate(("", "_reverse")):
        for kind, stored, scale, at in (("ih", W, (1, 2), 0), ("hh", R, (3, 4), 8)):
            wanted = (stored[direction].astype("f4") * scale[direction]).T[order]
            np.testing.assert_allclose(got("predictor", f"shared.weight_{kind}_l0{suffix}"), wanted)
            biases = BIAS[direction, at : at + 8][order]
            np.testing.assert_allclose(got("predictor", f"shared.bias_{kind}_l0{suffix}"), biases)
    rest = {f"{part}.{name}" for part, tensors in parts.items() for name in tensors}
    assert rest == {
        "decoder.module.generator.ups.0.bias",
        "decoder.module.generator.resblocks.0.alpha1.0",
        "text_encoder.module.cnn.0.1.gamma",
        "bert.module.embeddings.LayerNorm.weight",
    }


def test_other_files_are_refused(raw: Path, tmp_path: Path) -> None:
    (raw / "part-1.bin").write_bytes(b"nonsense")
    with pytest.raises(WeightsError, match="ONNX"):
        kokoro(raw, tmp_path, lambda *_: None)
    for data in (b"", b"\x3a\xff", small()[:-20], b"\x80" * 12):
        with pytest.raises(WeightsError, match="ONNX"):
            read_onnx(data)
    (raw / "part-1.bin").write_bytes(model([]))
    (raw / "part-2.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match="nothing of bert"):
        kokoro(raw, tmp_path, lambda *_: None)
    (raw / "vocab.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"vocab\.json"):
        kokoro(raw, tmp_path, lambda *_: None)


def test_the_references_are_pinned() -> None:
    package, hub = KOKORO.weights
    assert [package.source, hub.source] == ["package", "hub"]
    assert len(hub.revision or "") == 40
    files = [file for also in package.options["also"] for file in also["files"].values()]
    assert len([name for _, name in files if name.startswith("part-")]) == 4
    assert len({name for _, name in files}) == 4 + 54
