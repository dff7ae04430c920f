"""From CTranslate2's file of a Whisper model to the layout that Hugging Face publishes.

CTranslate2 keeps the tensors of a checkpoint under other names, with the projections of queries, keys and values joined
along their rows, in one binary file beside the tokenizer. All of it is undone here with numpy, tensor by tensor.

Sources: CTranslate2 4.8 (``python/ctranslate2/specs/model_spec.py`` writes the file, ``converters/transformers.py``
maps Whisper's names), and the ``config.json`` and ``generation_config.json`` that transformers 5.24 reads.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mstar.spec.errors import WeightsError
from mstar.weights.sources import Progress
from mstar.weights.writer import write_safetensors
from mstar_asr.whisper.request import FRAMES, HOP, RATE

__all__ = ["read_ctranslate2", "whisper"]

_VERSION = 6
_DTYPES: dict[int, np.dtype[Any]] = {
    0: np.dtype("<f4"),
    1: np.dtype("i1"),
    2: np.dtype("<i2"),
    3: np.dtype("<i4"),
    4: np.dtype("<f2"),
}
_KINDS = {"float32": "F32", "float16": "F16"}
_MULTILINGUAL_VOCAB = 51865
"""Checkpoints with fewer tokens are English-only."""

Variables = dict[str, NDArray[Any]]


def whisper(raw: Path, out: Path, progress: Progress) -> None:
    """Convert ``model.bin`` (or its pieces ``model.bin.part1``, …), ``config.json`` and ``tokenizer.json`` in *raw*
    into folder *out*. Weights keep their dtype.

    :raises WeightsError: the file is of another kind or version, is quantised, or lacks a tensor.
    """
    files = sorted(raw.glob("model.bin*"))
    if not files:
        raise WeightsError(f"{raw} has no model.bin")
    variables = read_ctranslate2(b"".join(file.read_bytes() for file in files))
    told = json.loads((raw / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((raw / "tokenizer.json").read_text(encoding="utf-8"))
    sizes = _sizes(variables)
    ids = _add_timestamps(tokenizer, sizes["vocab_size"])
    _write_tensors(variables, sizes, out / "model.safetensors", progress)
    _write_json(out / "config.json", _config(sizes, ids))
    _write_json(out / "generation_config.json", _generation_config(told, sizes, ids))
    _write_json(out / "preprocessor_config.json", _preprocessor_config(sizes))
    _write_json(out / "tokenizer.json", tokenizer)
    _write_json(out / "tokenizer_config.json", _tokenizer_config(sizes))


# --- the binary file


def read_ctranslate2(data: bytes) -> Variables:
    """The variables of a Whisper model as CTranslate2 saves it; they share memory with *data*.

    :raises WeightsError: it is not such a file.
    """
    reader = _Reader(data)
    version, spec = reader.number("I"), reader.text()
    if (version, spec) != (_VERSION, "WhisperSpec"):
        raise WeightsError(f"the file holds a {spec!r} of version {version}, expected a 'WhisperSpec' of {_VERSION}")
    reader.number("I")  # the spec's own revision
    variables: Variables = {}
    for _ in range(reader.number("I")):
        name = reader.text()
        shape = [reader.number("I") for _ in range(reader.number("B"))]
        kind, size = reader.number("B"), reader.number("I")
        if kind not in _DTYPES:
            raise WeightsError(f"{name} has a type of unknown number {kind}")
        variables[name] = np.frombuffer(data, _DTYPES[kind], size // _DTYPES[kind].itemsize, reader.skip(size)).reshape(
            shape
        )
    for _ in range(reader.number("I")):
        alias, name = reader.text(), reader.text()
        variables[alias] = variables[name]
    if reader.left:
        raise WeightsError(f"the file goes on for {reader.left} bytes where it should end")
    return variables


@dataclass
class _Reader:
    """Numbers and texts, one after the other, little endian."""

    data: bytes
    at: int = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def skip(self, size: int) -> int:
        """Where the *size* bytes begin that are passed over."""
        if size > self.left:
            raise WeightsError(f"the file ends {size - self.left} bytes too early")
        self.at += size
        return self.at - size

    def number(self, kind: str) -> int:
        form = f"<{kind}"
        return int(struct.unpack_from(form, self.data, self.skip(struct.calcsize(form)))[0])

    def text(self) -> str:
        size = self.number("H")
        start = self.skip(size)
        return self.data[start : start + size].rstrip(b"\0").decode()


# --- the tensors


def _sizes(variables: Variables) -> dict[str, int]:
    """The sizes of ``config.json``."""
    try:
        vocab, hidden = variables["decoder/embeddings/weight"].shape
        found = {
            "vocab_size": vocab,
            "d_model": hidden,
            "num_mel_bins": variables["encoder/conv1/weight"].shape[1],
            "max_source_positions": variables["encoder/position_encodings/encodings"].shape[0],
            "max_target_positions": variables["decoder/position_encodings/encodings"].shape[0],
        }
        for side in ("encoder", "decoder"):
            found[f"{side}_layers"] = len(
                {
                    name.split("/")[1]
                    for name in variables
                    if name.startswith(f"{side}/layer_") and name.split("/")[1] != "layer_norm"
                }
            )
            found[f"{side}_attention_heads"] = int(variables[f"{side}/num_heads"])
            found[f"{side}_ffn_dim"] = variables[f"{side}/layer_0/ffn/linear_0/weight"].shape[0]
    except KeyError as missing:
        raise WeightsError(f"the file lacks the variable {missing}") from None
    return found


def _norm(stored: str, published: str) -> Iterator[tuple[str, str, tuple[int, int]]]:
    yield f"{stored}/gamma", f"{published}.weight", (0, 1)
    yield f"{stored}/beta", f"{published}.bias", (0, 1)


def _linear(stored: str, published: str, *parts: str) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """A projection, or several that are joined; the keys' bias is stored as zeros and not published."""
    for number, part in enumerate(parts or ("",)):
        name = f"{published}.{part}" if part else published
        yield f"{stored}/weight", f"{name}.weight", (number, len(parts) or 1)
        if part != "k_proj":
            yield f"{stored}/bias", f"{name}.bias", (number, len(parts) or 1)


def _names(sizes: dict[str, int]) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Stored name, published name, and which of how many equal parts of the stored rows it is."""
    for number in (1, 2):
        for kind in ("weight", "bias"):
            yield f"encoder/conv{number}/{kind}", f"model.encoder.conv{number}.{kind}", (0, 1)
    yield "decoder/embeddings/weight", "model.decoder.embed_tokens.weight", (0, 1)
    for side in ("encoder", "decoder"):
        yield f"{side}/position_encodings/encodings", f"model.{side}.embed_positions.weight", (0, 1)
        yield from _norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for layer in range(sizes[f"{side}_layers"]):
            stored, published = f"{side}/layer_{layer}", f"model.{side}.layers.{layer}"
            own, other = f"{stored}/self_attention", f"{stored}/attention"
            yield from _norm(f"{own}/layer_norm", f"{published}.self_attn_layer_norm")
            yield from _linear(f"{own}/linear_0", f"{published}.self_attn", "q_proj", "k_proj", "v_proj")
            yield from _linear(f"{own}/linear_1", f"{published}.self_attn", "out_proj")
            if side == "decoder":
                yield from _norm(f"{other}/layer_norm", f"{published}.encoder_attn_layer_norm")
                yield from _linear(f"{other}/linear_0", f"{published}.encoder_attn", "q_proj")
                yield from _linear(f"{other}/linear_1", f"{published}.encoder_attn", "k_proj", "v_proj")
                yield from _linear(f"{other}/linear_2", f"{published}.encoder_attn", "out_proj")
            yield from _norm(f"{stored}/ffn/layer_norm", f"{published}.final_layer_norm")
            yield from _linear(f"{stored}/ffn/linear_0", f"{published}.fc1")
            yield from _linear(f"{stored}/ffn/linear_1", f"{published}.fc2")


def _write_tensors(variables: Variables, sizes: dict[str, int], file: Path, progress: Progress) -> None:
    tensors: Variables = {}
    for stored, published, (part, parts) in _names(sizes):
        if stored not in variables:
            raise WeightsError(f"the file lacks the variable {stored!r}")
        tensors[published] = np.split(variables[stored], parts)[part]
    for name, tensor in tensors.items():
        if tensor.dtype.name not in _KINDS:
            raise WeightsError(f"{name} is stored as {tensor.dtype}; only float16 and float32 files are understood")
    total = sum(tensor.nbytes for tensor in tensors.values())
    layout = {name: (_KINDS[tensor.dtype.name], list(tensor.shape)) for name, tensor in tensors.items()}

    def contents() -> Iterator[bytes]:
        done = 0
        for tensor in tensors.values():
            yield tensor.tobytes()
            done += tensor.nbytes
            progress("converting the weights", done, total)

    write_safetensors(file, layout, contents())


# --- the other files


def _add_timestamps(tokenizer: dict[str, Any], vocab: int) -> dict[str, int]:
    """Complete *tokenizer* with the timestamps that its authors left out. Returns its added tokens' ids."""
    added: list[dict[str, Any]] = tokenizer["added_tokens"]
    ids = {token["content"]: int(token["id"]) for token in added}
    first = ids["<|notimestamps|>"] + 1
    if first not in ids.values():
        kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        added += [{"id": first + step, "content": f"<|{step * 0.02:.2f}|>", **kind} for step in range(vocab - first)]
    last = max(int(token["id"]) for token in added)
    if last != vocab - 1:
        raise WeightsError(f"the tokenizer's last token has the id {last}, the model's {vocab - 1}")
    return ids


def _config(sizes: dict[str, int], ids: dict[str, int]) -> dict[str, Any]:
    eot = ids["<|endoftext|>"]
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        **sizes,
        "num_hidden_layers": sizes["encoder_layers"],
        "activation_function": "gelu",
        "scale_embedding": False,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "pad_token_id": eot,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "begin_suppress_tokens": None,
        "suppress_tokens": None,
        "is_encoder_decoder": True,
        "torch_dtype": "float16",
    }


def _generation_config(told: dict[str, Any], sizes: dict[str, int], ids: dict[str, int]) -> dict[str, Any]:
    """*told*: CTranslate2's ``config.json``, which has lists of tokens and heads."""
    eot, multilingual = ids["<|endoftext|>"], sizes["vocab_size"] >= _MULTILINGUAL_VOCAB
    found: dict[str, Any] = {
        "bos_token_id": eot,
        "eos_token_id": eot,
        "pad_token_id": eot,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "is_multilingual": multilingual,
        "max_initial_timestamp_index": 50,
        "max_length": sizes["max_target_positions"],
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "return_timestamps": False,
        "suppress_tokens": told["suppress_ids"],
        "begin_suppress_tokens": told["suppress_ids_begin"],
        "alignment_heads": told["alignment_heads"],
    }
    if multilingual:
        languages = set(told["lang_ids"])
        found["lang_to_id"] = {name: token for name, token in ids.items() if token in languages}
        found["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    return found


def _preprocessor_config(sizes: dict[str, int]) -> dict[str, Any]:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": sizes["num_mel_bins"],
        "sampling_rate": RATE,
        "hop_length": HOP,
        "n_fft": 400,
        "chunk_length": 30,
        "n_samples": 30 * RATE,
        "nb_max_frames": FRAMES,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }


def _tokenizer_config(sizes: dict[str, int]) -> dict[str, Any]:
    eot = "<|endoftext|>"
    return {
        "tokenizer_class": "WhisperTokenizer",
        "bos_token": eot,
        "eos_token": eot,
        "unk_token": eot,
        "pad_token": eot,
        "model_max_length": sizes["max_target_positions"],
        "clean_up_tokenization_spaces": False,
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
