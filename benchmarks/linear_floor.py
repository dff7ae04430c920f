"""The linear floor: the time of a decoder's linear layers alone, for one decode step of M rows.

No server can decode faster on this machine than its matrix products run, so the floor is what throughput is judged by.

    python benchmarks/linear_floor.py CONFIG_JSON [--batch 1 8 32] [--dtype auto|bfloat16|float32] [--step]

``--step`` also times a whole decode step without attention (norms, rotary, activations, residuals) beside it, and
``--context N`` the attention of such a step over contexts of N tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mstar.nn import ops
from mstar.nn.config import DecoderConfig
from mstar.nn.cpu_linear import best_cpu_dtype, prepare_cpu
from mstar.nn.linear import Linear
from mstar.nn.rotary import Rotation
from mstar.patterns.causal_lm import CausalLMNode
from mstar.resources.attention.numba_cpu import NumbaAttention
from mstar.resources.attention.torch_sdpa import TorchAttention
from mstar.resources.base import Owner, ResourceContext, Row
from mstar.resources.paged_kv import PagedKV
from mstar.resources.staging import Stage
from mstar.spec.request import EngineRequest
from mstar.spec.resources import PagedKV as PagedKVSpec

__all__ = ["linear_floor", "random_node", "step_without_attention"]


def random_node(config: DecoderConfig, dtype: torch.dtype) -> CausalLMNode:
    """The model of *config* with random weights, prepared for this CPU as a server would."""
    torch.manual_seed(0)
    node = CausalLMNode(config).eval()
    with torch.no_grad():
        for parameter in node.parameters():  # not node.to(dtype): angles stay float32
            parameter.data = torch.empty_like(parameter, dtype=dtype).normal_(0, 0.02)
    prepare_cpu(node)
    return node


def linear_floor(node: nn.Module, batches: Sequence[int] = (1, 8, 32), rounds: int = 15) -> dict[int, float]:
    """Seconds per decode step spent in *node*'s linear layers, head included, per batch size.

    Each layer is timed by itself, in the order of a step (so that its weight comes from where it comes from in a step),
    and its best round counts: a busy neighbour only ever adds time.
    """
    layers = [module for module in node.modules() if isinstance(module, Linear)]
    dtype = next(parameter.dtype for parameter in node.parameters())
    return {rows: sum(_best_each([_call(layer, rows, dtype) for layer in layers], rounds)) for rows in batches}


def step_without_attention(
    node: CausalLMNode, batches: Sequence[int] = (1, 8, 32), rounds: int = 15
) -> dict[int, float]:
    """Seconds per decode step with attention left out, per batch size: everything else that the node does for M rows.

    Timed layer by layer, as in :func:`linear_floor`.
    """
    out = {}
    for rows in batches:
        ids, positions = torch.arange(rows), torch.full((rows,), 300)
        with torch.inference_mode():
            x = node.model.embed_tokens(ids)
            rotation, delta = node.model.rotary(positions, x.dtype), torch.zeros_like(x)
            x = x.float()
        before = [partial(node.model.embed_tokens, ids), partial(node.model.rotary, positions, delta.dtype)]
        layers = [partial(layer, x, delta, rotation, _NoAttention()) for layer in node.model.layers]
        out[rows] = sum(_best_each([*before, *layers, partial(node.logits, x)], rounds))
    return out


def attention_of_a_step(
    config: DecoderConfig, dtype: torch.dtype, context: int, batches: Sequence[int] = (1, 8, 32), rounds: int = 15
) -> dict[int, float]:
    """Seconds that the attention of all layers takes in a decode step of rows that hold *context* tokens each."""
    spec = PagedKVSpec(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        query_heads=config.heads,
        max_tokens=context + 1,
    )
    backends = [NumbaAttention(), TorchAttention()]
    out = {}
    for rows in batches:
        kv = PagedKV("kv", spec, ResourceContext(torch.device("cpu"), dtype, rows, None, backends, stage=Stage("cpu")))
        owners = [Owner(str(row)) for row in range(rows)]
        for owner in owners:
            kv.reserve(owner, kv.units(context + 1))
            kv.open(owner, EngineRequest(id=owner.key))
        held = [Row(owner, context) for owner in owners]
        kv.plan(held)
        kv.commit(held)
        kv.memory.data.normal_()
        view = kv.plan([Row(owner) for owner in owners])
        fused = torch.randn(rows, config.heads + 2 * config.kv_heads, config.head_dim).to(dtype)
        q, k, v = fused.split((config.heads, config.kv_heads, config.kv_heads), 1)
        out[rows] = sum(_best_each([partial(view.attend, layer, q, k, v) for layer in range(config.layers)], rounds))
    return out


class _NoAttention:
    """Passes the queries on: all of a step's work but attention."""

    def attend_heads(
        self, layer: int, heads: Tensor, q_heads: int, rotation: Rotation, norms: ops.HeadNorms | None
    ) -> Tensor:
        return ops.rotate_store(heads, q_heads, rotation.cos, rotation.sin, norms, None, None, None)[0].contiguous()


def _call(layer: Linear, rows: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    x = torch.randn(rows, layer.in_features).to(dtype)
    return lambda: layer(x)


def _best_each(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    best = [float("inf")] * len(calls)
    with torch.inference_mode():
        for _ in range(rounds):
            for index, call in enumerate(calls):
                start = time.perf_counter()
                call()
                best[index] = min(best[index], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a model's config.json")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--step", action="store_true", help="also time a step without attention")
    parser.add_argument("--context", type=int, help="also time the attention of a step over contexts of this length")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    config = DecoderConfig.from_hf(json.loads(options.config.read_text(encoding="utf-8")))
    dtype = best_cpu_dtype() if options.dtype == "auto" else getattr(torch, options.dtype)
    node = random_node(config, dtype)
    floor = linear_floor(node, options.batch, options.rounds)
    whole = step_without_attention(node, options.batch, options.rounds) if options.step else {}
    attention = (
        attention_of_a_step(config, dtype, options.context, options.batch, options.rounds) if options.context else {}
    )
    print(f"{dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for rows, seconds in floor.items():
        line = f"batch {rows:3}: linear layers {seconds * 1e3:6.2f} ms = {rows / seconds:6.1f} tokens/s"
        if rows in whole:
            line += f"; step without attention {whole[rows] * 1e3:6.2f} ms ({whole[rows] / seconds:.2f} x)"
        if rows in attention:
            line += f"; attention {attention[rows] * 1e3:6.2f} ms"
        print(line)


if __name__ == "__main__":
    main()
