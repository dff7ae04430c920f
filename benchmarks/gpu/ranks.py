"""What one rank does for ``ranks_gpu.py``: the parts, each run by all ranks of a world at once.

Rank 0 appends each part's result to a file as a line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from gpu.checkpoints import publish
from gpu.child import failure
from gpu.deploy import deployment
from gpu.echo import echoing
from gpu.engine import GREEDY, Engine
from gpu.shapes import CHECKED, SHAPES, Sizes, sizes_of
from gpu.timeline import profile_steps, show_timeline
from gpu.values import SIZES, measure
from mstar.nn.mesh import SINGLE, Group, Mesh
from mstar.nn.ops import pdl
from mstar.nn.symmetric import SymmetricReducer, symmetric_fault
from mstar.spec.deployment import EngineOptions
from mstar.worker.layout import open_world

__all__ = ["PARTS", "RankJob", "Ranks"]

ROWS = (1, 8, 32, 128)
"""Rows of the steps whose sums are timed."""
TRANSFERS = (512, 2048, 8192)
"""Tokens of the contexts that are moved."""
BATCHES = (1, 8, 32, 64)
ANSWER = 48


@dataclass(frozen=True)
class RankJob:
    """*meeting*: the file by which the ranks find each other. *folder*: where checkpoints are. *out*: of results.
    *symmetric_bytes*: as in the deployment's ``engine``. *early*: kernels are launched early."""

    shapes: tuple[str, ...]
    parts: tuple[str, ...]
    device: str
    rank: int
    size: int
    meeting: str
    folder: str
    out: str
    symmetric_bytes: int = 0
    early: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class Ranks:
    """This process's place, and what it measures."""

    def __init__(self, job: RankJob):
        self.job = job
        self.device = torch.device(job.device, job.rank) if job.device == "cuda" else torch.device("cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            if job.early:
                pdl.use(True)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{job.meeting}", rank=job.rank, world_size=job.size)
        self.world = open_world(self.device, EngineOptions(symmetric_bytes=job.symmetric_bytes))
        found = self.world.mesh(range(job.size), tp=job.size)
        assert found is not None
        self.mesh = found

    def publish(self, shapes: Iterable[str]) -> None:
        """Have rank 0 write the checkpoints of *shapes*, which all ranks wait for."""
        if self.job.rank == 0:
            for shape in shapes:
                publish(SHAPES[shape], Path(self.job.folder) / shape, str(self.device))
        self.meet()

    def engine(self, shape: str, mesh: Mesh, **changed: Any) -> Engine:
        sizes = dataclasses.replace(sizes_of(shape), batches=self.batches(shape))
        options = deployment(sizes, str(self.device), changed)
        return Engine(shape, Path(self.job.folder) / shape, options, meshes={"llm": mesh})

    def batches(self, shape: str) -> tuple[int, ...]:
        return (1, 3) if shape == "tiny" else BATCHES

    def meet(self) -> None:
        """Return when all ranks are here."""
        self.mesh.least(0)

    # --- parts --------------------------------------------------------------------------------------------------------
    def check(self) -> dict[str, Any]:
        """Greedy tokens of all ranks together and of one alone, in float32, must be the same."""
        shapes = CHECKED if self.device.type == "cuda" else ("tiny",)
        self.publish(shapes)
        rows = []
        for shape in shapes:
            said = [self._answers(shape, mesh) for mesh in (self.mesh, SINGLE)]
            rows.append({"shape": shape, "same": said[0] == said[1], "tokens": sum(map(len, said[1]))})
        if not all(row["same"] for row in rows):
            raise RuntimeError(f"ranks together say something else than one alone: {rows}")
        return {"rows": rows}

    def _answers(self, shape: str, mesh: Mesh) -> list[list[int]]:
        engine = self.engine(shape, mesh, dtype="float32")
        names = [engine.submit(engine.prompt(length), ANSWER, **GREEDY) for length in (3, 40, 17)]
        engine.run_to_end(names)
        found = [engine.tokens[name] for name in names]
        engine.close()
        return found

    def sums(self) -> dict[str, Any]:
        """Microseconds of one sum of ``rows × hidden`` in bfloat16, by each way there is; captured on a GPU.

        ``symmetric``: our kernel; ``added``: the same, to a stream; ``early``: launched early besides. And of a row's
        ``logits``, gathered.
        """
        ways: dict[str, Group] = {"plain": self._group(None, ordered=False), "ordered": self._group(None, ordered=True)}
        fault = symmetric_fault(self.device)
        reducer = None
        if fault is None:
            reducer = SymmetricReducer(self.mesh.tp.handle, self.device, 1 << 20)
            ways["symmetric"] = self._group(reducer, ordered=False)
        rows = []
        for hidden in sorted({SHAPES[shape].facts.hidden for shape in self.job.shapes}):
            for count in ROWS:
                row: dict[str, Any] = {"hidden": hidden, "rows": count, "bytes": 2 * count * hidden}
                for name, group in ways.items():
                    x = torch.full((count, hidden), float(self.job.rank + 1), dtype=torch.bfloat16, device=self.device)
                    total = group.all_reduce(x.clone())
                    if not bool((total == sum(range(1, self.job.size + 1))).all()):
                        raise RuntimeError(f"{name}: {count} × {hidden} is added up wrongly")
                    row[name] = self._microseconds(lambda x=x, group=group: group.all_reduce(x))
                if reducer is not None:
                    stream, group = torch.zeros_like(x), ways["symmetric"]
                    for name, early in (("added", False), ("early", True)):
                        pdl.use(early)
                        row[name] = self._microseconds(lambda x=x, s=stream, g=group: g.add_reduced(s, x))
                    pdl.use(self.job.early)
                rows.append(row)
        logits = [] if reducer is None else self._gathers(ways)
        return {"symmetric": fault or "there", "rows": rows, "logits": logits}

    def _gathers(self, ways: Mapping[str, Group]) -> list[dict[str, Any]]:
        """Microseconds for the logits of a row, of which each rank has a share."""
        rows = []
        for vocab in sorted({SHAPES[shape].facts.vocab for shape in self.job.shapes}):
            x = torch.zeros((1, vocab // self.job.size), dtype=torch.bfloat16, device=self.device)
            row: dict[str, Any] = {"vocab": vocab, "rows": 1, "bytes": x.nbytes}
            for name in ("plain", "symmetric"):
                row[name] = self._microseconds(lambda x=x, group=ways[name]: group.all_gather(x))
            rows.append(row)
        return rows

    def _group(self, reducer: SymmetricReducer | None, ordered: bool) -> Group:
        own = self.mesh.tp
        return Group(own.rank, own.size, own.handle, ordered, reducer)

    def _microseconds(self, call: Callable[[], Any], repeats: int = 50) -> float:
        call()
        self.meet()
        if self.device.type != "cuda":
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - began) / repeats * 1e6
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(repeats):
                call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / repeats * 1e3

    def decode(self) -> dict[str, Any]:
        """Step times by batch: all ranks as one, and rank 0 alone."""
        self.publish(self.job.shapes)
        found = {}
        for shape in self.job.shapes:
            together = self._decode(shape, self.mesh)
            alone = self._decode(shape, SINGLE) if self.job.rank == 0 else {}
            self.meet()
            rows = [
                {"batch": batch, "together_s": seconds, "alone_s": alone[batch], "speedup": alone[batch] / seconds}
                for batch, seconds in together.items()
                if self.job.rank == 0
            ]
            sums = "the backend" if self.mesh.tp.reducer is None else "symmetric memory"
            found[shape] = {"tp": self.job.size, "sums": sums, "rows": rows}
        return found

    def _decode(self, shape: str, mesh: Mesh) -> dict[int, float]:
        engine, sizes = self.engine(shape, mesh), sizes_of(shape)
        found = {}
        for batch in self.batches(shape):
            engine.begin_decode(batch, sizes.prompt, sizes.answer(), sizes.warm, **GREEDY)
            found[batch] = statistics.median(engine.window(sizes.steps).step_times(batch))
            engine.cancel_all()
        engine.close()
        return found

    def timeline(self) -> dict[str, Any]:
        """The kernels of decode steps on rank 0: all ranks as one, and it alone; the smallest batch and the largest."""
        self.publish(self.job.shapes)
        found = {}
        for shape in self.job.shapes:
            rows = self._profiled(shape, self.mesh)
            if self.job.rank == 0:
                rows += self._profiled(shape, SINGLE)
            self.meet()
            found[shape] = {"rows": rows}
        return found

    def _profiled(self, shape: str, mesh: Mesh) -> list[dict[str, Any]]:
        engine, sizes = self.engine(shape, mesh), sizes_of(shape)
        rows = []
        for batch in (self.batches(shape)[0], self.batches(shape)[-1]):
            engine.begin_decode(batch, sizes.prompt, sizes.answer(), sizes.warm, **GREEDY)
            found = profile_steps(engine.window, sizes.warm // 2, sizes.profiled)
            engine.cancel_all()
            rows.append({"batch": batch, "tp": mesh.size, **found})
            if self.job.rank == 0:
                print(f"  {shape}, {batch} rows, tp={mesh.size}", flush=True)
                show_timeline(found)
        engine.close()
        return rows

    def echo(self) -> dict[str, Any]:
        """Steps of one rank of two whose peer says at once what it says, beside one alone, and the kernels of both."""
        self.publish(self.job.shapes)
        group = echoing(2, self.device, self.job.symmetric_bytes)
        x = torch.ones(1, 64, device=self.device)
        if not bool((group.all_reduce(x) == 2).all()):
            raise RuntimeError("what comes back is not what was sent")
        half, found = Mesh(group, SINGLE.sp), {}
        for shape in self.job.shapes:
            divided, alone = self._decode(shape, half), self._decode(shape, SINGLE)
            rows = [
                {"batch": batch, "divided_s": seconds, "alone_s": alone[batch], "speedup": alone[batch] / seconds}
                for batch, seconds in divided.items()
            ]
            kernels = self._profiled(shape, half) if self.device.type == "cuda" else []
            found[shape] = {"rows": rows, "kernels": kernels}
        return found

    def replicas(self) -> dict[str, Any]:
        """Tokens a second of one replica by itself, and of a replica on each rank at the same time."""
        self.publish(self.job.shapes)
        found = {}
        for shape in self.job.shapes:
            engine, batch = self.engine(shape, SINGLE), self.batches(shape)[-1]
            one = self._rate(engine, shape, batch) if self.job.rank == 0 else 0.0
            self.meet()
            rates = self._everybody(self._rate(engine, shape, batch))
            engine.close()
            scaled = sum(rates) / one if one else 0.0
            found[shape] = {"batch": batch, "one": one, "each": rates, "scaled": scaled}
        return found

    def _rate(self, engine: Engine, shape: str, batch: int) -> float:
        sizes: Sizes = sizes_of(shape)
        engine.begin_decode(batch, sizes.prompt, sizes.answer(), sizes.warm, **GREEDY)
        window = engine.window(sizes.steps)
        engine.cancel_all()
        return sum(window.tokens) / window.seconds

    def _everybody(self, value: float) -> list[float]:
        told = torch.tensor([value], dtype=torch.float64)
        parts = [torch.empty_like(told) for _ in range(self.job.size)]
        dist.all_gather(parts, told, group=self.mesh.tp.handle)
        return [float(part) for part in parts]

    def transfer(self) -> dict[str, Any]:
        """What the split layout pays for a context: its pages gathered on rank 0, sent, and placed on rank 1."""
        found = {}
        for shape in self.job.shapes:
            kv, page = SHAPES[shape].kv_bytes, 16
            rows = []
            for tokens in (64,) if shape == "tiny" else TRANSFERS:
                pages = tokens // page
                pool = torch.zeros(2 * pages, page * kv, dtype=torch.uint8, device=self.device)
                places = torch.randperm(2 * pages, device=self.device)[:pages]
                pool[places] = 7 if self.job.rank == 0 else 0
                seconds = [self._moved(pool, places) for _ in range(6)][1:]
                if self.job.rank == 1 and int(pool[places].min()) != 7:
                    raise RuntimeError("the pages did not arrive")
                best = min(seconds)
                rows.append({"tokens": tokens, "bytes": pages * page * kv, "s": best, "gb_s": tokens * kv / best / 1e9})
            found[shape] = {"kv_bytes_a_token": kv, "rows": rows}
        return found

    def _moved(self, pool: Tensor, places: Tensor) -> float:
        self._settle()
        began = time.perf_counter()
        if self.job.rank == 0:
            dist.send(pool.index_select(0, places), 1)
        elif self.job.rank == 1:
            arrived = pool.new_empty(len(places), pool.shape[1])
            dist.recv(arrived, 0)
            pool.index_copy_(0, places, arrived)
        self._settle()
        return time.perf_counter() - began

    def values(self) -> dict[str, Any]:
        """A value there and back, by each way between ranks 0 and 1."""
        rows: list[dict[str, Any]] = []
        if self.job.rank < 2:
            place = Path(self.job.meeting).parent
            sizes = SIZES if self.device.type == "cuda" else SIZES[::3]
            rows, end = measure(self.job.rank, self.device, place, sizes)
            self.meet()
            end.close()
        else:
            self.meet()
        return {"rows": rows}

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.meet()


PARTS: Mapping[str, Callable[[Ranks], dict[str, Any]]] = {
    "check": Ranks.check,
    "sums": Ranks.sums,
    "decode": Ranks.decode,
    "timeline": Ranks.timeline,
    "echo": Ranks.echo,
    "replicas": Ranks.replicas,
    "transfer": Ranks.transfer,
    "values": Ranks.values,
}
"""In the order in which they run; the first must hold before anything is measured."""


def main() -> None:
    told = json.loads(sys.argv[1])
    job = RankJob(**{**told, "shapes": tuple(told["shapes"]), "parts": tuple(told["parts"])})
    ranks = Ranks(job)
    with Path(job.out).open("a") as out:
        for part in job.parts:
            try:
                found = PARTS[part](ranks)
            except Exception as error:  # the others wait for this rank: nothing more can be measured here
                print(json.dumps({"part": part, "rank": job.rank, "result": failure(error)}), file=out, flush=True)
                traceback.print_exc()
                _leave(1)
            if job.rank == 0:
                print(json.dumps({"part": part, "rank": 0, "result": found}), file=out, flush=True)
    ranks.meet()  # nobody's memory goes while another rank may still read it
    _leave(0)


def _leave(status: int) -> NoReturn:
    """End at once: to take NCCL's groups apart takes long, or hangs where a rank has failed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
