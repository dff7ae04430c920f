from __future__ import annotations

import pytest
import torch
from kv_reference import make_context, reference
from torch import Tensor

from mstar.resources.base import IntegrityError, Owner, Row
from mstar.resources.cross_kv import CrossKV
from mstar.spec import resources as specs
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.request import EngineRequest

pytestmark = pytest.mark.usefixtures("attention_backend")

A, B, C = Owner("A"), Owner("B"), Owner("C")


def make(max_owners: int = 3, memory: int | None = None, **fields: object) -> CrossKV:
    defaults = {"layers": 2, "kv_heads": 2, "query_heads": 4, "head_dim": 8, "max_tokens": 20}
    spec = specs.CrossKV(**{**defaults, **fields})  # type: ignore[arg-type]
    return CrossKV("memory", spec, make_context(max_owners, memory))


def start(resource: CrossKV, *owners: Owner) -> None:
    for owner in owners:
        assert resource.reserve(owner, 1)
        resource.open(owner, EngineRequest(id=owner.key))


def write(resource: CrossKV, rows: list[Row]) -> dict[Owner, Tensor]:
    """Memories ``[layers, 2, length, Hkv, D]`` by owner."""
    view = resource.plan(rows)
    packed = torch.randn(2, 2, sum(row.length for row in rows), 2, 8)
    for layer in range(2):
        view.write(layer, packed[layer, 0], packed[layer, 1])
    parts = packed.split([row.length for row in rows], 2)
    return {row.owner: part for row, part in zip(rows, parts, strict=True)}


def read(resource: CrossKV, rows: list[Row], memories: dict[Owner, Tensor], lengths: list[int] | None = None) -> None:
    counts = lengths or [row.length for row in rows]
    view = resource.plan(rows)
    for layer in range(2):
        q = torch.randn(sum(counts), 4, 8)
        parts = view.attend(layer, q, lengths).split(counts)
        for row, part, asked in zip(rows, parts, q.split(counts), strict=True):
            k, v = memories[row.owner][layer].double()
            wanted = reference(asked.double(), k, v, 0, causal=False)
            torch.testing.assert_close(part.double(), wanted, rtol=1e-5, atol=2e-6)
    resource.commit(rows)


def test_written_once_and_read_every_step() -> None:
    resource = make()
    start(resource, A, B, C)
    rows = [Row(A, 20), Row(B, 3)]
    memories = write(resource, rows)
    resource.commit(rows)
    memories |= write(resource, [Row(C, 7)])
    resource.commit([Row(C, 7)])
    read(resource, [Row(A), Row(B), Row(C)], memories)
    read(resource, [Row(C, 30), Row(A, 2), Row(B, 2)], memories)  # queries may be more than the memory holds
    read(resource, [Row(B), Row(C)], memories, [4, 2])
    resource.check([A, B, C])


def test_a_memory_may_be_longer_than_its_row() -> None:
    resource = make()
    start(resource, A, B, C)
    rows, packed = [Row(A), Row(B)], torch.randn(2, 2, 12, 2, 8)
    view = resource.plan(rows)
    for layer in range(2):
        view.write(layer, packed[layer, 0], packed[layer, 1], [5, 7])
    resource.commit(rows)
    read(resource, rows, {A: packed[:, :, :5], B: packed[:, :, 5:]})
    assert torch.equal(resource.plan(rows).keys(1, 1), packed[1, 0, 5:])
    with pytest.raises(RequestError, match="an input of 21 encoder positions"):
        resource.stage([Row(C)], [21])


def test_keys_that_were_not_written() -> None:
    resource = make()
    start(resource, A)
    with pytest.raises(IntegrityError, match="before it was written"):
        resource.plan([Row(A)]).keys(0, 0)


def test_a_memory_is_written_once() -> None:
    resource = make()
    start(resource, A)
    write(resource, [Row(A, 5)])
    resource.commit([Row(A, 5)])
    with pytest.raises(IntegrityError, match="written before"):
        write(resource, [Row(A, 5)])
    start(resource, B)
    view = resource.plan([Row(B, 1)])
    view.write(0, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
    with pytest.raises(IntegrityError, match="twice"):
        view.write(0, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))


def test_a_failed_write_is_forgotten_and_can_be_repeated() -> None:
    resource = make()
    start(resource, A, B)
    write(resource, [Row(A, 5), Row(B, 9)])
    resource.rollback([Row(A, 5), Row(B, 9)])
    with pytest.raises(IntegrityError, match="before it was written"):
        resource.plan([Row(A)]).attend(0, torch.randn(1, 4, 8))
    memories = write(resource, [Row(B, 9)])
    resource.commit([Row(B, 9)])
    read(resource, [Row(B)], memories)


def test_an_entry_may_write_and_read_in_one_step() -> None:
    resource = make()
    start(resource, A)
    view = resource.plan([Row(A, 6)])
    k, v, q = torch.randn(6, 2, 8), torch.randn(6, 2, 8), torch.randn(1, 4, 8)
    view.write(0, k, v)
    out = view.attend(0, q, [1])
    wanted = reference(q.double(), k.double(), v.double(), 0, causal=False)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=2e-6)


def test_limits() -> None:
    resource = make()
    start(resource, A)
    with pytest.raises(RequestError, match="max_tokens"):
        write(resource, [Row(A, 21)])
    with pytest.raises(IntegrityError, match="frozen"):
        resource.plan([Row(A, 2)], frozen=True).write(0, torch.zeros(2, 2, 8), torch.zeros(2, 2, 8))
    with pytest.raises(SetupError, match="slots=2"):
        make(slots=2)
    with pytest.raises(SetupError, match="memory budget"):
        make(memory=100)
    resource.close(A)
    resource.check([])
    assert resource.usage().used == 0
