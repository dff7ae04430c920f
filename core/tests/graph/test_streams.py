"""Streams cut what is written into the chunks that their policy says, whatever the sizes of the writes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mstar.graph.code_streams import CodeStream
from mstar.graph.streams import Chunk, InnerStream, OutStream, fresh
from mstar.graph.values import Ref
from mstar.spec.errors import RequestError
from mstar.spec.graph import CLIENT, Codes, Fixed, Fresh, Port, Ramp, Stream, Whole

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


@given(
    st.integers(0, 60),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from([(), (2, 5), (30,)]),
)
def test_windows_with_look_ahead(
    total: int, sizes: list[int], left: int, ahead: int, unit: int, padded: tuple[int, ...]
) -> None:
    """New items come in order and once; around them stands what came before and what comes next, in whole units."""
    stream = InnerStream(Stream("s", "a", "b", ITEM, chunk=Ramp(tuple(sizes), left, ahead, unit, padded)))
    whole, done, pulls = total - total % unit, 0, 0

    def drain() -> None:
        nonlocal done, pulls
        while stream.ready():
            got = stream.pull()
            items = got.ref.tensor().tolist()
            size = sizes[min(pulls, len(sizes) - 1)] * unit
            rest = whole - done
            if got.new < size:  # an end: as much as leaves the look-ahead whole, then the smallest pieces
                assert stream.ended
                fit = [n * unit for n in sizes if (n + ahead) * unit <= rest]
                assert got.new == min(rest, max(fit, default=min(sizes) * unit) if ahead else size)
            assert got.left == min(left * unit, done)
            assert got.ahead == min(ahead * unit, whole - done - got.new)
            assert got.offset == done - got.left
            shown = items[: len(items) - got.pad]
            assert shown == list(range(got.offset, done + got.new + got.ahead))
            assert items[len(shown) :] == (shown[-unit:] * (got.pad // unit))
            fits = [p * unit for p in padded if p * unit >= len(shown)]
            assert len(items) == (min(fits) if fits else len(shown))
            done, pulls = done + got.new, pulls + 1
            assert got.last == (stream.ended and done == whole)

    for item in range(total):
        stream.write(torch.tensor([item]))
        drain()
    assert done <= max(0, total - ahead * unit)
    stream.end()
    drain()
    assert stream.drained
    assert done == whole


def test_primed_items_are_context_and_never_new() -> None:
    stream = InnerStream(Stream("s", "a", "b", ITEM, chunk=Fixed(2, left=3)))
    stream.prime(torch.tensor([90, 91, 92, 93]))
    stream.write(torch.arange(3))
    stream.end()
    first, last = stream.pull(), stream.pull()
    assert (first.ref.tensor().tolist(), first.left, first.offset) == ([91, 92, 93, 0, 1], 3, 1)
    assert (last.ref.tensor().tolist(), last.left, last.offset) == ([93, 0, 1, 2], 3, 3)


FRAME = Codes(((10, 20), (20, 30)))


def test_what_is_no_code_is_left_out_and_a_slip_costs_a_frame() -> None:
    stream = CodeStream(Stream("s", "a", "b", ITEM, chunk=Fixed(1, unit=2), codes=FRAME))
    for token in (10, 20, 7, 11, 12, 13, 21, 30, 19, 29, 18):
        stream.write_code(token, token)
    stream.end()
    frames = []
    while stream.ready():
        frames.append(stream.pull().ref.to_host())
    assert frames == [[10, 20], [11, 21], [19, 29]]
    assert stream.drained


def test_code_streams_cut_as_others_do() -> None:
    pairs = Port("frame", "int64", (2,), "stacked")
    spec = Stream("s", "a", "b", pairs, chunk=Fixed(1, left=1, ahead=1, padded=(3,)), codes=Codes(((0, 9),)))
    stream = CodeStream(spec)
    stream.prime(torch.tensor([[8, 8], [9, 9]]))
    for code in range(2):
        stream.write_code(code, [code, -code])
    stream.write_code(9, [9, 9])
    stream.end()
    windows = [stream.pull().ref.tensor().tolist() for _ in range(2)]
    assert windows == [[[9, 9], [0, 0], [1, -1]], [[0, 0], [1, -1], [1, -1]]]


def test_only_what_is_new_goes_out() -> None:
    """Two units of context, two new, one ahead, one of padding; three items each. The output begins a unit late."""
    chunk = Chunk(Ref.whole(torch.zeros(12)), 4, False, new=4, ahead=2, pad=2, unit=2)
    sound = Ref(torch.arange(15.0)[None], 0, 1, row=True)
    cut, overlap = fresh(sound, Fresh("codes", 3), chunk)
    assert (cut.tensor().tolist(), overlap) == ([3, 4, 5, 6, 7, 8], 0)
    cut, overlap = fresh(sound, Fresh("codes", 3, overlap=2), chunk)
    assert (cut.tensor().tolist(), overlap) == ([3, 4, 5, 6, 7, 8, 9, 10], 2)
    cut, overlap = fresh(sound, Fresh("codes", 3, overlap=2, cut=True), chunk)
    assert (cut.tensor().tolist(), overlap) == ([0, 1, 2, 3, 4, 5, 6, 7], 2)
    for rule in (Fresh("codes", 3), Fresh("codes", 3, cut=True)):
        with pytest.raises(ValueError, match="shorter than"):
            fresh(Ref.whole(torch.zeros(5)), rule, chunk)


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
    assert out.played_until is None
    assert [out.sent(4, 10.0), out.sent(2, 11.0)] == [0, 1]
    assert out.full
    assert out.played_until == 10.0 + 6 * 0.5
    out.ack(1)
    assert not out.full
    out.sent(2, 20.0)  # after seven seconds of silence
    assert out.played_until == 20.0 + 2 * 0.5


def test_payloads() -> None:
    tokens = OutStream(Stream("text", "a", CLIENT, ITEM, "tokens"))
    base = torch.tensor([5, 6, 7])
    assert tokens.payload(Ref(base, 1, 2, row=True)) == ([6], 1)
    assert tokens.payload(Ref.whole(base)) == ([5, 6, 7], 3)
    image = OutStream(Stream("image", "a", CLIENT, Port("i", "float32", ("H", "W"), "stacked"), "image"))
    array, count = image.payload(Ref(torch.zeros(3, 4, 5), 0, 1, row=True))
    assert (array.shape, count) == ((1, 4, 5), 1)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_reaches_nobody(wrong: float, dtype: torch.dtype) -> None:
    items = torch.tensor([0.5, wrong, 0.25], dtype=dtype)
    port = Port("item", "float32", (), "stacked")
    with pytest.raises(RequestError) as caught:
        OutStream(Stream("s", "a", CLIENT, port, "audio")).payload(Ref.whole(items))
    assert (caught.value.status, caught.value.code) == (500, "numerical_error")
    told, count = OutStream(Stream("s", "a", CLIENT, port, "state")).payload(Ref.whole(items))  # may mean something
    assert count == len(told) == 3
