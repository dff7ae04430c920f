"""The way between two ranks, in a folder that both see and between machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from mstar.cluster.links import RankLink
from mstar.cluster.transport import SHARED_BYTES
from mstar.worker.messages import Contents, Drop, Fetched

ROWS = np.arange(4 * SHARED_BYTES, dtype=np.uint8)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.mark.parametrize("shared", [True, False])
def test_messages_and_large_values_pass_both_ways(shared: bool, context: zmq.Context[Any], tmp_path: Path) -> None:
    rank, end = RankLink.at(context, str(tmp_path) if shared else "tcp://127.0.0.1")
    assert (end.folder is not None) == shared
    assert bool(end.server_key) != shared  # what leaves the machine is encrypted
    leader = RankLink.to(context, end)
    leader.send([Drop(keys=[1, 2])])
    assert rank.receive(10.0) == [Drop(keys=[1, 2])]
    rank.send([Fetched(rank=1, contents=Contents(key=7, dtype="uint8", shape=ROWS.shape, data=ROWS))])
    (answer,) = leader.receive(10.0)
    np.testing.assert_array_equal(answer.contents.data, ROWS)
    assert [path.name for path in tmp_path.iterdir()] == (["link"] if shared else [])
    for one in (rank, leader):
        one.close()


def test_who_has_another_key_is_not_heard(context: zmq.Context[Any]) -> None:
    rank, end = RankLink.at(context, "tcp://127.0.0.1")
    public, _ = zmq.curve_keypair()
    ends = [msgspec.structs.replace(end, server_key=key) for key in (public.decode(), "", end.server_key)]
    links = [RankLink.to(context, one) for one in ends]
    for number, link in enumerate(links):
        link.send([Drop(keys=[number])])
    assert rank.receive(10.0) == [Drop(keys=[2])]
    assert rank.receive(0.1) == []
    for link in (rank, *links):
        link.close()
