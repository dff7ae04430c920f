"""Positions: plain counting, chunks, explicit multimodal positions, sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mstar.resources.base import IntegrityError, Owner, ResourceContext, Row
from mstar.resources.positions import PositionsResource
from mstar.resources.staging import Stage
from mstar.spec.errors import RequestError
from mstar.spec.request import EngineRequest
from mstar.spec.resources import Positions


def positions(axes: int = 1, prompt: str | None = None, owners: int = 4) -> PositionsResource:
    context = ResourceContext(device=torch.device("cpu"), dtype=torch.float32, max_owners=owners, stage=Stage("cpu"))
    return PositionsResource("positions", Positions(axes=axes, prompt=prompt), context)


def start(resource: PositionsResource, name: str, given: Any = None) -> Owner:
    owner = Owner(name)
    assert resource.reserve(owner, 1)
    resource.open(owner, request(name, given))
    return owner


def request(name: str, given: Any = None) -> EngineRequest:
    return EngineRequest(id=name, inputs={} if given is None else {"places": np.asarray(given)})


def step(resource: PositionsResource, owners: Sequence[Owner], lengths: Sequence[int], frozen: bool = False) -> Any:
    rows = [Row(o, length=n, complete=False) for o, n in zip(owners, lengths, strict=True)]
    table = resource.plan(rows, frozen).positions
    resource.commit(rows, frozen)
    assert table.dtype == torch.int64
    return table.tolist()


def test_prefill_chunks_and_decodes_share_a_step() -> None:
    resource = positions()
    a, b, c = (start(resource, n) for n in "abc")
    assert step(resource, [a, b], [3, 2]) == [0, 1, 2, 0, 1]
    assert step(resource, [b, c, a], [1, 3, 1]) == [2, 0, 1, 2, 3]
    assert step(resource, [a, b, c], [1, 1, 1]) == [4, 3, 3]
    assert step(resource, [a, c], [0, 2]) == [4, 5]


def test_frozen_and_failed_steps_do_not_count() -> None:
    resource = positions()
    owner = start(resource, "a")
    assert step(resource, [owner], [4]) == [0, 1, 2, 3]
    assert step(resource, [owner], [2], frozen=True) == [4, 5]
    rows = [Row(owner, length=9)]
    resource.plan(rows)
    resource.rollback(rows)
    assert step(resource, [owner], [1]) == [4]
    with pytest.raises(IntegrityError, match="without a plan"):
        resource.commit(rows)


def test_skipping_a_cached_prefix() -> None:
    resource = positions()
    owner = start(resource, "a")
    assert resource.match(owner, [1, 2, 3]) is None
    resource.skip(owner, [1, 2, 3])
    assert step(resource, [owner], [2]) == [3, 4]


def test_explicit_positions_and_what_follows_them() -> None:
    """As Qwen2-VL lays out text, a 1 x 2 x 2 image grid and text again."""
    resource = positions(axes=3, prompt="places")
    given = [[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]]
    image, plain = start(resource, "a", given), start(resource, "b")
    both = step(resource, [image, plain], [4, 2])
    assert both == [[*row[:4], 0, 1] for row in given]
    both = step(resource, [plain, image], [1, 5])  # the chunk reaches beyond the explicit part
    assert both == [[2, *row[4:], 5, 6] for row in given]
    assert step(resource, [image, plain], [1, 1]) == [[7, 3]] * 3
    assert not resource._explicit


def test_a_skipped_prefix_of_explicit_positions() -> None:
    resource = positions(axes=2, prompt="places")
    owner = start(resource, "a", [[0, 5, 6], [0, 1, 2]])
    resource.skip(owner, [11, 12])
    assert step(resource, [owner], [2]) == [[6, 7], [2, 7]]


def test_one_axis_takes_explicit_positions_too() -> None:
    resource = positions(axes=1, prompt="places")
    owner = start(resource, "a", [[3, 4, 9]])
    assert step(resource, [owner], [5]) == [3, 4, 9, 10, 11]


def test_a_session_goes_on_and_a_new_owner_starts_at_zero() -> None:
    resource = positions(axes=2, prompt="places", owners=1)
    owner = start(resource, "a", [[0, 2], [0, 1]])
    assert step(resource, [owner], [3]) == [[0, 2, 3], [0, 1, 3]]
    resource.open(owner, request("next", [[0, 0, 1], [0, 1, 1]]))
    assert step(resource, [owner], [4]) == [[4, 4, 5, 6], [4, 5, 5, 6]]
    resource.open(owner, request("third"))
    assert step(resource, [owner], [1]) == [[7], [7]]
    resource.close(owner)
    assert step(resource, [start(resource, "b")], [2]) == [[0, 1], [0, 1]]
    resource.check([Owner("b")])


@pytest.mark.parametrize("given", [[0, 1], [[0, 1]], [[0.5], [1.0]], [[], []]])
def test_wrong_explicit_positions_are_refused(given: Any) -> None:
    with pytest.raises(RequestError, match=r"\[2, T\]") as caught:
        start(positions(axes=2, prompt="places"), "a", given)
    assert caught.value.param == "places"
