"""Sums over ranks in one kernel. In Triton's interpreter one rank runs, whose peers the test plays word by word; on a
machine with several GPUs two processes run, at whatever pace. Run as ``cuda_ops_cases.py`` is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar.nn import symmetric
from mstar.nn.mesh import World, _added
from mstar.nn.ops import cuda, cuda_linear, cuda_sums, pdl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROOM = 3 * cuda_sums.PROGRAMS * cuda_sums.BLOCK
TIMES = 1000
# The interpreter cuts bfloat16 off where a GPU rounds to nearest.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 0.0}

interpreted = pytest.mark.skipif(not INTERPRETED, reason="one rank by itself")
on_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="for a GPU")
on_gpus = pytest.mark.skipif(INTERPRETED or torch.cuda.device_count() < 2, reason="for two GPUs")


def drawn(rank: int, call: int, *shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + call)
    return torch.randn(*shape, generator=generator).to(dtype)


# --- one rank ---------------------------------------------------------------------------------------------------------
class Post:
    """The inboxes of all ranks, in this process."""

    def __init__(self, size: int, rank: int, room: int = ROOM):
        self.inboxes = [torch.zeros(2, size, room, dtype=torch.int64) for _ in range(size)]
        addresses = torch.tensor([inbox.data_ptr() for inbox in self.inboxes])
        calls = torch.zeros(cuda_sums.PROGRAMS, dtype=torch.int32)
        self.mail = cuda_sums.Mail(rank, size, room, addresses, calls)

    def sent(self, call: int, sender: int, to: int, words: int) -> Tensor:
        return self.inboxes[to][call % 2, sender, :words]

    def play(self, call: int, parts: list[Tensor]) -> None:
        """What the others send in *call*."""
        for sender, part in enumerate(parts):
            if sender != self.mail.rank:
                words = worded(part, call)
                self.sent(call, sender, self.mail.rank, len(words)).copy_(words)


def worded(part: Tensor, call: int) -> Tensor:
    """The words of a message: the call's number, 32 bits of it."""
    return part.reshape(-1).view(torch.int32).to(torch.int64) & 0xFFFFFFFF | (call << 32)


def close(got: Tensor, exact: Tensor) -> None:
    limit = ROUNDING[got.dtype]
    torch.testing.assert_close(got, exact, rtol=limit, atol=limit)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (4, 2)])
def test_parts_are_sent_and_added_in_the_order_of_the_ranks(dtype: torch.dtype, size: int, rank: int) -> None:
    post = Post(size, rank)
    shapes = [(1, 8), (3, 300), (2, 2 * cuda_sums.BLOCK), (1, 2)]
    for call, shape in enumerate(shapes, start=1):
        parts = [drawn(each, call, *shape, dtype=dtype) for each in range(size)]
        residual = drawn(9, call, *shape, dtype=dtype)
        post.mail.calls.fill_(call - 1)  # short messages leave programs out, whose counts the test would have to keep
        post.play(call, parts)
        wide = sum((part.float() for part in parts[1:]), parts[0].float()) + residual.float()
        cuda_sums.add(post.mail, residual, parts[rank].clone())
        close(residual, wide.to(dtype))
        words = worded(parts[rank], call)
        for peer in range(size):
            sent = post.sent(call, rank, peer, len(words))
            assert torch.equal(sent, words) if peer != rank else not sent.any()
        assert post.mail.calls[0] == call


@interpreted
def test_only_programs_that_had_words_count_a_call() -> None:
    post = Post(2, 0)
    x = torch.ones(1, 3 * cuda_sums.BLOCK)
    post.play(1, [x, x])
    cuda_sums.reduce(post.mail, x.clone())
    post.play(2, [x[:, :4], x[:, :4]])
    cuda_sums.reduce(post.mail, x[:, :4].clone())
    assert post.mail.calls.tolist() == [2, 1, 1] + [0] * (cuda_sums.PROGRAMS - 3)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_has_the_bits_of_the_sum_in_order(dtype: torch.dtype) -> None:
    parts = [drawn(each, 1, 5, 12, dtype=dtype) for each in range(3)]
    parts[0][0, 0] = parts[1][0, 0] = parts[2][0, 0] = -0.0
    expected = _added(torch.stack(parts), torch.empty(5, 12, dtype=dtype))
    for rank in range(3):
        post = Post(3, rank)
        post.play(1, parts)
        x = parts[rank].clone()
        total = cuda_sums.reduce(post.mail, x)
        assert total is x
        close(total, expected)
        assert total[0, 0].signbit()


@interpreted
def test_messages_of_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_sums, "PROGRAMS", 4)
    post = Post(2, 1)
    length = 2 * 4 * cuda_sums.BLOCK + 10
    parts = [drawn(each, 1, 1, length, dtype=torch.float32) for each in range(2)]
    post.play(1, parts)
    assert torch.equal(cuda_sums.reduce(post.mail, parts[1].clone()), parts[0] + parts[1])
    assert torch.equal(post.sent(1, 1, 0, length), worded(parts[1], 1))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_gathered_beside_each_other(dtype: torch.dtype) -> None:
    parts = [drawn(each, 1, 3, 264, dtype=dtype) for each in range(3)]
    post = Post(3, 1)
    post.play(1, parts)
    assert torch.equal(cuda_sums.gather(post.mail, parts[1]), torch.cat(parts, 1))


@interpreted
def test_after_all_numbers_calls_begin_again_without_that_of_an_empty_inbox() -> None:
    post = Post(2, 0)
    post.mail.calls.fill_(-1)
    x = torch.ones(1, 4)
    post.play(2, [x, x])
    assert torch.equal(cuda_sums.reduce(post.mail, x.clone()), 2 * x)
    assert post.mail.calls[0] == 2


@interpreted
def test_which_messages_are_taken() -> None:
    mail = Post(2, 0, room=8).mail
    for shape, dtype, taken in [
        ((2, 4), torch.float32, True),
        ((3, 4), torch.float32, False),
        ((4, 4), torch.bfloat16, True),
        ((4, 3), torch.bfloat16, False),
        ((0, 4), torch.bfloat16, False),
        ((2, 4), torch.int32, False),
    ]:
        assert cuda_sums.takes(mail, torch.zeros(shape, dtype=dtype)) is taken


# --- a rank whose peers say what it says ------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (1, 3)])
def test_echoes_are_added_and_gathered(dtype: torch.dtype, rank: int, size: int) -> None:
    mail = cuda_sums.echoing(rank, size, ROOM, torch.device(DEVICE))
    for call, shape in enumerate([(1, 8), (3, 640), (1, 8), (2, 1024), (5, 6)]):
        x = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(call)).to(DEVICE, dtype)
        stream = torch.full_like(x, 3)
        cuda_sums.add(mail, stream, x)
        assert torch.equal(stream, 3 + size * x)
        assert torch.equal(cuda_sums.gather(mail, x), torch.cat([x] * size, 1))
        assert torch.equal(cuda_sums.reduce(mail, x.clone()), size * x)


@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_reducer_finds_itself_right(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device, most = torch.device(DEVICE), 4096 if INTERPRETED else 1 << 20
    if INTERPRETED:
        monkeypatch.setattr(symmetric, "symmetric_fault", lambda device: None)
    reducer = symmetric.SymmetricReducer(None, device, most, cuda_sums.echoing(rank, 2, most // 4, device)).echo()
    assert int(symmetric._wrong(reducer, rank, [rank] * 2, device)) == 0
    assert int(symmetric._wrong(reducer, rank, [1 - rank] * 2, device)) > 0
    assert symmetric._settled(device)


@on_gpu
@pytest.mark.timeout(40, method="thread")
@pytest.mark.parametrize("rows", [1, 8])
def test_between_products_that_read_early(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph of kernels that are launched early the bits are those of one kernel after the other."""
    layers, width, mail = 12, 2048, cuda_sums.echoing(0, 2, ROOM, torch.device("cuda"))
    weights = [(drawn(0, layer, width, width, dtype=torch.bfloat16) / 64).cuda() for layer in range(layers)]
    norm, start = torch.ones(width, device="cuda").bfloat16(), drawn(9, 0, rows, width, dtype=torch.bfloat16).cuda()
    x = start.clone()

    def step() -> None:
        x.copy_(start)
        for weight in weights:
            normed = cuda.add_rms_norm(x, None, norm, 1e-6)
            part = cuda_linear.linear(normed, weight, None)
            cuda_sums.add(mail, x, torch.mm(normed, weight.T) if part is None else part)

    step()
    expected = x.clone()
    monkeypatch.setattr(pdl, "_on", torch.cuda.get_device_capability() >= (9, 0))
    step()  # compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    for _ in range(200):
        x.zero_()
        graph.replay()
        assert torch.equal(x, expected)


# --- two ranks on one GPU ---------------------------------------------------------------------------------------------
Make = Callable[..., Any]


class Streams:
    """Two ranks as two branches of a graph, on one GPU: all but the way over NVLink.

    Nothing may be loaded while a kernel waits for the other rank's, which the same thread is to launch: the driver
    would wait for the kernel. So every call is made once by itself, with an inbox in which all that it waits for has
    come, and only a graph runs both ranks side by side.
    """

    def __init__(self, room: int = 1 << 18):
        self.inboxes = [torch.zeros(2, 2, room, dtype=torch.int64, device="cuda") for _ in range(2)]
        addresses = torch.tensor([inbox.data_ptr() for inbox in self.inboxes], device="cuda")
        calls = [torch.zeros(cuda_sums.PROGRAMS, dtype=torch.int32, device="cuda") for _ in range(2)]
        self.mails = [cuda_sums.Mail(rank, 2, room, addresses, calls[rank]) for rank in range(2)]
        self.streams = [torch.cuda.Stream() for _ in range(2)]

    def captured(self, step: Callable[[int, Make], None]) -> torch.cuda.CUDAGraph:
        """A graph of *step* of both ranks. It is given the rank, and how to call: ``make(function, mail, …)``."""
        for rank in range(2):
            step(rank, self._alone)
        self._blank(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for rank, stream in enumerate(self.streams):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    step(rank, self._as_it_is)
            for stream in self.streams:
                torch.cuda.current_stream().wait_stream(stream)
        return graph

    def _alone(self, function: Callable[..., Any], mail: cuda_sums.Mail, *given: Any) -> Any:
        self._blank(1 << 32)  # words of call 1, which follows
        return function(mail, *given)

    @staticmethod
    def _as_it_is(function: Callable[..., Any], mail: cuda_sums.Mail, *given: Any) -> Any:
        return function(mail, *given)

    def _blank(self, word: int) -> None:
        for inbox, mail in zip(self.inboxes, self.mails, strict=True):
            inbox.fill_(word)
            mail.calls.zero_()


@on_gpu
@pytest.mark.timeout(40, method="thread")
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_on_one_gpu(dtype: torch.dtype) -> None:
    two = Streams()
    shapes = [(1, 8), (1, 4096), (8, 4096), (33, 640), (32, 4096), (1, 4096), (7, 2)]
    parts = [[drawn(rank, call, *shape, dtype=dtype).cuda() for rank in range(2)] for call, shape in enumerate(shapes)]
    starts = [drawn(9, call, *shape, dtype=dtype).cuda() for call, shape in enumerate(shapes)]
    sums, added = ([[torch.empty_like(x) for x in starts] for _ in range(2)] for _ in range(2))
    rows: list[dict[int, Tensor]] = [{}, {}]

    def step(rank: int, make: Make) -> None:
        mail = two.mails[rank]
        for call, both in enumerate(parts):
            make(cuda_sums.reduce, mail, sums[rank][call].copy_(both[rank]))
            make(cuda_sums.add, mail, added[rank][call].copy_(starts[call]), both[rank])
            rows[rank][call] = make(cuda_sums.gather, mail, both[rank])

    graph = two.captured(step)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        for call, both in enumerate(parts):
            wide = both[0].float() + both[1].float()
            for rank in range(2):
                assert torch.equal(sums[rank][call], wide.to(dtype)), (shapes[call], rank)
                assert torch.equal(added[rank][call], (wide + starts[call].float()).to(dtype)), (shapes[call], rank)
                assert torch.equal(rows[rank][call], torch.cat(both, 1)), (shapes[call], rank)


@on_gpu
@pytest.mark.timeout(40, method="thread")
@pytest.mark.parametrize("early", [False, True])
def test_two_ranks_on_one_gpu_many_times(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long and short messages by turns, each rank with work of its own in between."""
    monkeypatch.setattr(pdl, "_on", early and torch.cuda.get_device_capability() >= (9, 0))
    two, shapes = Streams(), [(1, 4096), (64, 4096), (1, 256), (8, 4096), (1, 4096)]
    counts = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2)]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2)]
    places = [torch.arange(rows * width, device="cuda").view(rows, width) for rows, width in shapes]

    def step(rank: int, make: Make) -> None:
        counts[rank].add_(1)
        for number, place in enumerate(places):  # small whole numbers, which every sum has exactly
            parts = [((place + 7 * peer + number + counts[rank] * (peer + 3)) % 61).bfloat16() for peer in range(2)]
            stream = ((place + counts[rank]) % 32).bfloat16()
            exact = stream + parts[0] + parts[1]
            make(cuda_sums.add, two.mails[rank], stream, parts[rank])
            wrong[rank].add_((stream != exact).sum())

    graph = two.captured(step)
    for zeroed in (*counts, *wrong):
        zeroed.zero_()
    for _ in range(TIMES):
        graph.replay()
    torch.cuda.synchronize()
    assert [int(count) for count in counts] == [TIMES] * 2
    assert [int(count) for count in wrong] == [0, 0]


# --- two ranks --------------------------------------------------------------------------------------------------------
@on_gpus
@pytest.mark.timeout(120)
def test_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path / "meeting")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=100)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)


class Two:
    """One of two ranks; :meth:`__call__` runs every check."""

    def __init__(self, meeting: str, rank: int):
        torch.cuda.set_device(rank)
        self.rank, self.device = rank, torch.device("cuda", rank)
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{meeting}", rank=rank, world_size=2
        )
        self.world = World(self.device, ordered=False, symmetric_bytes=1 << 20)
        mesh = self.world.mesh([0, 1], tp=2)
        assert mesh is not None
        self.tp = mesh.tp
        assert isinstance(self.tp.reducer, symmetric.SymmetricReducer), "the sums go through NCCL"
        self.reducer = self.tp.reducer

    def __call__(self) -> None:
        for early in (False, True):
            pdl.use(early)
            for dtype in DTYPES:
                self.numbers(dtype)
            self.replayed()
        self.chained()

    def numbers(self, dtype: torch.dtype) -> None:
        for call, shape in enumerate([(1, 8), (1, 4096), (8, 4096), (33, 640), (64, 4096), (1, 4096), (7, 2)]):
            parts = [drawn(rank, call, *shape, dtype=dtype).to(self.device) for rank in range(2)]
            residual, own = drawn(9, call, *shape, dtype=dtype).to(self.device), parts[self.rank]
            if not self.reducer.takes(own):
                assert own.nbytes > 1 << 20
                continue
            wide = parts[0].float() + parts[1].float()
            assert torch.equal(self.tp.all_reduce(own.clone()), wide.to(dtype)), (shape, dtype)
            assert torch.equal(self.tp.all_gather(own), torch.cat(parts, 1)), (shape, dtype)
            assert self.tp.add_reduced(residual, own)
            exact = wide + drawn(9, call, *shape, dtype=dtype).to(self.device).float()
            assert torch.equal(residual, exact.to(dtype)), (shape, dtype)

    def replayed(self, times: int = TIMES) -> None:
        """Calls of long and short messages in a captured graph; each rank is late when it likes."""
        shapes = [(1, 4096), (64, 4096), (1, 256), (8, 4096), (1, 4096)]
        count = torch.zeros((), dtype=torch.int64, device=self.device)
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        places = [torch.arange(rows * width, device=self.device).view(rows, width) for rows, width in shapes]

        def step() -> None:
            count.add_(1)
            for number, place in enumerate(places):  # small whole numbers, which every sum has exactly
                parts = [((place + 7 * rank + number + count * (rank + 3)) % 61).bfloat16() for rank in range(2)]
                residual = ((place + count) % 32).bfloat16()
                exact = residual + parts[0] + parts[1]
                assert self.tp.add_reduced(residual, parts[self.rank])
                wrong.add_((residual != exact).sum())

        graph = self.captured(step)
        late = torch.Generator().manual_seed(self.rank)
        for _ in range(times):
            if not int(torch.randint(8, (), generator=late)):
                torch.cuda._sleep(int(torch.randint(400_000, (), generator=late)))
            graph.replay()
        torch.cuda.synchronize()
        assert int(count) == times + 1
        assert not int(wrong), f"{int(wrong)} numbers of {times} steps are wrong"

    def chained(self, layers: int = 12, width: int = 2048) -> None:
        """Between products that read their weights early: the bits are those of one kernel after the other."""
        weights = [drawn(self.rank, layer, width, width, dtype=torch.bfloat16) / 64 for layer in range(layers)]
        weights = [weight.to(self.device) for weight in weights]
        norm = torch.ones(width, dtype=torch.bfloat16, device=self.device)
        start = drawn(9, 0, 1, width, dtype=torch.bfloat16).to(self.device)
        x = start.clone()

        def step() -> None:
            x.copy_(start)
            for weight in weights:
                part = cuda_linear.norm_linear(x, norm, 1e-6, weight, None)
                assert part is not None
                assert self.tp.add_reduced(x, part)

        pdl.use(False)
        step()
        expected = x.clone()
        other = self.tp.all_gather(expected.view(torch.float32), 0)  # not by our kernel
        assert torch.equal(other[0].view(torch.int32), other[1].view(torch.int32)), "the ranks' bits differ"
        assert cuda.add_rms_norm(expected, None, norm, 1e-6).isfinite().all()
        pdl.use(True)
        graph = self.captured(step)
        for _ in range(200):
            x.zero_()
            graph.replay()
            assert torch.equal(x, expected)

    def captured(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        step()  # compiled
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        return graph


def main() -> None:
    two = Two(sys.argv[1], int(sys.argv[2]))
    two()
    two.tp.least(0)  # nobody's memory goes while the other may still write to it
    sys.stdout.flush()
    os._exit(0)  # to take NCCL's groups apart takes long


if __name__ == "__main__":
    main()
