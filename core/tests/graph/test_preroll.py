"""Playback begins when what is held will last until the next piece, by the pace of the request's own codes."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import replace
from itertools import count

import pytest
import torch

from mstar.graph.calls import CallRun
from mstar.graph.preroll import MOST
from mstar.graph.program import compile_graph
from mstar.graph.run import RequestRun
from mstar.graph.values import Ref
from mstar.nn.model import Outcome, Run
from mstar.spec.errors import RequestError
from mstar.spec.graph import (
    CLIENT,
    Call,
    Codes,
    EndOf,
    Entry,
    Fixed,
    Fresh,
    Graph,
    Loop,
    NodeSpec,
    Partition,
    Port,
    Pull,
    Ramp,
    Seq,
    Stream,
    TokenStop,
)
from mstar.spec.request import Emit, EngineRequest, SamplingParams

SAMPLES = 10
"""Of a code, which plays 0.1 s."""
LAST = 9
"""The token that ends an answer."""
_CODE, _SAMPLE = Port("code", "int64", (), "stacked"), Port("sample", "float32", (), "stacked")
_AUDIO = Stream("audio", "codec", CLIENT, _SAMPLE, "audio", seconds_per_item=0.01, fresh=Fresh("codes", SAMPLES))


def graph(audio: Stream, chunk: Fixed | Ramp, codes: Codes | None) -> Graph:
    ids = Port("ids", "int64", ("T",))
    lm = Entry(inputs=(ids,), outputs=(replace(_CODE, name="token"),), chunk="ids")
    codec = Entry(
        inputs=(Port("codes", "int64", ("C",), "stacked"),), outputs=(Port("samples", "float32", ("S",), "stacked"),)
    )
    first = Call("lm", inputs={"ids": "prompt"}, outputs={"token": "code"}, emit={"token": "codes"})
    return Graph(
        nodes=(NodeSpec("lm", (lm,)), NodeSpec("codec", (codec,))),
        walks={
            "speak": Seq(first, Loop(replace(first, inputs={"ids": "code"}), TokenStop("code"))),
            "decode": Loop(Call("codec", inputs={"codes": Pull("codes")}, emit={"samples": "audio"}), EndOf("codes")),
        },
        partitions=(Partition("lm", ("speak",)), Partition("codec", ("decode",))),
        streams=(Stream("codes", "lm", "codec", _CODE, chunk=chunk, codes=codes), audio),
        inputs=(replace(ids, name="prompt"),),
    )


class Speaking:
    """One request, its clock and what its client got. Codes are 0, 1, 2… and sound as often as a code has samples."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        audio: Stream = _AUDIO,
        chunk: Fixed | Ramp | None = None,
        codes: Codes | None = None,
    ):
        self.now, self.events = 100.0, list[Emit]()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        plan = compile_graph(graph(audio, chunk or Fixed(2), codes or Codes(((0, LAST),))))
        request = EngineRequest(
            id="r",
            inputs={"prompt": torch.tensor([1]).numpy()},
            sampling={"sampler": SamplingParams(max_tokens=1000, stop_token_ids=[LAST])},
        )
        self.run = RequestRun(plan, request, self._route, self.events.append, torch.device("cpu"), torch.float32)
        self.run.start()
        self.codes = count()

    @staticmethod
    def _route(partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        yield Run("speak" if partition == "lm" else "decode")

    def _next(self, node: str) -> CallRun:
        call = next(call for call in self.run.ready if call.op.call.node == node)
        self.run.ready.remove(call)
        return call

    def write(self, codes: int, each: float) -> None:
        """The language model writes so many codes, one every *each* seconds."""
        for _ in range(codes):
            self.now += each
            self._write(next(self.codes) % LAST)

    def end(self) -> None:
        self._write(LAST)

    def _write(self, token: int) -> None:
        outputs = {"token": Ref(torch.tensor([token]), 0, 1, row=True)}
        self.run.complete(self._next("lm"), outputs)

    def decode(self, seconds: float, wrong: bool = False) -> None:
        """The codec makes a piece, which takes so long."""
        call = self._next("codec")
        self.now += seconds
        codes = call.inputs["codes"].tensor()
        samples = codes.float().repeat_interleave(SAMPLES)
        if wrong:
            samples[0] = float("nan")
        self.run.complete(call, {"samples": Ref.whole(samples)})

    @property
    def heard(self) -> list[list[int]]:
        """The codes of each piece."""
        return [piece.data[::SAMPLES].astype(int).tolist() for piece in self.events]

    @property
    def until(self) -> float | None:
        return self.run.out["audio"].played_until


def test_who_is_alone_hears_the_first_piece_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Speaking(monkeypatch)
    one.write(2, 0.01)
    one.decode(0.005)
    assert one.heard == [[0, 1]]


def test_the_first_piece_waits_for_the_second_where_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Speaking(monkeypatch)
    one.write(2, 0.07)
    one.decode(0.01)  # two more codes take 0.14 s and may be late; what is there plays 0.2 s
    assert one.heard == []
    assert one.until is None  # so the next piece is due
    one.write(2, 0.07)
    one.decode(0.01)
    assert one.heard == [[0, 1], [2, 3]]
    assert [event.seq for event in one.events] == [0, 1]
    assert one.until == pytest.approx(one.now + 0.4)
    one.write(2, 0.09)
    one.decode(0.1)  # playback has begun: whatever comes goes out
    assert one.heard[2:] == [[4, 5]]


def test_codes_that_are_there_already_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Speaking(monkeypatch)
    one.write(2, 0.05)
    one.write(2, 0.02)  # before the first piece is there
    one.decode(0.03)
    assert one.heard == [[0, 1]]


def test_what_a_turn_of_the_codec_takes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Speaking(monkeypatch)
    one.write(3, 0.04)
    one.decode(0.1)
    assert one.heard == []


def test_longer_chunks_that_follow_are_waited_for_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Speaking(monkeypatch, chunk=Ramp((1, 3, 8)))
    one.write(2, 0.008)
    one.decode(0.002)  # 0.1 s of sound, and two codes are missing
    assert one.heard == [[0]]
    other = Speaking(monkeypatch, chunk=Ramp((1, 3, 8)))
    other.write(2, 0.06)
    other.decode(0.01)
    assert other.heard == []


def test_long_pieces_are_not_held_for_as_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Speaking(monkeypatch, chunk=Fixed(10))
    one.write(10, 0.06)
    one.decode(0.01)  # the next one in 0.65 s, what is there plays 1 s
    assert len(one.heard) == 1


def test_who_is_slower_than_real_time_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Speaking(monkeypatch)
    one.write(3, 0.1)
    one.decode(0.05)
    assert one.heard == [[0, 1]]


def test_the_end_sends_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Speaking(monkeypatch)
    one.write(2, 0.07)
    one.decode(0.01)
    assert one.heard == []
    one.end()
    assert one.run.finished
    assert one.heard == [[0, 1]]


def test_what_follows_the_last_code_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Speaking(monkeypatch)
    one.write(6, 0.07)
    one.end()
    one.decode(0.01)
    assert one.heard == [[0, 1]]
    one.decode(0.01)
    one.decode(0.01)
    assert one.heard == [[0, 1], [2, 3], [4, 5]]
    assert one.run.finished


def test_a_last_piece_goes_with_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Speaking(monkeypatch)
    one.write(2, 0.07)
    one.decode(0.01)
    one.write(1, 0.07)
    one.end()
    assert one.heard == []
    one.decode(0.01)
    assert one.heard == [[0, 1], [2]]
    assert one.run.finished


def test_a_request_that_is_let_go_sends_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Speaking(monkeypatch)
    one.write(2, 0.07)
    one.decode(0.01)
    one.run.let_go()
    assert one.heard == [[0, 1]]
    assert one.run.out["audio"].items == 2 * SAMPLES
    one.run.let_go()
    assert one.heard == [[0, 1]]


def test_a_piece_that_is_no_sound_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is to wait for the error, and what was right before it is not lost."""
    one = Speaking(monkeypatch)
    one.write(2, 0.07)
    one.decode(0.01)
    one.write(2, 0.07)
    with pytest.raises(RequestError):
        one.decode(0.01, wrong=True)
    one.run.let_go()
    assert one.heard == [[0, 1]]


def test_only_a_few_pieces_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Speaking(monkeypatch)
    one.write(2, 0.07)
    one.decode(0.01)
    one.write(2, 0.07)
    for late in range(2, MOST + 1):  # the codec is, again and again: each time by as much as is held and more
        assert one.heard == []
        one.write(4 * late + 4, 0.05)
        one.decode(0.0)
    assert len(one.heard) == MOST


@pytest.mark.parametrize(("capacity", "held"), [(1, 0), (2, 1), (8, 1)])
def test_a_client_that_takes_few_pieces_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capacity: int, held: int
) -> None:
    """Its credit comes with what it hears."""
    one = Speaking(monkeypatch, replace(_AUDIO, capacity=capacity))
    one.write(2, 0.07)
    one.decode(0.01)
    assert len(one.heard) == 1 - held
    one.run.ack("audio", 1)
    one.write(2, 0.07)
    one.decode(0.01)
    assert len(one.heard) == 2


@pytest.mark.parametrize("without", [{"seconds_per_item": None}, {"fresh": None}])
def test_streams_that_nobody_plays_or_paces_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, without: Mapping[str, None]
) -> None:
    one = Speaking(monkeypatch, replace(_AUDIO, **without))
    one.write(2, 0.07)
    one.decode(0.01)
    assert one.heard == [[0, 1]]
