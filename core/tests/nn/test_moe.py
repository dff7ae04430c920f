"""Experts: which are chosen, what they give, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mstar.nn import moe
from mstar.nn.config import DecoderConfig
from mstar.nn.mesh import Group
from mstar.nn.moe import Chosen, Experts, choose
from mstar.nn.shards import layout_faults
from mstar.spec.errors import SetupError

HIDDEN, INNER, EXPERTS = 8, 4, 5


def filled(tp: Group | None = None) -> Experts:
    """Expert *e* has the same weights, whoever has it."""
    experts = Experts(HIDDEN, INNER, EXPERTS, tp=tp)
    for stacked in (experts.gate_up_proj, experts.down_proj):
        rows = stacked.out_features
        for place in range(experts.count):
            draw = torch.Generator().manual_seed(experts.first + place)
            stacked.weight.data[place * rows : (place + 1) * rows] = torch.randn(
                rows, stacked.in_features, generator=draw
            )
    return experts


def by_hand(experts: Experts, x: torch.Tensor, chosen: Chosen) -> torch.Tensor:
    out = torch.zeros_like(x)
    gate_up = experts.gate_up_proj.weight.view(EXPERTS, 2 * INNER, HIDDEN)
    down = experts.down_proj.weight.view(EXPERTS, HIDDEN, INNER)
    for token in range(len(x)):
        for expert, weight in zip(chosen.experts[token].tolist(), chosen.weights[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out[token] += weight * (down[expert] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("grouped", [False, True], ids=["one by one", "grouped"])
def test_each_token_goes_through_its_experts(tokens: int, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, x = filled(), torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
    chosen = choose(torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(2)), 2, True)
    expected = by_hand(experts, x, chosen)
    if grouped:  # the kernel of CUDA, which PyTorch also has for the CPU

        def forward(self: Any, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            weight = self.weight.view(self._count, self.out_features, self.in_features)
            return moe._grouped(x, weight.transpose(1, 2), ends)

        monkeypatch.setattr(moe._Stacked, "forward", forward)
    torch.testing.assert_close(experts(x, chosen), expected)


def test_ranks_have_experts_whole_and_their_sum_is_the_layer() -> None:
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    chosen = Chosen(torch.tensor([[0, 4], [1, 2], [3, 0], [4, 3], [2, 1], [0, 1]]), torch.full((6, 2), 0.5))

    class Silent(Group):
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x

    five = [filled(Silent(rank, EXPERTS)) for rank in range(EXPERTS)]
    assert [(one.first, one.count) for one in five] == [(rank, 1) for rank in range(EXPERTS)]
    torch.testing.assert_close(sum(one(x, chosen) for one in five), by_hand(filled(), x, chosen))


def test_weights_are_probabilities_among_all_or_sum_to_one() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    plain, normalized = choose(logits, 2, False), choose(logits, 2, True)
    assert plain.experts.tolist() == normalized.experts.tolist() == [[0, 2]]
    torch.testing.assert_close(plain.weights, logits.softmax(-1)[:, [0, 2]])
    assert normalized.weights.sum().item() == pytest.approx(1.0)


def test_experts_that_do_not_divide_are_told() -> None:
    layer = torch.nn.ModuleDict({"experts": Experts(HIDDEN, INNER, 6, tp=Group(0, 4))})
    assert list(layout_faults("llm", layer, 4)) == [
        "node 'llm': experts: 6 experts are not divided by tp=4; tp: 1 or 2 or 3 or 6 would do for node 'llm'"
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"hidden_act": "gelu"}, "'gelu' is not supported in experts"), ({"num_experts_per_tok": 9}, "9 is more than")],
)
def test_what_the_config_may_not_say(change: dict[str, Any], words: str) -> None:
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 9,
        "intermediate_size": 8,
        "max_position_embeddings": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
    }
    assert DecoderConfig.from_hf(config).moe is not None
    with pytest.raises(SetupError, match=words):
        DecoderConfig.from_hf(config | change)
