"""CTranslate2's files become the published layout."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from mstar.spec.errors import WeightsError
from mstar_asr.whisper.convert import read_ctranslate2, whisper
from mstar_asr.whisper.tokens import WhisperTokens

Tensors = dict[str, np.ndarray]
LAYER = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}


def text(word: str) -> bytes:
    return struct.pack("<H", len(word) + 1) + word.encode() + b"\0"


def binary(variables: Tensors, version: int = 6, spec: str = "WhisperSpec") -> bytes:
    kinds = {"float32": 0, "int8": 1, "int16": 2, "float16": 4}
    out = struct.pack("<I", version) + text(spec) + struct.pack("<II", 3, len(variables))
    for name, array in variables.items():
        out += text(name) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        out += struct.pack("<BI", kinds[array.dtype.name], array.nbytes) + array.tobytes()
    return out + struct.pack("<I", 1) + text("decoder/projection/weight") + text("decoder/embeddings/weight")


def stored(published: Tensors, heads: int = 4, layers: int = 2) -> Tensors:
    """*published* under CTranslate2's names, in float16."""
    found: Tensors = {"decoder/embeddings/weight": published["model.decoder.embed_tokens.weight"]}

    def put(name: str, sources: tuple[str, ...]) -> None:
        norm = "norm" in name
        found[f"{name}/{'gamma' if norm else 'weight'}"] = np.concatenate([published[f"{s}.weight"] for s in sources])
        biases = [published.get(f"{s}.bias", np.zeros(len(published[f"{s}.weight"]), np.float32)) for s in sources]
        found[f"{name}/{'beta' if norm else 'bias'}"] = np.concatenate(biases)

    for number in (1, 2):
        put(f"encoder/conv{number}", (f"model.encoder.conv{number}",))
    for side in ("encoder", "decoder"):
        put(f"{side}/layer_norm", (f"model.{side}.layer_norm",))
        found[f"{side}/position_encodings/encodings"] = published[f"model.{side}.embed_positions.weight"]
        for layer in range(layers):
            prefix = f"model.{side}.layers.{layer}."
            for name, parts in LAYER.items():
                if side == "decoder" or not name.startswith("attention"):
                    put(f"{side}/layer_{layer}/{name}", tuple(prefix + part for part in parts))
    found = {name: array.astype(np.float16) for name, array in found.items()}
    return {**found, **{f"{side}/num_heads": np.array(heads, np.int16) for side in ("encoder", "decoder")}}


@pytest.fixture
def raw(tiny_folder: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint as CTranslate2 packs it: in two pieces, with a tokenizer that lacks the timestamps."""
    folder = tmp_path / "raw"
    folder.mkdir()
    data = binary(stored(load_file(tiny_folder / "model.safetensors")))
    (folder / "model.bin.part1").write_bytes(data[:10_001])
    (folder / "model.bin.part2").write_bytes(data[10_001:])
    tokenizer = json.loads((tiny_folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if "." not in t["content"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    generation = json.loads((tiny_folder / "generation_config.json").read_text())
    told = {
        "alignment_heads": generation["alignment_heads"],
        "lang_ids": list(generation["lang_to_id"].values()),
        "suppress_ids": generation["suppress_tokens"],
        "suppress_ids_begin": generation["begin_suppress_tokens"],
    }
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def convert(raw: Path) -> Path:
    out = raw.parent / "out"
    out.mkdir()
    done: list[tuple[int, int]] = []
    whisper(raw, out, lambda what, now, total: done.append((now, total)))
    assert done[-1][0] == done[-1][1]
    return out


def test_every_tensor_comes_back(raw: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mstar_asr.whisper.convert._MULTILINGUAL_VOCAB", 1000)
    out = convert(raw)
    got, wanted = load_file(out / "model.safetensors"), load_file(tiny_folder / "model.safetensors")
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].dtype == np.float16
        np.testing.assert_array_equal(got[name], array.astype(np.float16), err_msg=name)
    assert WhisperTokens.read(out) == WhisperTokens.read(tiny_folder)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (tiny_folder, out))
    assert before.items() <= after.items()


def test_transformers_reads_the_result(raw: Path) -> None:
    from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

    out = convert(raw)
    model, report = WhisperForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    assert not model.generation_config.is_multilingual  # so few tokens
    assert WhisperFeatureExtractor.from_pretrained(out).feature_size == 16
    assert len(AutoTokenizer.from_pretrained(out)) == model.config.vocab_size


def broken(change: str, variables: Tensors) -> bytes:
    if change == "version":
        return binary(variables, version=7)
    if change == "spec":
        return binary(variables, spec="TransformerSpec")
    if change == "short":
        return binary(variables)[:-3]
    return binary(variables) + b"\0"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("version", "'WhisperSpec' of version 7, expected a 'WhisperSpec' of 6"),
        ("spec", "holds a 'TransformerSpec'"),
        ("short", "ends 3 bytes too early"),
        ("long", "goes on for 1 bytes"),
    ],
)
def test_other_files_are_refused(change: str, fault: str) -> None:
    variables: Any = {"decoder/embeddings/weight": np.zeros((2, 3), np.float16)}
    with pytest.raises(WeightsError, match=fault):
        read_ctranslate2(broken(change, variables))


def test_what_is_missing_or_quantised_is_named(raw: Path, tiny_folder: Path) -> None:
    variables = stored(load_file(tiny_folder / "model.safetensors"))
    (raw / "model.bin.part2").unlink()
    name = "decoder/layer_1/attention/linear_1/weight"
    for array, fault in ((None, name), (variables[name].astype(np.int8), "is stored as int8")):
        changed = {key: value for key, value in variables.items() if key != name or array is not None}
        if array is not None:
            changed[name] = array
        (raw / "model.bin.part1").write_bytes(binary(changed))
        with pytest.raises(WeightsError, match=fault):
            whisper(raw, raw.parent, lambda *_: None)
