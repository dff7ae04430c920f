"""The real SmolLM2: fetched, checked, converted, and judged by what it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mstar.cli.app import run

pytestmark = pytest.mark.real_weights


def test_the_converted_folder_answers(smollm2_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    model, report = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(report.values())
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert answer[-1] == tokenizer.eos_token_id
    assert "Paris" in tokenizer.decode(answer)


def test_the_layout_that_the_documentation_shows_divides_it(smollm2_folder: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/layouts/tensor-parallel.md").read_text(encoding="utf-8")
    block = page.partition("```yaml\n")[2].partition("```")[0]
    assert "mstar serve smollm2 --config" in block
    file = tmp_path / "deployment.yaml"
    file.write_text(block, encoding="utf-8")
    assert run(["check", "smollm2", "--weights", str(smollm2_folder), "--config", str(file)], os.environ) == 0
