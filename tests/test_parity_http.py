"""Parity with transformers end to end over HTTP (promise P13): tokens and log-probabilities, alone and in a batch.

Tiny random checkpoints in the published layout, single and sharded, go through ``--weights``, our loader and the real
server; the reference runs the same folder. Everything in float32 on the CPU.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

from mstar.processing.tokenizer import TextTokenizer

from .serving import serving
from .tiny_models import KINDS, publish

PROMPTS = ["Hello there", "The capital of France is", "é", "今天天气很好。 And " * 6, "a b c d e"]
NEW = 12


def reference(model: Any, ids: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities, one full forward pass a token: no cache, no batching, no tricks."""
    tokens, logprobs = [], []
    with torch.inference_mode():
        for _ in range(NEW):
            logits = model(torch.tensor([ids + tokens])).logits[0, -1].double()
            token = int(logits.argmax())
            tokens.append(token)
            logprobs.append(float(logits.log_softmax(-1)[token]))
    return tokens, logprobs


def ask(client: OpenAI, model: str, prompt: str, **more: Any) -> tuple[list[bytes], list[float], Any]:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=NEW,
        logprobs=True,
        top_logprobs=2,
        extra_body={"ignore_eos": True},
        **more,
    )
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    return [bytes(c.bytes or []) for c in content], [c.logprob for c in content], answer


@pytest.mark.parametrize(("key", "shard"), [*((key, "5GB") for key in KINDS), ("tiny-llama", "40KB")])
def test_greedy_answers_equal_the_reference(key: str, shard: str, tmp_path: Path) -> None:
    publish(key, tmp_path, shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard != "5GB")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = TextTokenizer(tmp_path)
    with (
        serving(
            key,
            extra_plugins=("tests.tiny_models",),
            executor="inline",
            weights=str(tmp_path),
            scheduler={"max_step_tokens": 16},  # long prompts run in chunks, beside decodes
        ) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(lambda p: ask(client, key, p), PROMPTS))
        for prompt, (tokens, logprobs, answer) in zip(PROMPTS, together, strict=True):
            alone = ask(client, key, prompt)
            assert alone[0] == tokens
            ids = tokenizer.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
            assert answer.usage.prompt_tokens == len(ids)
            want_tokens, want_logprobs = reference(model, ids)
            assert tokens == [tokenizer.token_bytes(t) for t in want_tokens]
            assert logprobs == pytest.approx(want_logprobs, abs=2e-4)
