"""Every miniature on a GPU with captured graphs and look-ahead, against its closed form.

    python benchmarks/gpu_miniatures.py            # all of them, in about a minute
    python benchmarks/gpu_miniatures.py mini_hybrid mini_world

Requests come and go at random, some are cancelled, some fail in the middle of a step. What the others get is compared
with what the miniature says it must be. A line per miniature says for each node and entry how many of its steps were
replays of a graph, and why the others were not. Exit status 1 if an answer is wrong or a pool's books do not balance.
No network and no weights are needed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mstar.engine.engine import Flight
from mstar.engine.graphs import GraphRunner
from mstar.engine.step import Work
from mstar.nn.node import Node, Step
from mstar.registry import Registry
from mstar.spec.graph import Entry
from mstar.spec.request import Done, Failed
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.faults import Boom
from mstar.testing.miniatures import MINIATURES, Example, Miniature
from mstar.testing.miniatures.common import decode

ROWS = 8
_HALF_DIGITS = 2.0**-7
"""bfloat16: half a unit in the last place of values that attention gives, twice."""


class Watch:
    """Counts a worker's steps by node, entry and way to run; makes steps of *doomed* requests fail behind the node."""

    def __init__(self, driver: Driver):
        self.engine = driver.worker.engine
        self.steps: Counter[tuple[str, str, str]] = Counter()
        self.doomed: set[str] = set()
        self._armed = False
        self._names = {id(node): name for name, node in self.engine.nodes.items()}
        self._launch, self._run = self.engine._launch, self.engine.runner.run
        self.engine._launch = self._noted_launch  # type: ignore[method-assign]
        self.engine.runner.run = self._noted_run  # type: ignore[method-assign]

    def _noted_launch(self, work: Sequence[Work]) -> Flight:
        self._armed = any(w.call.run.request.id in self.doomed for w in work)
        return self._launch(work)

    def _noted_run(self, node: Node, entry: str, step: Step, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        lane = step.lane
        replay = lane is not None and lane.graph is not None
        outputs = self._run(node, entry, step, inputs)
        if lane is None or replay:
            self.steps[self._names[id(node)], entry, "replays" if replay else "plain"] += 1
            if self._armed:
                raise Boom("this step was doomed")
        return outputs

    def line(self) -> str:
        """The steps of each node and entry, with the reason for the first plain one."""
        said = []
        for node, entry in dict.fromkeys(key[:2] for key in self.steps):
            replays, plain = self.steps[node, entry, "replays"], self.steps[node, entry, "plain"]
            text = f"{node}.{entry}: {'captured' if replays else 'eager'}, {replays} replays, {plain} plain"
            said.append(text + (f" ({self._reason(node, entry, bool(replays))})" if plain else ""))
        return "; ".join(said)

    def _reason(self, name: str, entry_name: str, some: bool) -> str:
        runner = self.engine.runner
        if not isinstance(runner, GraphRunner):
            return "the runner captures nothing"
        faults = {fault for (node, entry, *_), fault in runner.faults.items() if (node, entry) == (name, entry_name)}
        if faults:
            return "; ".join(sorted(faults))
        entry = self._entry(name, entry_name)
        unable = [n for n in entry.resources if not self.engine.resources[n].capturable]
        if unable:
            return ", ".join(f"{n!r} on {_backend(self.engine.resources[n])} cannot be captured" for n in unable)
        if any(port.layout == "list" for port in entry.inputs):
            return "takes a list"
        return "other sizes came too seldom" if some else "came too seldom, or writes what graphs only read"

    def _entry(self, name: str, entry: str) -> Entry:
        return self.graph.node(name).entry(entry)

    graph: Any = None


def _backend(resource: Any) -> str:
    return resource.backend.name if hasattr(resource, "backend") else resource.kind


def run(mini: Miniature, registry: Registry, device: str, requests: int, seed: int) -> tuple[str, list[str]]:
    """The miniature's line, and what was wrong."""
    gpu = device != "cpu"
    driver = Driver(
        mini,
        registry,
        device=device,
        dtype="bfloat16" if gpu else "float32",
        max_concurrent_requests=ROWS,
        engine={"runner": "graphs" if gpu else "eager", "lookahead": True, "max_graph_tokens": 128},
        scheduler={"max_step_tokens": 96, "max_queue": 4 * requests},
    )
    watch, rng = Watch(driver), random.Random(seed)
    watch.graph = driver.worker.plan.graph
    asked: dict[str, Example] = {}
    cancelled: set[str] = set()
    for i in range(requests):
        name = f"r{i}"
        asked[name] = mini.example(rng)
        driver.submit(name, asked[name])
        for _ in range(rng.randrange(5)):
            driver.worker.step()
            driver.take()
        other = f"r{rng.randrange(i + 1)}"
        if other not in driver.ended and rng.random() < 0.1:
            (watch.doomed if rng.random() < 0.5 else cancelled).add(other)
            if other in cancelled:
                driver.cancel(other)
                driver.take()
    driver.run()
    faults = [
        fault for name, example in asked.items() if (fault := _fault(mini, driver, name, example, watch, cancelled))
    ]
    try:
        driver.assert_empty()
    except Exception as error:
        faults.append(f"books: {error}")
    backends = {n: _backend(r) for n, r in driver.worker.resources.items() if hasattr(r, "backend")}
    ended = Counter(type(end).__name__.lower() for end in driver.ended.values())
    graphs = driver.worker.engine.runner.status().get("graphs", 0)
    about = f"{dict(ended)}, {graphs} graphs" + "".join(f", {name} on {used}" for name, used in backends.items())
    driver.worker.close()
    return f"[{about}] {watch.line()}", faults


def _fault(
    mini: Miniature, driver: Driver, name: str, example: Example, watch: Watch, cancelled: set[str]
) -> str | None:
    end = driver.ended.get(name)
    if isinstance(end, Failed):
        return None if name in watch.doomed else f"{name}: {end.message}"
    if not isinstance(end, Done):
        return f"{name} has not ended"
    if name in cancelled:
        return None
    got = driver.result(name)
    for stream, want in mini.expected(example).items():
        if isinstance(want, str):
            if (text := decode(got.get(stream, []))) != want:
                return f"{name}, {stream}: {text!r} instead of {want!r}"
        else:
            exact = driver.worker.config.deployment.dtype != "bfloat16"
            slack = {} if exact else {"rtol": _HALF_DIGITS, "atol": max(mini.tolerance, 8 * _HALF_DIGITS)}
            where = {"rtol": 1e-6, "atol": mini.tolerance, **slack}
            if np.shape(got.get(stream)) != np.shape(want) or not np.allclose(got[stream], want, **where):
                return f"{name}, {stream}: {np.asarray(got.get(stream))!r} instead of {want!r}"
    return None


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("keys", nargs="*", help="miniatures to run; all by default")
    parser.add_argument("--device", default="cuda", help="cpu: everything is eager there")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    registry, wrong = miniature_registry(), 0
    minis = [mini for mini in MINIATURES if not options.keys or mini.key in options.keys]
    with torch.inference_mode(False):
        for mini in minis:
            began = time.perf_counter()
            try:
                line, faults = run(mini, registry, options.device, options.requests, options.seed)
            except Exception as error:
                line, faults = "", [f"{type(error).__name__}: {error}"]
            verdict = "wrong" if faults else "right"
            print(f"{mini.key:16} {verdict} {time.perf_counter() - began:5.1f} s {line}", flush=True)
            for fault in faults[:3]:
                print(f"    {fault}", flush=True)
            wrong += bool(faults)
    print(f"{len(minis) - wrong} of {len(minis)} right")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
