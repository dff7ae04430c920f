"""``engine.deterministic``: accepted where it holds, and refused at the start, in words, where it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mstar.graph.program import compile_graph
from mstar.nn.config import DecoderConfig
from mstar.nn.deterministic import deterministic_faults, prepare_deterministic
from mstar.nn.encoder import EncoderStack
from mstar.nn.linear import Linear
from mstar.nn.node import Node, Step
from mstar.patterns.causal_lm import CausalLMNode
from mstar.resources.attention import AttentionNeed, pick_backend
from mstar.resources.attention.batch_invariant import BatchInvariantAttention
from mstar.resources.attention.torch_sdpa import TorchAttention
from mstar.spec.errors import SetupError
from mstar.spec.resources import PagedKV, Positions, ResourceSpec, Sampler
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.miniatures import miniature
from mstar.worker import machine
from mstar.worker.deterministic import option_faults

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
CONFIG = DecoderConfig(16, 32, 2, 2, 1, 16, 48, 32)


def faults(key: str, declared: Mapping[str, ResourceSpec], device: torch.device, dtype: torch.dtype) -> list[str]:
    registry = miniature_registry()
    driver = Driver(miniature(key), registry)
    plan = compile_graph(driver.worker.plan.graph)
    return [text for _, text in option_faults(device, dtype, declared, plan, registry)]


LLM = {"kv": PagedKV(1, 1, 16, 1, max_tokens=16), "positions": Positions(), "sampler": Sampler(vocab=8)}


def test_on_the_cpu_it_is_accepted_in_float32() -> None:
    driver = Driver(miniature("mini_chat"), engine={"deterministic": True})
    assert all(resource.context.deterministic for resource in driver.worker.resources.values())
    with pytest.raises(SetupError, match=r"engine\.deterministic: on the CPU it needs dtype float32, not bfloat16"):
        Driver(miniature("mini_chat"), engine={"deterministic": True}, dtype="bfloat16")


def test_on_a_gpu_dtype_and_resources_are_looked_at() -> None:
    assert faults("mini_chat", LLM, CUDA, torch.bfloat16) == []
    assert faults("mini_chat", LLM, CUDA, torch.float32) == ["on a GPU it needs dtype bfloat16 or float16, not float32"]
    assert "only for cuda and cpu" in faults("mini_chat", LLM, torch.device("meta"), torch.bfloat16)[0]


def test_steps_over_frozen_contexts_are_refused() -> None:
    (found,) = faults("mini_unified", LLM, CUDA, torch.bfloat16)
    assert "entry 'imagine': steps over frozen 'kv'" in found


def test_kinds_of_resources_that_do_not_say_so_are_refused() -> None:
    registry = miniature_registry()
    known = {"paged_kv", "positions", "sampler"}
    for kind in ("paged_kv", "cross_kv", "window_kv", "ragged_attention", "recurrent_state", "positions", "sampler"):
        assert registry.resource(kind).batch_invariant == (kind in known)


class Twice(CausalLMNode):
    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.model.norm(hidden)) * 2


class Vouched(Twice):
    batch_invariant = True


class Same(CausalLMNode):
    """Nothing of its own."""


class Mixed(Node):
    batch_invariant = True

    def __init__(self) -> None:
        super().__init__()
        self.encoder = EncoderStack(CONFIG)
        self.out = nn.Linear(4, 4)
        self.last = nn.ModuleList([Linear(4, 4)])

    def forward(self, step: Step) -> Mapping[str, Any]:
        return {}


def test_nodes_and_their_modules_must_say_so() -> None:
    assert list(deterministic_faults("llm", CausalLMNode(CONFIG))) == []
    assert list(deterministic_faults("llm", Same(CONFIG))) == []
    assert list(deterministic_faults("llm", Vouched(CONFIG))) == []
    (refused,) = deterministic_faults("llm", Twice(CONFIG))
    assert refused.startswith("node 'llm' cannot be deterministic: Twice does not say")
    assert [text.split("module ")[1].split(",")[0] for text in deterministic_faults("codec", Mixed())] == [
        "'encoder' is a EncoderStack",
        "'out' is a Linear",
    ]


def test_layers_are_told() -> None:
    pytest.importorskip("triton")
    node = CausalLMNode(CONFIG).to(torch.bfloat16)
    assert list(prepare_deterministic("llm", node)) == []
    assert all(module.deterministic for module in node.modules() if isinstance(module, Linear))
    narrow = CausalLMNode(replace(CONFIG, intermediate=50)).to(torch.bfloat16)
    found = list(prepare_deterministic("llm", narrow))
    assert found == [
        f"node 'llm' cannot be deterministic: layer 'model.layers.{i}.mlp.down_proj': 50 input features are not a "
        "multiple of 16"
        for i in range(2)
    ]


def test_on_a_gpu_nothing_is_compiled_with_it() -> None:
    ((key, text),) = machine.compile_faults(CUDA, True)
    assert key == "engine.compile"
    assert "engine.deterministic" in text


def test_backends_that_do_not_say_so_are_refused() -> None:
    need = AttentionNeed("kv", CUDA, torch.bfloat16, 6, 2, 64, 16, deterministic=True)
    both = [BatchInvariantAttention(), TorchAttention()]
    with pytest.raises(SetupError, match=r"torch_sdpa: its results depend on the step's other rows"):
        pick_backend(both[1:], need)
    pytest.importorskip("triton")
    assert pick_backend(both, need) is both[0]
    assert pick_backend(both, replace(need, device=CPU, dtype=torch.float32)) is both[1]
    assert pick_backend(both, replace(need, deterministic=False)) is both[1]
    for changed, words in (
        ({"head_dim": 80}, "head_dim 80"),
        ({"query_heads": 64}, "32 query heads"),
        ({"kv_dtype": torch.float32}, "not in torch.float32"),
        ({"mode": "ragged"}, "not within a step"),
    ):
        with pytest.raises(SetupError, match=words):
            pick_backend(both, replace(need, **changed))  # type: ignore[arg-type]
