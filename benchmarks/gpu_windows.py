"""Attention within windows of one length on a GPU (Whisper's encoder): whose kernel is right, and whose is fastest?

Each kernel is compared with float32, in a captured graph that is replayed with other inputs, then timed in one:
PyTorch's own, cuDNN's, and FlashInfer's two for packed segments. Under a minute.

    python benchmarks/gpu_windows.py --out gpu_windows.json
    python benchmarks/gpu_windows.py --check        # no timings
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import environment
from gpu.child import failure
from gpu.report import write
from gpu_attention import seconds, show
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mstar.nn.windows import attend_windows
from mstar.resources.attention.flashinfer import FlashInferAttention
from mstar.resources.attention.flashinfer_kernels import Combination, Kernel, Shape
from mstar.resources.attention.flashinfer_pages import PageList

__all__ = ["main"]

DEVICE, DTYPE = torch.device("cuda", 0), torch.bfloat16
POSITIONS, DIM = 1500, 64
HEADS = {"large": 20, "small": 12}
KERNELS = (("torch", "cudnn", "served"), ("fa2", "fa3"))
ROWS = (1, 2, 4, 8, 16)
LAYERS = 4
"""Calls of a graph, each with inputs of its own."""
TOLERANCE = 2e-2
"""Of the largest value."""

Attend = Callable[[Tensor], Tensor]
"""Queries, keys and values ``[rows, positions, 3, heads, dim]``, as the encoder's projection leaves them, to
``[rows, positions, heads, dim]``."""


def by_torch(backend: SDPBackend) -> Attend:
    def attend(fused: Tensor) -> Tensor:
        q, k, v = fused.permute(2, 0, 3, 1, 4)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return attend


def as_served(fused: Tensor) -> Tensor:
    return attend_windows(*fused.permute(2, 0, 3, 1, 4)).transpose(1, 2)


def by_flashinfer(kind: str, rows: int, heads: int) -> Attend:
    """Planned once: the segments are the same in each step."""
    library = FlashInferAttention().library(DEVICE)
    kernel = Kernel(library, kind, Shape(heads, DIM, 1, DTYPE), Combination(heads, -1, False, DIM**-0.5, 0.0))
    starts = np.arange(rows + 1, dtype=np.int32) * POSITIONS
    lengths = np.full(rows, POSITIONS, np.int32)
    kernel.plan(PageList(rows, rows * POSITIONS, np.concatenate((starts, starts)), lengths), None)
    indptr = torch.from_numpy(starts).to(DEVICE)

    def attend(fused: Tensor) -> Tensor:
        q, k, v = fused.flatten(0, 1).unbind(1)
        out = q.new_empty(q.shape)
        kernel.ragged(q, k, v, indptr, out)
        return out.view(rows, POSITIONS, heads, DIM)

    return attend


def kernels(rows: int, heads: int) -> dict[str, Callable[[], Attend]]:
    return {
        "torch": lambda: by_torch(SDPBackend.FLASH_ATTENTION),
        "cudnn": lambda: by_torch(SDPBackend.CUDNN_ATTENTION),
        "served": lambda: as_served,
        "fa2": lambda: by_flashinfer("fa2", rows, heads),
        "fa3": lambda: by_flashinfer("fa3", rows, heads),
    }


def line_of(name: str, make: Callable[[], Attend], rows: int, heads: int, timed: bool) -> dict[str, Any]:
    """What a kernel that cannot be had raises is said in its line."""
    line: dict[str, Any] = {"kernel": name, "heads": heads, "rows": rows}
    try:
        attend, inputs = make(), [torch.randn(rows, POSITIONS, 3, heads, DIM, device=DEVICE, dtype=DTYPE)]
        inputs += [torch.randn_like(inputs[0]) for _ in range(LAYERS - 1)]
        began = time.perf_counter()
        attend(inputs[0])
        torch.cuda.synchronize()
        line["first_ms"] = (time.perf_counter() - began) * 1e3
        graph, outs = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            outs += [attend(each) for each in inputs]
        inputs[1].normal_()
        graph.replay()
        q, k, v = inputs[1].float().permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            exact = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        line["error"] = float((outs[1].float() - exact).abs().max() / exact.abs().max())
        line["right"] = line["error"] <= TOLERANCE
        if timed:
            spent = seconds(graph.replay) / LAYERS
            line["us"], line["tflops"] = spent * 1e6, 4 * rows * heads * POSITIONS**2 * DIM / spent / 1e12
    except Exception as error:
        line |= {"right": None, "failed": failure(error)["failed"]}
    return line


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results to this file (JSON)")
    parser.add_argument("--check", action="store_true", help="correctness only")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this program needs a GPU")
        return 2
    facts = environment(("torch", "flashinfer-python"))
    facts["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    lines: list[dict[str, Any]] = []
    # FlashInfer's last: where they are not at hand they are compiled, for minutes
    for names, (size, heads), rows in itertools.product(KERNELS, HEADS.items(), ROWS):
        made = kernels(rows, heads)
        found = [line_of(name, made[name], rows, heads, not arguments.check) for name in names]
        show(f"{size}, {rows} windows", found)
        lines += found
        if arguments.out is not None:
            write(arguments.out, {"name": "gpu_windows", "environment": facts, "lines": lines})
    wrong = [line for line in lines if line["right"] is False or (line["right"] is None and line["kernel"] == "served")]
    print(f"{len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
