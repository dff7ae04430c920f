"""What a denoiser does between its products, on a GPU: is it right, and what does it cost beside the memory it touches?

Each operation of ``mstar.nn.ops.modulate`` is compared with the plain torch operations in float32 on fresh random
inputs, then timed inside a CUDA graph of 20 copies, beside the plain operations in bfloat16 (``plain_us``) and what the
copy bandwidth of the same run allows (``floor_us``). Needs a CUDA machine; ``--check`` also runs in Triton's
interpreter (``TRITON_INTERPRET=1 … --check --device cpu --shapes tiny``). Under a minute.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from common import environment, table
from gpu_ops import copy_bandwidth, microseconds
from torch import Tensor, nn

from mstar.nn.ops import cuda_modulate, modulate_reference
from mstar.nn.ops.modulate import Addition, Heads

__all__ = ["main"]

DTYPE = torch.bfloat16
LIMIT = 2**-5
"""Of the largest value: some three roundings of bfloat16."""


@dataclass(frozen=True)
class Shape:
    """*normed*: the second family's order, with a norm of what is added and bounded gates."""

    width: int
    heads: int
    head_dim: int
    hidden: int
    tokens: int
    normed: bool = False


SHAPES = {
    "klein-4b": Shape(3072, 24, 128, 9216, 4608),
    "klein-9b": Shape(4096, 32, 128, 12_288, 4608),
    "z-image": Shape(3840, 30, 128, 10_240, 4128, normed=True),
    "tiny": Shape(96, 3, 32, 200, 5),
    "tiny-z-image": Shape(96, 3, 32, 200, 5, normed=True),
}

Run = Callable[[ModuleType, torch.dtype], Any]


@dataclass
class Case:
    """*run* does the operation by a module, on inputs of a dtype. *nbytes*: what must be read and written."""

    name: str
    run: Run
    nbytes: int


def cases(shape: Shape, rows: int, device: str) -> Iterator[Case]:
    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(DTYPE)

    def weighed(size: int) -> nn.RMSNorm:
        norm = nn.RMSNorm(size, 1e-5).requires_grad_(False).to(device, DTYPE)
        norm.weight.copy_(1 + draw(size) / 4)
        return norm

    width, tokens = shape.width, shape.tokens
    x, delta = draw(rows, tokens, width), draw(rows, tokens, width)
    scale, shift, gate = draw(rows, 3 * width)[:, None].chunk(3, -1)
    norm = weighed(width) if shape.normed else nn.LayerNorm(width, 1e-6, elementwise_affine=False)
    inner = weighed(width) if shape.normed else None
    stream = x.numel() * DTYPE.itemsize
    moved = None if shape.normed else shift

    def addition(dtype: torch.dtype) -> Addition:
        return Addition(delta.to(dtype), gate.to(dtype), _as(inner, dtype), shape.normed)

    def vectors(dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return scale.to(dtype), None if moved is None else moved.to(dtype)

    yield Case("modulate", lambda ops, d: ops.modulate(x.to(d), _as(norm, d), *vectors(d)), 2 * stream)
    yield Case("add", lambda ops, d: ops.add(x.to(d), addition(d)), 3 * stream)
    yield Case(
        "add_modulate",
        lambda ops, d: ops.add_modulate(x.to(d), addition(d), _as(norm, d), *vectors(d)),
        4 * stream,
    )
    heads = shape.heads * shape.head_dim
    projected = draw(rows, tokens, 3 * heads + 2 * shape.hidden)
    q_norm, k_norm = weighed(shape.head_dim), weighed(shape.head_dim)
    angles = torch.randn(tokens, shape.head_dim // 2, device=device) * 20
    cos, sin = angles.cos(), angles.sin()

    def parts(dtype: torch.dtype, *cuts: int) -> list[Heads]:
        fused = projected.to(dtype)[..., : 3 * heads].unflatten(-1, (3, shape.heads, shape.head_dim))
        return [Heads(part, _as(q_norm, dtype), _as(k_norm, dtype)) for part in fused.split(list(cuts), 1)]

    turned = rows * tokens * heads * DTYPE.itemsize
    yield Case("turn_heads", lambda ops, d: ops.turn_heads(parts(d, tokens), cos, sin), 4 * turned)
    behind = min(512, tokens // 2)
    yield Case(
        "turn_heads, two parts",
        lambda ops, d: ops.turn_heads(parts(d, behind, tokens - behind), cos, sin),
        6 * turned,
    )
    gates = projected[..., 3 * heads :]
    active = rows * tokens * shape.hidden * DTYPE.itemsize
    yield Case("swiglu", lambda ops, d: ops.swiglu(gates.to(d)), 3 * active)
    yield Case("swiglu behind", lambda ops, d: ops.swiglu(gates.to(d), delta.to(d)), 3 * active + 2 * stream)


def _as(norm: Any, dtype: torch.dtype) -> Any:
    if norm is None or norm.weight is None or norm.weight.dtype is dtype:
        return norm
    twin = nn.RMSNorm(norm.normalized_shape, norm.eps).requires_grad_(False).to(norm.weight.device, dtype)
    twin.weight.copy_(norm.weight)
    return twin


def apart(got: Any, exact: Any) -> float:
    """The largest difference over the largest value; of several tensors that of the worst."""
    if isinstance(got, tuple):
        return max(apart(mine, want) for mine, want in zip(got, exact, strict=True))
    return float((got.float() - exact.float()).abs().max() / exact.abs().max().clamp(min=1e-30))


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="klein-4b,z-image", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rows", default="1,4", help="batch sizes")
    parser.add_argument("--check", action="store_true", help="compare with the reference only")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("this program needs a GPU")
        return 2
    bandwidth = None if options.check else copy_bandwidth()
    results = []
    for name in options.shapes.split(","):
        for rows in map(int, options.rows.split(",")):
            for case in cases(SHAPES[name], rows, options.device):
                error = apart(case.run(cuda_modulate, DTYPE), case.run(modulate_reference, torch.float32))
                result: dict[str, Any] = {"shape": name, "rows": rows, "op": case.name, "error": error}
                result["right"] = error <= LIMIT
                if bandwidth is not None:
                    result |= {
                        "us": microseconds(lambda run=case.run: run(cuda_modulate, DTYPE)),  # type: ignore[misc]
                        "plain_us": microseconds(lambda run=case.run: run(modulate_reference, DTYPE)),  # type: ignore[misc]
                        "floor_us": case.nbytes / bandwidth * 1e6,
                    }
                results.append(result)
    shown = [{**result, "right": "yes" if result["right"] else "NO"} for result in results]
    columns = ("shape", "rows", "op", "error", "right", "us", "plain_us", "floor_us")
    table("Between the products of a denoiser", shown, columns, 4)
    content = {
        "environment": environment(("torch", "triton")), "copy_bytes_per_second": bandwidth, "results": results
    }  # fmt: skip
    if options.out is not None:
        options.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if all(result["right"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
