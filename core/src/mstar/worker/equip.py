"""The engine of one process: nodes, pools and runner put together, compiled and captured before the first step; and the
scheduler of a worker that has one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from mstar.cluster.base import Phase, WorkerConfig
from mstar.engine.compile import compile_regions, opaque
from mstar.engine.engine import Engine
from mstar.engine.step import Work
from mstar.registry import Registry
from mstar.resources.base import Owner
from mstar.scheduler.base import Scheduler
from mstar.spec.deployment import Deployment
from mstar.worker.build import Built
from mstar.worker.machine import compiles, runner_name

__all__ = ["equip", "scheduler_of", "warm_up"]

log = logging.getLogger(__name__)


def equip(
    built: Built,
    config: WorkerConfig,
    registry: Registry,
    owner: Callable[[Work, str], Owner],
    on_step: Callable[[str, str, int, int, float], None] | None = None,
) -> Engine:
    """The engine of what was *built*; *owner* and *on_step* are its own."""
    how = config.deployment.engine
    compiling = compiles(how, built.device)
    engine = Engine(
        built.nodes,
        built.resources,
        registry.runner(runner_name(config.deployment, built.device))(how),
        owner,
        built.stage,
        built.device,
        built.dtype,
        on_step,
        opaque if compiling else None,
    )
    if built.accord is not None:
        engine.agree = built.accord.agree
    if compiling:
        folder = None if config.cache is None else Path(config.cache, "compile")
        compile_regions(
            built.nodes, deterministic=how.deterministic, eager_rounding=how.compile_rounding, folder=folder
        )
    return engine


def scheduler_of(built: Built, deployment: Deployment, registry: Registry) -> Scheduler:
    """The scheduler that *deployment* names, with its limits for what was *built*."""
    options, device = deployment.scheduler, built.device.type
    limits = {node.name: node.max_rows for node in built.plan.graph.nodes}
    sizes = {"max_step_tokens": options.step_tokens(device), "max_mixed_rows": options.mixed_rows(device)}
    return registry.scheduler(options.policy)(
        options.model_copy(update=sizes), group_limits=lambda group: limits.get(group[0])
    )


def warm_up(engine: Engine, built: Built, config: WorkerConfig, on_phase: Callable[[Phase], None]) -> None:
    """Capture, compile and warm up, before the first request."""
    deployment = config.deployment
    contexts = max((len(names) for names in built.plan.contexts.values()), default=1)
    rows = min(deployment.scheduler.max_step_rows, deployment.max_concurrent_requests * contexts)

    def report(done: int, total: int) -> None:
        on_phase(Phase(name="warmup", progress=done / total, detail=f"{done} of {total} steps captured"))

    engine.prepare(built.plan, rows, deployment.scheduler.step_tokens(built.device.type), report)
    status = engine.runner.status()
    if status.get("graphs"):
        size = status["graph_bytes"] / 2**20
        log.info("captured %d graphs in %.1f s, %.0f MiB", status["graphs"], status["graph_seconds"], size)
