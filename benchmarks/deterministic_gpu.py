"""``engine.deterministic`` on a GPU: is every request the same alone and in any batch, and what does that cost?

    python benchmarks/deterministic_gpu.py                          # writes results/deterministic_gpu.json
    python benchmarks/deterministic_gpu.py --quick                  # fewer requests and steps; writes nothing
    python benchmarks/deterministic_gpu.py --shape tiny --device cpu --quick    # does it work? no figures

A model of random weights at a published shape is loaded three times, in this process: as ever, with
``deterministic: true``, and with ``compile: true``. Each time the same requests run in batches of 64, 32 and 8 and one
by one, greedily and at temperature 1 with a seed. Their prompts have from 1 to 1500 tokens and the steps 512, so that
prompts are cut, each time elsewhere, with decoding rows beside them; nothing is taken from a prefix cache. With
``deterministic`` every request must have the same tokens in all runs, or the program fails; without, it is counted how
many have not.

Then the time of a decode step, and of a prompt, in each of the three, and their ratio to the first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import environment, table, write_result
from gpu.checkpoints import publish
from gpu.engine import Engine
from gpu.shapes import SHAPES

MODES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "deterministic": {"deterministic": True},
    "compile": {"compile": True},
}
SAMPLINGS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 1.0}}
LENGTHS = (700, 1, 130, 17, 1500, 64, 5, 400, 513, 33, 1023, 2, 250, 97, 512, 16)
"""Prompts, again and again: around the sizes of pages, pieces of attention, and steps."""
BATCHES = (1, 8, 32, 64)
STEP_TOKENS, CONTEXT = 512, 4096
PACKAGES = ("torch", "triton", "flashinfer-python", "numpy", "mstar-core")


def options_of(device: str, engine: Mapping[str, Any]) -> dict[str, Any]:
    # The CPU is deterministic in float32 only.
    return {
        "device": device,
        "dtype": "bfloat16" if device.startswith("cuda") else "float32",
        "max_concurrent_requests": BATCHES[-1],
        "max_sessions": 0,
        "model_kwargs": {"max_tokens": min(CONTEXT, 2048) if device == "cpu" else CONTEXT},
        "resources": {"kv": {"tokens": BATCHES[-1] * 2048, "prefix_cache": False}},
        "scheduler": {"max_step_tokens": STEP_TOKENS},
        "engine": dict(engine),
    }


def run(engine: Engine, prompts: Sequence[np.ndarray], new: int, sampling: Mapping[str, Any]) -> list[list[int]]:
    """The tokens of requests that come at once."""
    names = [engine.submit(prompt, new, **sampling) for prompt in prompts]
    engine.run_to_end(names)
    found = [list(engine.tokens[name]) for name in names]
    engine.cancel_all()
    return found


def compare(engine: Engine, prompts: Sequence[np.ndarray], new: int) -> list[dict[str, Any]]:
    """How many requests are not the same in some batch as alone, for each sampling and batch."""
    found = []
    for name, sampling in SAMPLINGS.items():
        alone = [run(engine, [prompt], new, sampling)[0] for prompt in prompts]
        for batch in sorted({min(size, len(prompts)) for size in BATCHES[1:]}):
            together: list[list[int]] = []
            for start in range(0, len(prompts), batch):
                together += run(engine, prompts[start : start + batch], new, sampling)
            wrong = [i for i, (a, b) in enumerate(zip(alone, together, strict=True)) if a != b]
            firsts = [
                next((t for t, (a, b) in enumerate(zip(alone[i], together[i], strict=False)) if a != b), new)
                for i in wrong
            ]
            line = {"sampling": name, "batch": batch, "requests": len(prompts), "different": len(wrong)}
            found.append(line | {"prompts": [len(prompts[i]) for i in wrong], "first_difference": firsts})
            print(f"  {name}, {batch} at once: {len(wrong)} of {len(prompts)} differ from alone", flush=True)
    return found


def timed(engine: Engine, prompt: int, steps: int) -> dict[str, float]:
    """Median seconds of a decode step by batch, and of a prompt of 2048 tokens."""
    found = {}
    for batch in BATCHES:
        engine.begin_decode(batch, prompt, 900, 16, temperature=0.0)
        found[f"step_{batch}"] = statistics.median(engine.window(steps).step_times(batch))
        engine.cancel_all()
    times = []
    for _ in range(4):
        began = time.perf_counter()
        name = engine.submit(engine.prompt(2 * prompt), 2, temperature=0.0)
        engine.until(lambda name=name: bool(engine.tokens[name]))  # type: ignore[misc]
        times.append(time.perf_counter() - began)
        engine.cancel_all()
    found["prompt"] = statistics.median(times[1:])
    return found


def measure(mode: str, options: argparse.Namespace, weights: Path) -> dict[str, Any]:
    print(f"{mode}:", flush=True)
    began = time.perf_counter()
    engine = Engine(options.shape, weights, options_of(options.device, MODES[mode]))
    loaded = time.perf_counter() - began
    print(f"  ready after {loaded:.1f} s", flush=True)
    try:
        facts = {
            name: str(getattr(r, "backend", None) and r.backend.name) for name, r in engine.worker.resources.items()
        }
        lengths = LENGTHS[:4] if options.quick else LENGTHS
        if options.device == "cpu":
            lengths = tuple(min(length, 40) for length in lengths)
        count = 8 if options.quick else BATCHES[-1]
        draw = np.random.default_rng(5)
        prompts = [draw.integers(0, engine.vocab, lengths[i % len(lengths)]) for i in range(count)]
        compared = compare(engine, prompts, options.tokens) if mode != "compile" else []
        times = timed(engine, 64 if options.device == "cpu" else 1024, 8 if options.quick else 96)
        return {"attention": facts, "ready_s": loaded, "compared": compared, "times": times,
                "status": engine.worker.status()["engine"], "seconds": time.perf_counter() - began}  # fmt: skip
    finally:
        engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-3b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--modes", default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a request")
    parser.add_argument("--weights", type=Path, help="folder for the checkpoint, which is kept; default: none is")
    parser.add_argument("--quick", action="store_true", help="a few requests and steps; no result file")
    options = parser.parse_args()
    modes = options.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        parser.error(f"--modes: there is no {unknown[0]!r}, only {', '.join(MODES)}")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
    facts = environment(PACKAGES)
    settings = {"shape": options.shape, "tokens": options.tokens, "step_tokens": STEP_TOKENS, "batches": BATCHES}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="deterministic-") as scratch:
        folder = (options.weights or Path(scratch)) / options.shape
        weights = publish(SHAPES[options.shape], folder, options.device)
        for mode in modes:
            try:
                results[mode] = measure(mode, options, weights)
            except Exception as error:  # the other modes are measured all the same
                traceback.print_exc()
                results[mode] = {"failed": f"{type(error).__name__}: {error}"}
            if not options.quick:
                write_result("deterministic_gpu", results, settings, facts)
    return report(results)


def report(results: Mapping[str, Any]) -> int:
    plain = results.get("plain", {}).get("times", {})
    lines = []
    for mode, found in results.items():
        for what, seconds in found.get("times", {}).items():
            ratio = seconds / plain[what] if what in plain else float("nan")
            lines.append({"mode": mode, "what": what, "ms": seconds * 1e3, "ratio": ratio})
    table("Decode steps by batch, and a prompt", lines, ("mode", "what", "ms", "ratio"), 3)
    failed = [f"{mode}: {found['failed']}" for mode, found in results.items() if "failed" in found]
    wrong = sum(line["different"] for line in results.get("deterministic", {}).get("compared", []))
    if wrong:
        failed.append(f"deterministic: {wrong} requests are not the same alone and in a batch")
    print(*failed, sep="\n")
    if not failed and "deterministic" in results:
        print("deterministic: every request is the same alone and in any batch")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
