"""The tokens of a picture divided among the processes of a placement, as the server runs them."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mstar.cluster.base import WorkerConfig
from mstar.cluster.choice import processes
from mstar.plugins import load_plugins
from mstar.registry import Registry, load_object
from mstar.runtime.deployment_files import packaged_deployment
from mstar.settings import Settings
from mstar.spec.deployment import merge_deployment
from mstar.spec.knobs import read_options
from mstar.spec.processor import ProcessorContext
from mstar.spec.request import Done, Emit, Event, Failed
from mstar.testing.drive import collect
from mstar.testing.examples import Example, task_for
from mstar_diffusion.z_image import tiny

KEY = "z_image_turbo"
INSTALLED = importlib.metadata.entry_points(group="mstar.plugins", name="diffusion")
EXTRA = () if INSTALLED else ("mstar_diffusion.plugin",)
REQUESTS: tuple[dict[str, Any], ...] = (
    {"width": 64, "height": 80, "num_inference_steps": 2, "seed": 1},
    {"width": 80, "height": 64, "num_inference_steps": 2, "seed": 3, "guidance_scale": 2.0, "negative_prompt": "dull"},
)


async def painted(
    folder: Path, placement: Mapping[str, Any], ran: dict[str, Any] | None = None
) -> list[npt.NDArray[Any]]:
    """The pictures of REQUESTS. *ran* gets the workers' status."""
    found = Registry(load_plugins(Settings(extra_plugins=EXTRA)))
    spec = found.model(KEY)
    told = {"device": "cpu", "dtype": "float32", "placement": placement}
    deployment = merge_deployment(KEY, packaged_deployment(spec), told)
    config = WorkerConfig(key=KEY, weights=str(folder), deployment=deployment, extra_plugins=EXTRA)
    events: dict[str, list[Event]] = defaultdict(list)
    changed = asyncio.Event()

    def take(arrived: Sequence[Event]) -> None:
        for event in arrived:
            events[event.id].append(event)
            if isinstance(event, Emit):
                executor.ack(event.id, event.stream, 1)
        changed.set()

    executor: Any = processes(config, take, lambda phase: None, found)
    processor = load_object(spec.processor)(
        ProcessorContext(spec, folder, read_options(spec.options, deployment.model_kwargs))
    )
    await executor.start()
    try:
        names = [str(number) for number in range(len(REQUESTS))]
        for name, knobs in zip(names, REQUESTS, strict=True):
            task = task_for(spec, Example("a lighthouse in the rain", knobs=knobs), live=(), ability="image")
            executor.submit(processor.prepare(task, name).request)
        async with asyncio.timeout(100):
            while not all(events[name] and isinstance(events[name][-1], Done | Failed) for name in names):
                changed.clear()
                await changed.wait()
        if ran is not None:
            ran.update(await executor.status())
    finally:
        await executor.stop()
    ends = [events[name][-1] for name in names]
    assert all(isinstance(end, Done) for end in ends), ends
    return [collect([event for event in events[name] if isinstance(event, Emit)])["image"] for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("z_image")
    tiny.write(folder, n_heads=4, n_kv_heads=4, axes_dims=[4, 4, 4])
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[npt.NDArray[Any]]:
    return asyncio.run(painted(folder, {}))


async def test_each_guidance_branch_on_a_rank_of_its_own(folder: Path, alone: list[npt.NDArray[Any]]) -> None:
    split = {"ranks": [0, 1], "split": "contexts"}
    together = await painted(folder, {"dit": split, "text_encoder": split}, ran := {})
    assert [rank["steps"] for rank in ran["ranks"]] == [2 + 2], "one branch: read, prepared, two steps"
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


async def test_two_ranks_share_the_tokens_of_a_picture(folder: Path, alone: list[npt.NDArray[Any]]) -> None:
    together = await painted(folder, {"dit": {"ranks": [0, 1], "sp": 2}})
    for one, other in zip(alone, together, strict=True):
        # the order of sums changes last bits, of which rounding to bytes makes a step of one here and there
        apart = np.abs(one.astype(int) - other.astype(int))
        assert apart.max() <= 1
        assert (apart > 0).mean() < 0.01
