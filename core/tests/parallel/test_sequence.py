"""Tokens divided among ranks: attention over all of them is what one rank computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mstar.nn.mesh import Group, World
from mstar.nn.sequence import SequenceShards
from mstar.testing.ranks import Ranks

HEAD = 4


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def drawn(lengths: tuple[int, ...], heads: int) -> list[list[Tensor]]:
    """Of each part q, k and v."""
    draw = torch.Generator().manual_seed(len(lengths) * 100 + heads)
    return [[torch.randn(2, length, heads, HEAD, generator=draw) for _ in range(3)] for length in lengths]


def mixed(world: World, lengths: tuple[int, ...], heads: int) -> list[Tensor]:
    size = torch.distributed.get_world_size()
    mesh = world.mesh(range(size), sp=size)
    assert mesh is not None
    shards = SequenceShards(lengths, mesh.sp)
    parts = drawn(lengths, heads)
    own = [torch.cat([shards.own(part[i], number) for number, part in enumerate(parts)], 1) for i in range(3)]
    out = shards.attend(attend, *own)
    assert out.shape == own[0].shape
    assert out.shape[1] == shards.tokens
    return [shards.whole(out, number) for number in range(len(lengths))]


@pytest.mark.parametrize(
    ("size", "lengths", "heads"),
    [(2, (8,), 2), (2, (7,), 4), (2, (6, 5), 3), (4, (9, 2), 2), (4, (16, 4, 1), 8)],
    ids=["even", "odd length", "two parts, odd heads", "fewer heads and tokens than ranks", "three parts"],
)
def test_attention_sees_all_tokens_and_no_padding(
    ranks: Ranks, size: int, lengths: tuple[int, ...], heads: int
) -> None:
    parts = drawn(lengths, heads)
    whole = attend(*(torch.cat([part[i] for part in parts], 1) for i in range(3)))
    expected = torch.split(whole, lengths, 1)
    for rank in ranks.run(size, mixed, lengths, heads):
        for one, other in zip(expected, rank, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_one_rank_gives_back_what_it_gets() -> None:
    shards = SequenceShards((3,), Group()).beside(2)
    x = torch.randn(1, 5, 2, HEAD)
    assert shards.own(x) is x
    assert torch.equal(shards.whole(x, 1), x[:, 3:])
    assert torch.equal(shards.attend(attend, x, x, x), attend(x, x, x))


def test_keys_of_another_number_of_heads_are_refused() -> None:
    x = torch.randn(1, 4, 2, HEAD)
    with pytest.raises(ValueError, match="2 heads of queries, 1 of keys"):
        SequenceShards((8,), Group(0, 2)).attend(attend, x, x[:, :, :1], x[:, :, :1])
