"""Parity of the causal-LM pattern with transformers (promise P13), on tiny random models of every supported family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mstar.nn.cpu_linear import prepare_cpu
from mstar.nn.model import BuildContext
from mstar.patterns.causal_lm import CausalLM
from mstar.spec.errors import SetupError
from mstar.spec.graph import CLIENT
from mstar.spec.knobs import TextOptions
from mstar.spec.request import EngineRequest, SamplingParams
from mstar.weights.loader import load

Session = Any
"""A ``PlainRun`` of conftest.py."""
Start = Callable[..., Session]

SIZES = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
CASES = {
    "llama-tied": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama-untied": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=False, rms_norm_eps=1e-5)),
    "llama-biases": (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, hidden_act="gelu")),
    "llama3-rope": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
    "qwen3-yarn": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=9)),
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
CASES |= {
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True)),
    "qwen3-moe-some-layers": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[0]),
    ),
}
PROMPTS = {0: [5, 17, 90, 3, 3, 44, 150, 8, 61, 12, 9, 101, 7], 1: [140], 2: [33, 20, 33, 20, 6]}
TOKENS = 8


def publish(case: str, folder: Path, shard: str = "5GB") -> PreTrainedModel:
    """A random checkpoint in the published layout. Norms and biases are random too, or a swapped one would not show."""
    kind, config = CASES[case]
    torch.manual_seed(11)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.8 if parameter.dim() == 1 else 0.0, 0.25)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


@pytest.fixture
def run(plain_run: Any) -> Start:
    """Our node with a checkpoint, through the pattern and the loader."""

    def start(folder: Path, cpu: bool = False) -> Session:
        family = CausalLM(BuildContext(folder, torch.float32, torch.device("cpu")))
        with torch.device("meta"):
            node = family.build("llm")
        load(node, family.weights("llm"), folder, torch.device("cpu"), torch.float32)
        if cpu:
            prepare_cpu(node)
        return plain_run(node, family.config.layers, len(PROMPTS), family.config.windows)

    return start


def greedy(session: Session, prompts: dict[int, list[int]], tokens: int) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {context: [] for context in prompts}
    ids = prompts
    for _ in range(tokens):
        _, sampled = session.step(ids)
        ids = {context: [token] for context, token in zip(prompts, sampled.tolist(), strict=True)}
        for context in prompts:
            out[context] += ids[context]
    return out


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case: str, tmp_path: Path, run: Start) -> None:
    reference = publish(case, tmp_path)
    want = {
        context: reference.generate(
            torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0].tolist()[len(ids) :]
        for context, ids in PROMPTS.items()
    }
    with torch.no_grad():
        logits = torch.stack([reference(torch.tensor([ids])).logits[0, -1] for ids in PROMPTS.values()])
    session = run(tmp_path)
    ours, _ = session.step(PROMPTS)
    torch.testing.assert_close(ours, logits, rtol=1e-5, atol=2e-5)
    assert greedy(run(tmp_path), PROMPTS, TOKENS) == want


@pytest.mark.parametrize("case", ["llama-tied", "qwen2-window", "qwen3", "mistral"])
def test_chunked_prefill_beside_decode_equals_the_whole_prompt(case: str, tmp_path: Path, run: Start) -> None:
    publish(case, tmp_path)
    whole, _ = run(tmp_path).step({0: PROMPTS[0]})
    session = run(tmp_path)
    session.step({1: PROMPTS[1]})
    for begin, end in ((0, 4), (4, 5), (5, 11), (11, 13)):
        logits, _ = session.step({1: [begin], 0: PROMPTS[0][begin:end]})  # row 1 decodes in the same step
    torch.testing.assert_close(logits[1:], whole, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("case", ["llama-tied", "qwen2"])
def test_sharded_checkpoint_gives_the_same_tokens(case: str, tmp_path: Path, run: Start) -> None:
    publish(case, tmp_path / "one")
    publish(case, tmp_path / "many", shard="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = (greedy(run(tmp_path / name), PROMPTS, TOKENS) for name in ("one", "many"))
    assert one == many


def test_prepared_for_the_cpu_gives_the_same_logits(tmp_path: Path, run: Start) -> None:
    publish("qwen2", tmp_path)
    plain, _ = run(tmp_path).step(PROMPTS)
    prepared, _ = run(tmp_path, cpu=True).step(PROMPTS)
    torch.testing.assert_close(prepared, plain, rtol=1e-5, atol=2e-5)


def test_tied_head_shares_the_embedding(tmp_path: Path, run: Start) -> None:
    publish("llama-tied", tmp_path)
    node = run(tmp_path).node
    assert node.lm_head.weight is node.model.embed_tokens.weight


def test_facts_of_the_pattern(tmp_path: Path) -> None:
    publish("mistral", tmp_path)
    family = CausalLM(BuildContext(tmp_path, torch.float32, torch.device("cpu"), TextOptions(max_tokens=64)))
    kv = family.resources()["kv"]
    assert (kv.layers, kv.kv_heads, kv.query_heads, kv.head_dim, kv.max_tokens) == (3, 2, 6, 8, 64)
    assert kv.windows == (9, 9, 9)
    assert family.resources()["sampler"].vocab == 199
    request = EngineRequest(id="r", inputs={"prompt": [1, 2, 3]}, sampling={"sampler": SamplingParams(max_tokens=20)})
    (demand,) = family.demand(request)
    assert (demand.resource, demand.tokens) == ("kv", 23)
    graph = family.graph()
    assert graph.streams_to(CLIENT)[0].name == "text"
    assert graph.node("llm").entry("forward").chunk == "ids"
    assert [step.walk for step in family.route("main", request)] == ["generate"]


def test_context_length_that_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    publish("llama-tied", tmp_path)
    with pytest.raises(SetupError, match=r"max_tokens is 257; the model takes 2 to 256"):
        CausalLM(BuildContext(tmp_path, torch.float32, torch.device("cpu"), TextOptions(max_tokens=257)))
