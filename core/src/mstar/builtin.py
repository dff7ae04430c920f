"""The core as its own first plugin: its kinds, policies and commands enter through the hooks that anyone's do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mstar.hookspecs import hookimpl

if TYPE_CHECKING:
    from mstar.cli.commands import Commands


@hookimpl
def mstar_resources() -> dict[str, str]:
    return {
        "paged_kv": "mstar.resources.paged_kv:PagedKV",
        "cross_kv": "mstar.resources.cross_kv:CrossKV",
        "window_kv": "mstar.resources.window_kv:WindowKV",
        "media_embeddings": "mstar.resources.media:MediaEmbeddings",
        "ragged_attention": "mstar.resources.ragged:RaggedAttention",
        "recurrent_state": "mstar.resources.recurrent:RecurrentStateResource",
        "positions": "mstar.resources.positions:PositionsResource",
        "sampler": "mstar.resources.sampler:SamplerResource",
    }


@hookimpl
def mstar_attention_backends() -> dict[str, str]:
    return {
        "flashinfer": "mstar.resources.attention.flashinfer:FlashInferAttention",
        "torch_sdpa": "mstar.resources.attention.torch_sdpa:TorchAttention",
        "batch_invariant": "mstar.resources.attention.batch_invariant:BatchInvariantAttention",
        "numba_cpu": "mstar.resources.attention.numba_cpu:NumbaAttention",
    }


@hookimpl
def mstar_engines() -> dict[str, str]:
    return {"eager": "mstar.engine.eager:EagerRunner", "graphs": "mstar.engine.graphs:GraphRunner"}


@hookimpl
def mstar_schedulers() -> dict[str, str]:
    return {"default": "mstar.scheduler.default:DefaultScheduler"}


@hookimpl
def mstar_executors() -> dict[str, str]:
    return {
        "inline": "mstar.cluster.inline:InlineExecutor",
        "processes": "mstar.cluster.choice:processes",
        "ray": "mstar.cluster.ray.choice:ray_actors",
    }


@hookimpl
def mstar_weight_sources() -> dict[str, str]:
    return {
        "path": "mstar.weights.sources:PathSource",
        "hub": "mstar.weights.hub:HubSource",
        "package": "mstar.weights.package:PackageSource",
    }


@hookimpl
def mstar_cli(commands: Commands) -> None:
    from mstar.cli import (
        check,
        completion,
        doctor,
        download,
        graph,
        keys,
        licences,
        models,
        plugin,
        plugins,
        run,
        serve,
        simulate,
    )

    every = (serve, run, models, plugins, plugin, graph, check, licences, keys, download, doctor, simulate, completion)
    for command in every:
        command.register(commands)
