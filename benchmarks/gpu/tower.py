"""Qwen3.5's vision tower: right beside transformers, then pictures a second beside what the device allows.

Random weights at the published shape of the tower, before a language model that costs next to nothing. Pictures are
noise, new in each round, prepared before the clock runs; a round ends when each request has its first token. Measured
through a worker, with captured graphs and as plain calls, and transformers' tower on the same patches, in the same run.
The floor is the tower's operations at the rate of a large product.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu.hybrid import SHAPES, publish
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.spec.tasks import Image
from mstar.testing.drive import Driver
from mstar.testing.examples import Example
from mstar_qwen3.vision_config import VisionConfig

__all__ = ["tower", "tower_rows"]

WARM = 3
"""Rounds before those that count: a step of pictures is captured when it has come twice."""


@dataclass(frozen=True)
class Load:
    """*requests* at once, of *pictures* each, *side* pixels wide and high."""

    requests: int
    pictures: int
    side: int

    @property
    def count(self) -> int:
        return self.requests * self.pictures

    @property
    def name(self) -> str:
        return f"{self.count} x {self.side}²"


LOADS = {
    "tiny": (Load(2, 1, 64), Load(1, 3, 96)),
    "real": (Load(1, 1, 1024), Load(4, 1, 1024), Load(16, 1, 1024), Load(32, 2, 256), Load(1, 1, 2048)),
}


def tower(name: str, device: str, rate: float, rounds: int) -> dict[str, Any]:
    """The tower of shape *name*: its ``check``, then of each load the floor at *rate* operations a second, and medians
    of *rounds* rounds.

    :raises RuntimeError: its embeddings are not transformers'.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        shape = replace(SHAPES["tiny"], vision=SHAPES[name].vision)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        publish(shape, folder, device, dtype)
        found = {"check": check(folder, device)}
        loads = LOADS["tiny" if name == "tiny" else "real"]
        config = VisionConfig.from_hf(shape.config(400, _IDS)["vision_config"], int(shape.text["hidden_size"]))
        rows: dict[str, dict[str, float]] = {load.name: {"floor_s": flops(config, load) / rate} for load in loads}
        for runner in ("graphs", "eager") if device != "cpu" else ("eager",):
            driver, rng = driven(folder, device, runner), np.random.default_rng(1)
            for load in loads:
                seconds, steps = worker_s(driver, load, rng, rounds)
                rows[load.name] |= {f"{runner}_s": seconds, f"{runner}_steps": steps}
            driver.worker.close()
            del driver
            gc.collect()
        theirs, patcher = reference_tower(folder, device, dtype)
        for load in loads:
            rows[load.name]["transformers_s"] = transformers_s(theirs, patcher, load, device, dtype, rounds)
        return {**found, "loads": rows}


_IDS = dict.fromkeys(("<|endoftext|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"), 0)


def flops(config: VisionConfig, load: Load) -> float:
    """Operations of the tower: products, and attention within each picture."""
    patches = (load.side // config.patch) ** 2
    block = 2 * config.hidden * (4 * config.hidden + 2 * config.intermediate)
    attention = 4 * config.hidden * patches
    inner = config.hidden * config.block
    merger = 2 * inner * (inner + config.width) / config.block
    each = config.layers * (block + attention) + 2 * config.values * config.hidden + merger
    return float(load.count * patches * each)


# --- right? ---------------------------------------------------------------------------------------------------------
def check(folder: Path, device: str) -> dict[str, float]:
    """The largest error of the embeddings of three pictures, as a share of their largest value: in float32 of ours to
    transformers', and in the served dtype of each to transformers' float32."""
    grids = [(16, 16), (20, 32), (12, 28)]  # as large as the preprocessor leaves them
    exact = reference(folder, grids, device, torch.float32)
    found = {"float32": error(ours(folder, grids, device, "float32"), exact)}
    if device != "cpu":
        found["bfloat16"] = error(ours(folder, grids, device, "bfloat16"), exact)
        found["transformers_bfloat16"] = error(reference(folder, grids, device, torch.bfloat16), exact)
    limit = 1e-3 if device == "cpu" else 5e-3  # a GPU's float32 products may be TF32's
    if found["float32"] > limit or found.get("bfloat16", 0) > 2 * found.get("transformers_bfloat16", 1):
        raise RuntimeError(f"the embeddings are not transformers': {found}")
    return found


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.float() - exact).abs().max() / exact.abs().max())


def ours(folder: Path, grids: Sequence[tuple[int, int]], device: str, dtype: str) -> torch.Tensor:
    """What a worker's encoder writes, read from the pool."""
    driver = driven(folder, device, "eager", dtype=dtype)
    patch = driver.worker.engine.nodes["encoder"].config.patch
    pixels = [
        np.random.default_rng(5 + i).integers(0, 256, (h * patch, w * patch, 3), dtype=np.uint8)
        for i, (h, w) in enumerate(grids)
    ]
    driver.submit("r", Example("x", {"max_tokens": 1, "temperature": 0.0}, parts=tuple(map(Image, pixels))))
    driver.run()
    pool = driver.worker.resources["media"]
    lines = np.concatenate([piece.lines for piece in pool.books.pieces.values()])  # type: ignore[attr-defined]
    return pool.pool[torch.from_numpy(lines).to(device)]  # type: ignore[attr-defined, no-any-return]


def reference(folder: Path, grids: Sequence[tuple[int, int]], device: str, dtype: torch.dtype) -> torch.Tensor:
    tower, patcher = reference_tower(folder, device, dtype)
    patches = []
    for i, (h, w) in enumerate(grids):
        size = (h * patcher.patch, w * patcher.patch, 3)
        patches.append(patcher.picture(np.random.default_rng(5 + i).integers(0, 256, size, dtype=np.uint8)).data)
    values = patcher.values()[0][np.concatenate(patches)]
    with torch.inference_mode():
        grid = torch.tensor([(1, h, w) for h, w in grids], device=device)
        return tower(torch.from_numpy(values).to(device, dtype), grid_thw=grid).pooler_output.float()  # type: ignore[no-any-return]


def reference_tower(folder: Path, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import Qwen3_5ForConditionalGeneration

    from mstar.nn.config import read_config
    from mstar_qwen3.preprocessing import read_patchers

    model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=dtype)
    config = read_config(folder)
    vision = VisionConfig.from_hf(config["vision_config"], config["text_config"]["hidden_size"])
    return model.model.visual.to(device).eval(), read_patchers(folder, vision)[0]


# --- how fast? ------------------------------------------------------------------------------------------------------
def driven(folder: Path, device: str, runner: str, **overrides: Any) -> Driver:
    registry = Registry(load_plugins(Settings(extra_plugins=("mstar_qwen3.plugin",))))
    resources = {"media": {"tokens": 65536, "max_tokens": 32768}, "kv": {"tokens": 262144, "prefix_cache": False}}
    return Driver(
        "qwen3_5_4b",
        registry,
        weights=folder,
        device=device,
        max_concurrent_requests=64,
        resources=resources,
        engine={"runner": runner},
        **overrides,
    )


def worker_s(driver: Driver, load: Load, rng: np.random.Generator, rounds: int) -> tuple[float, float]:
    """Seconds of a round through *driver*'s worker, the median, and steps of the encoder in each."""
    seconds, before = [], _encoder_steps(driver)
    asked = (load.requests, load.pictures, load.side, load.side, 3)
    with ThreadPoolExecutor() as threads:  # preparing takes longer than the rounds
        for turn in range(WARM + rounds):
            examples = [
                Example("x", {"max_tokens": 1, "temperature": 0.0}, parts=tuple(map(Image, pixels)))
                for pixels in rng.integers(0, 256, asked, dtype=np.uint8)
            ]
            names = [f"{load.name} {turn}-{i}" for i in range(load.requests)]
            prepared = list(threads.map(driver.prepare, names, examples))
            began = time.perf_counter()
            for request, example in zip(prepared, examples, strict=True):
                driver.submit_prepared(request, example)
            driver.run()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM:]), (_encoder_steps(driver) - before) / (WARM + rounds)


def _encoder_steps(driver: Driver) -> int:
    return sum(entry["steps"] for entry in driver.worker.status()["entries"] if entry["node"] == "encoder")


def transformers_s(theirs: Any, patcher: Any, load: Load, device: str, dtype: torch.dtype, rounds: int) -> float:
    """Seconds of the reference's tower on a round's patches, which are on the device already."""
    side = load.side // patcher.patch
    values = torch.randn(load.count * side * side, 3 * patcher.pair * patcher.patch**2, device=device, dtype=dtype)
    grid = torch.tensor([(1, side, side)] * load.count, device=device)
    seconds = []
    with torch.inference_mode():
        for _ in range(WARM + rounds):
            began = time.perf_counter()
            theirs(values, grid_thw=grid).pooler_output.float().sum().item()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[WARM:])


def tower_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """*found* by :func:`tower` as the lines of a table."""
    rows = []
    for load, row in found["loads"].items():
        best = row.get("graphs_s", row["eager_s"])
        rows.append(
            {
                "pictures": load,
                "a second": int(load.split()[0]) / best,
                "ms": best * 1e3,
                "ms as plain calls": row["eager_s"] * 1e3,
                "of the floor": row["floor_s"] / best,
                "over transformers": row["transformers_s"] / best,
            }
        )
    return rows
