"""Streams cut what is written into the chunks that their policy says, whatever the sizes of the writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mstar.graph.streams import InnerStream, OutStream
from mstar.graph.values import Ref
from mstar.spec.errors import RequestError
from mstar.spec.graph import CLIENT, Fixed, Port, Ramp, Stream, Whole

ITEM = Port("item", "int64", (), "stacked")


def chunks(chunk: Fixed | Ramp | Whole, writes: list[int]) -> list[tuple[list[int], int, bool]]:
    """Write 0, 1, 2… in pieces of the given sizes, end, and pull all that is ready as early as it is."""
    stream = InnerStream(Stream("s", "a", "b", ITEM, chunk=chunk))
    pulled, count = [], 0

    def drain() -> None:
        while stream.ready():
            got = stream.pull()
            pulled.append((got.ref.tensor().tolist(), got.left, got.last))

    for size in writes:
        stream.write(torch.arange(count, count + size))
        count += size
        drain()
    stream.end()
    drain()
    assert stream.drained
    return pulled


def test_ramp_grows_and_keeps_left_context() -> None:
    got = chunks(Ramp((1, 3, 8), left=2), [1] * 15)
    assert [(items[left:], left) for items, left, _ in got] == [
        ([0], 0),
        ([1, 2, 3], 1),
        (list(range(4, 12)), 2),
        ([12, 13, 14], 2),
    ]
    assert got[2][0][:2] == [2, 3]
    assert [last for *_, last in got] == [False, False, False, True]


def test_whole_waits_for_the_end() -> None:
    assert chunks(Whole(), [2, 3]) == [([0, 1, 2, 3, 4], 0, True)]


@given(
    st.lists(st.integers(0, 9), max_size=12),
    st.one_of(
        st.builds(Fixed, st.integers(1, 5), st.integers(0, 4)),
        st.builds(lambda s, left: Ramp(tuple(s), left), st.lists(st.integers(1, 6), min_size=1), st.integers(0, 4)),
        st.just(Whole()),
    ),
)
def test_nothing_is_lost_or_doubled(writes: list[int], chunk: Fixed | Ramp | Whole) -> None:
    total, new = sum(writes), []
    for items, left, _ in chunks(chunk, writes):
        assert items[:left] == list(range(len(new)))[len(new) - left :]
        assert left == min(len(new), getattr(chunk, "left", 0))
        new += items[left:]
    assert new == list(range(total))


def test_a_client_that_sends_too_much_is_told() -> None:
    bounded = InnerStream(Stream("mic", CLIENT, "b", ITEM, max_items=3))
    bounded.write_from_client(torch.arange(3))
    with pytest.raises(RequestError, match="at most 3 items a request, got 4"):
        bounded.write_from_client(torch.arange(1))
    hasty = InnerStream(Stream("mic", CLIENT, "b", ITEM, capacity=2))
    hasty.write_from_client(torch.arange(2))
    with pytest.raises(RequestError, match="has room for 2"):
        hasty.write_from_client(torch.arange(1))
    hasty.end()
    with pytest.raises(RequestError, match="has ended"):
        hasty.write_from_client(torch.arange(1))


def test_a_writer_never_waits_for_a_reader_that_waits_for_the_end() -> None:
    stream = InnerStream(Stream("s", "a", "b", ITEM, chunk=Whole(), capacity=3))
    stream.write(torch.arange(3))
    assert not stream.full
    with pytest.raises(RequestError, match="holds at most 3 items"):
        stream.write(torch.arange(1))
    stream.end()
    assert stream.pull().ref.tensor().tolist() == [0, 1, 2]


def test_pulling_a_long_write_piece_by_piece_copies_each_item_about_once() -> None:
    stream = InnerStream(Stream("s", CLIENT, "b", ITEM))
    stream.write_from_client(torch.arange(1024))
    pulled = [stream.pull() for _ in range(1024)]  # all kept, so that no address is used twice
    assert len({chunk.ref.base.untyped_storage().data_ptr() for chunk in pulled}) <= 12  # one for each halving


def test_writes_to_a_reader_that_left_vanish() -> None:
    stream = InnerStream(Stream("s", "a", "b", ITEM, capacity=1))
    stream.write(torch.arange(5))
    assert stream.full
    stream.close()
    stream.write(torch.arange(5))
    assert not stream.full
    assert stream.pending == 0


def test_the_client_end_counts_credit_and_playback() -> None:
    out = OutStream(Stream("audio", "a", CLIENT, ITEM, "audio", capacity=2, seconds_per_item=0.5))
    assert out.deadline(now=7.0) == 7.0
    assert [out.sent(4, 10.0), out.sent(2, 11.0)] == [0, 1]
    assert out.full
    assert out.deadline(now=11.0) == 10.0 + 6 * 0.5
    out.ack(1)
    assert not out.full


def test_payloads() -> None:
    tokens = OutStream(Stream("text", "a", CLIENT, ITEM, "tokens"))
    base = torch.tensor([5, 6, 7])
    assert tokens.payload(Ref(base, 1, 2, row=True)) == ([6], 1)
    assert tokens.payload(Ref.whole(base)) == ([5, 6, 7], 3)
    image = OutStream(Stream("image", "a", CLIENT, Port("i", "float32", ("H", "W"), "stacked"), "image"))
    array, count = image.payload(Ref(torch.zeros(3, 4, 5), 0, 1, row=True))
    assert (array.shape, count) == ((1, 4, 5), 1)
