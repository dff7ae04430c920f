"""Attention within windows of one length on a GPU (of speech encoders and denoisers): whose kernel is right, and whose
is fastest?

Each kernel is compared with float32, in a captured graph that is replayed with other inputs, then timed in one:
PyTorch's own, cuDNN's, and FlashInfer's two for packed segments. Under a minute.

    python benchmarks/gpu_windows.py --out gpu_windows.json
    python benchmarks/gpu_windows.py --check        # no timings
    python benchmarks/gpu_windows.py --windows picture
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
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
KERNELS = (("torch", "cudnn", "served"), ("fa2", "fa3"))
LAYERS = 4
"""Calls of a graph, each with inputs of its own."""
TOLERANCE = 2e-2
"""Of the largest value."""


@dataclass(frozen=True)
class Windows:
    positions: int
    heads: int
    dim: int
    rows: tuple[int, ...]


WINDOWS = {
    "large": Windows(1500, 20, 64, (1, 2, 4, 8, 16)),
    "small": Windows(1500, 12, 64, (1, 2, 4, 8, 16)),
    "picture": Windows(4608, 24, 128, (1, 2, 4)),  # 1024 x 1024 and 512 tokens of text
}

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


def by_flashinfer(kind: str, rows: int, windows: Windows) -> Attend:
    """Planned once: the segments are the same in each step."""
    library = FlashInferAttention().library(DEVICE)
    positions, heads, dim = windows.positions, windows.heads, windows.dim
    kernel = Kernel(library, kind, Shape(heads, dim, 1, DTYPE), Combination(heads, -1, False, dim**-0.5, 0.0))
    starts = np.arange(rows + 1, dtype=np.int32) * positions
    lengths = np.full(rows, positions, np.int32)
    kernel.plan(PageList(rows, rows * positions, np.concatenate((starts, starts)), lengths), None)
    indptr = torch.from_numpy(starts).to(DEVICE)

    def attend(fused: Tensor) -> Tensor:
        q, k, v = fused.flatten(0, 1).unbind(1)
        out = q.new_empty(q.shape)
        kernel.ragged(q, k, v, indptr, out)
        return out.view(rows, positions, heads, dim)

    return attend


def kernels(rows: int, windows: Windows) -> dict[str, Callable[[], Attend]]:
    return {
        "torch": lambda: by_torch(SDPBackend.FLASH_ATTENTION),
        "cudnn": lambda: by_torch(SDPBackend.CUDNN_ATTENTION),
        "served": lambda: as_served,
        "fa2": lambda: by_flashinfer("fa2", rows, windows),
        "fa3": lambda: by_flashinfer("fa3", rows, windows),
    }


def line_of(name: str, make: Callable[[], Attend], rows: int, windows: Windows, timed: bool) -> dict[str, Any]:
    """What a kernel that cannot be had raises is said in its line."""
    positions, heads, dim = windows.positions, windows.heads, windows.dim
    line: dict[str, Any] = {"kernel": name, "positions": positions, "heads": heads, "rows": rows}
    try:
        attend, inputs = make(), [torch.randn(rows, positions, 3, heads, dim, device=DEVICE, dtype=DTYPE)]
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
            line["us"], line["tflops"] = spent * 1e6, 4 * rows * heads * positions**2 * dim / spent / 1e12
    except Exception as error:
        line |= {"right": None, "failed": failure(error)["failed"]}
    return line


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results to this file (JSON)")
    parser.add_argument("--check", action="store_true", help="correctness only")
    parser.add_argument("--windows", default=",".join(WINDOWS), help="of which kinds")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this program needs a GPU")
        return 2
    facts = environment(("torch", "flashinfer-python"))
    facts["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    lines: list[dict[str, Any]] = []
    # FlashInfer's last: where they are not at hand they are compiled, for minutes
    for names, kind in itertools.product(KERNELS, arguments.windows.split(",")):
        windows = WINDOWS[kind]
        for rows in windows.rows:
            made = kernels(rows, windows)
            found = [line_of(name, made[name], rows, windows, not arguments.check) for name in names]
            show(f"{kind}, {rows} windows", found)
            lines += found
            if arguments.out is not None:
                write(arguments.out, {"name": "gpu_windows", "environment": facts, "lines": lines})
    wrong = [line for line in lines if line["right"] is False or (line["right"] is None and line["kernel"] == "served")]
    print(f"{len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
