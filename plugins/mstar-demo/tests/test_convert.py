"""The GGUF converter on tiny files whose tensors are known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_gguf as tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from mstar.spec.errors import WeightsError
from mstar_demo.convert import smollm2


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    return tmp_path / "raw"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def quiet(what: str, done: int, total: int) -> None:
    del what, done, total


def test_tensors_come_back_as_published(raw: Path, out: Path) -> None:
    tensors = tiny.published_tensors()
    tiny.write(raw / "tiny.gguf", tensors)
    smollm2(raw, out, quiet)
    converted = load_file(out / "model.safetensors")
    assert converted.keys() == tensors.keys()
    for name, values in tensors.items():
        assert converted[name].dtype == torch.bfloat16
        assert torch.equal(converted[name].float(), torch.from_numpy(values)), name


def decode_by_hand(block: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """One block of 32 values, by llama.cpp's definition of its layout."""
    if kind == tiny.Q8_0:  # float16 scale, 32 int8
        return block[2:].view(np.int8) * block[:2].view(np.float16).astype(np.float32)
    scale, minimum = block[:4].view(np.float16).astype(np.float32)  # then 16 bytes: low halves first, then high ones
    codes = np.concatenate([block[4:] & 15, block[4:] >> 4])
    return codes * scale + minimum


def test_quantised_tensors_are_dequantised(raw: Path, out: Path) -> None:
    def kind(name: str) -> gguf.GGMLQuantizationType:
        if "norm" in name:
            return tiny.F32
        return tiny.Q8_0 if "embed" in name else tiny.Q4_1

    stored = tiny.write(raw / "tiny.gguf", tiny.published_tensors(), kind)
    smollm2(raw, out, quiet)
    converted = load_file(out / "model.safetensors")
    for name in (
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ):
        width = 34 if kind(name) == tiny.Q8_0 else 20
        rows = [
            np.concatenate([decode_by_hand(row[at : at + width], kind(name)) for at in range(0, len(row), width)])
            for row in stored[name]
        ]
        expected = torch.from_numpy(np.stack(rows)).to(torch.bfloat16)
        assert torch.equal(converted[name], expected), name


def test_transformers_loads_the_folder_and_computes_the_same(raw: Path, out: Path) -> None:
    tensors = tiny.published_tensors()
    tiny.write(raw / "tiny.gguf", tensors)
    smollm2(raw, out, quiet)
    model, report = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert isinstance(model, LlamaForCausalLM)
    assert not any(report.values())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rms_norm_eps == 1e-5
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.generation_config.eos_token_id == 2

    reference = LlamaForCausalLM(model.config)
    reference.load_state_dict({name: torch.from_numpy(values) for name, values in tensors.items()}, strict=False)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, reference.eval()(ids).logits)


def test_a_head_of_its_own_is_kept(raw: Path, out: Path) -> None:
    tensors = tiny.published_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    tiny.write(raw / "tiny.gguf", tensors)
    smollm2(raw, out, quiet)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    head = load_file(out / "model.safetensors")["lm_head.weight"]
    assert torch.equal(head.float(), torch.from_numpy(tensors["lm_head.weight"]))


def test_progress_ends_at_the_total(raw: Path, out: Path) -> None:
    shown: list[tuple[int, int]] = []
    tiny.write(raw / "tiny.gguf", tiny.published_tensors())
    smollm2(raw, out, lambda what, done, total: shown.append((done, total)))
    assert shown == sorted(shown)
    assert shown[-1][0] == shown[-1][1] > 0


def test_others_may_read_the_files(raw: Path, out: Path) -> None:
    tiny.write(raw / "tiny.gguf", tiny.published_tensors())
    smollm2(raw, out, quiet)
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1


def test_faulty_files_are_refused(raw: Path, out: Path) -> None:
    file = raw / "tiny.gguf"
    tensors = tiny.published_tensors()
    tiny.write(file, tensors, architecture="gpt2")
    with pytest.raises(WeightsError, match="holds a 'gpt2' model"):
        smollm2(raw, out, quiet)
    tiny.write(file, tensors, template=None)
    with pytest.raises(WeightsError, match=r"lacks the fact 'tokenizer\.chat_template'"):
        smollm2(raw, out, quiet)
    tiny.write(file, tensors, pre="qwen2")
    with pytest.raises(WeightsError, match="pre-tokenizer 'qwen2' cannot be converted"):
        smollm2(raw, out, quiet)
    tiny.write(file, {**tensors, "rope_freqs.weight": tensors["model.norm.weight"]})
    with pytest.raises(WeightsError, match=r"unknown meaning, such as rope_freqs\.weight"):
        smollm2(raw, out, quiet)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tiny.write(file, tensors)
    with pytest.raises(WeightsError, match=r"lacks 1 tensor\(s\), such as blk\.1\.ffn_up\.weight"):
        smollm2(raw, out, quiet)


def test_converting_needs_no_torch(raw: Path, out: Path) -> None:
    tiny.write(raw / "tiny.gguf", tiny.published_tensors())
    program = (
        "import sys; from pathlib import Path; from mstar_demo.convert import smollm2\n"
        f"smollm2(Path({str(raw)!r}), Path({str(out)!r}), lambda *args: None)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == 0
    assert (out / "model.safetensors").is_file()
