"""Decoding pictures on a GPU: is it right, and what do the fused norms, several pictures at once and a graph gain?

    python benchmarks/vae_gpu.py --out FILE.json                        # FLUX.2's decoder, random weights, no network
    python benchmarks/vae_gpu.py --shape tiny --device cpu --out FILE.json                   # does it work? no figures

First the check, which ends the program if it fails: the norm against float64, the decoder in bfloat16 no further from
its float32 than with PyTorch's norms, a picture in a batch as it is alone. Then the norm's bytes a second beside those
of a copy, and seconds a picture: with PyTorch's norms, with the fused ones, and these in a captured graph. At the end,
whether what is planned for a decode is what it needs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import environment, table
from torch import Tensor

from mstar.nn import ops
from mstar.nn.ops import reference
from mstar_diffusion.flux2.vae import Flux2VaeDecoder
from mstar_diffusion.vae.config import VaeConfig

SHAPES = {
    "flux2": (VaeConfig(32, (128, 256, 512, 512), (128, 256, 512, 512), 2, 32), (512, 1024), (1, 2, 4)),
    "flux2-small": (VaeConfig(32, (128, 256, 512, 512), (96, 192, 384, 384), 2, 32), (512, 1024), (1, 2, 4)),
    "tiny": (VaeConfig(4, (8, 16), (8, 16), 1, 4), (32,), (1, 2)),
}
TOKEN = 16
Run = Callable[[], Any]


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="flux2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=10, help="repetitions of what a median is taken of")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args(words)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config, sides, rows = SHAPES[args.shape]
    torch.manual_seed(0)
    found: dict[str, Any] = {"environment": environment(("torch", "triton")), "shape": args.shape}
    with torch.inference_mode():
        node = decoder(config, device, dtype)
        found["check"] = check(node, config, device, dtype)
        args.out.write_text(json.dumps(found, indent=2) + "\n")
        if faults := [name for name, right in found["check"]["right"].items() if not right]:
            print(f"wrong: {', '.join(faults)}: {found['check']}", file=sys.stderr)
            return 1
        found["norm"] = list(norms(config, sides, device, dtype, args.rounds))
        found["decode"] = list(decodes(node, sides, rows, device, dtype, args.rounds))
    unplanned = [row for row in found["decode"] if not row["peak_gib"] <= row["planned_gib"] <= 1.3 * row["peak_gib"]]
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    for name in ("norm", "decode"):
        table(name, found[name], list(found[name][0]), digits=6)
    if unplanned and device.type == "cuda":
        print(f"memory is planned wrongly: {unplanned}", file=sys.stderr)
        return 1
    return 0


def decoder(config: VaeConfig, device: torch.device, dtype: torch.dtype) -> Flux2VaeDecoder:
    node = Flux2VaeDecoder(config, tiling="never")
    for name, tensor in (*node.named_parameters(), *node.named_buffers()):
        if tensor.dim() < 2:  # biases about nought; norms and statistics about one
            tensor.copy_(torch.randn_like(tensor) * 0.1 + (0 if name.endswith("bias") else 1))
            tensor.copy_(tensor.abs() if "var" in name else tensor)
    node = node.to(device, dtype).eval()
    return node.to(memory_format=torch.channels_last) if device.type == "cuda" else node  # type: ignore[call-overload]


@contextmanager
def plain_norms() -> Iterator[None]:
    """PyTorch's norms, and sums behind convolutions, instead of the fused ones."""
    fused = ops.group_norm, ops.add_channels
    ops.group_norm, ops.add_channels = reference.group_norm, reference.add_channels
    try:
        yield
    finally:
        ops.group_norm, ops.add_channels = fused


def latents(node: Flux2VaeDecoder, rows: int, side: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    tokens = torch.randn(rows, side // TOKEN, side // TOKEN, 4 * node.config.latent, device=device)
    return node.latents(tokens.to(dtype))


def check(node: Flux2VaeDecoder, config: VaeConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    channels = config.decoder_widths[0]
    x = torch.randn(2, 61, 45, channels, device=device).mul(3).add(7).to(dtype).movedim(-1, 1)
    weight, bias = torch.randn(2, channels, device=device).to(dtype)
    exact = F.silu(F.group_norm(x.double(), config.groups, weight.double(), bias.double(), 1e-6))
    apart = (ops.group_norm(x, config.groups, weight, bias, 1e-6, True) - exact).abs().max() / exact.abs().max()
    latent = latents(node, 2, 256 if device.type == "cuda" else 32, device, dtype)
    fused, alone = node.decode(latent), node.decode(latent[1:])
    with plain_norms():
        plain = node.decode(latent)
        exact_node = decoder(config, device, torch.float32)
        exact_node.load_state_dict(node.state_dict())
        right = exact_node.decode(latent.float())
    psnr = {"fused_db": _psnr(fused, right), "plain_db": _psnr(plain, right), "alone_db": _psnr(alone, fused[1:])}
    verdicts = {
        "norm": float(apart) < (2**-7 if dtype is torch.bfloat16 else 1e-5),
        "decoder": psnr["fused_db"] > min(psnr["plain_db"] - 1, 100),
        "batch": psnr["alone_db"] > min(psnr["plain_db"], 100),
    }
    return {"norm_error": float(apart), **psnr, "right": verdicts}


def _psnr(got: Tensor, right: Tensor) -> float:
    error = (got.float() - right.float()).square().mean().item()
    spread = (right.max() - right.min()).float().item()
    return 10 * math.log10(spread**2 / error) if error else math.inf


def norms(
    config: VaeConfig, sides: Sequence[int], device: torch.device, dtype: torch.dtype, rounds: int
) -> Iterator[dict[str, Any]]:
    """Of each width at its size in the largest picture. *floor*: two reads and a write at a copy's bytes a second."""
    falling = (*reversed(config.decoder_widths),)
    for level, channels in enumerate(falling):
        side = max(sides) * 2**level // config.factor
        x = torch.randn(1, side, side, channels, device=device).to(dtype).movedim(-1, 1)
        weight, bias, target = *torch.randn(2, channels, device=device).to(dtype), torch.empty_like(x)
        copied = seconds(lambda x=x, target=target: target.copy_(x), device, rounds)  # type: ignore[misc]
        args = (x, config.groups, weight, bias, 1e-6, True)
        fused = seconds(lambda args=args: ops.group_norm(*args), device, rounds)  # type: ignore[misc]
        plain = seconds(lambda args=args: reference.group_norm(*args), device, rounds)  # type: ignore[misc]
        yield {"side": side, "channels": channels, "plain_s": plain, "fused_s": fused, "floor_s": copied * 1.5}


def decodes(
    node: Flux2VaeDecoder,
    sides: Sequence[int],
    rows: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    for side in sides:
        for count in rows:
            latent = latents(node, count, side, device, dtype)
            with plain_norms():
                plain = seconds(lambda latent=latent: node.decode(latent), device, rounds)  # type: ignore[misc]
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
            fused = seconds(lambda latent=latent: node.decode(latent), device, rounds)  # type: ignore[misc]
            peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
            row = {"side": side, "rows": count, "plain_s": plain / count, "fused_s": fused / count}
            row["captured_s"] = seconds(_captured(node, latent), device, rounds) / count
            yield {**row, "peak_gib": peak / 2**30, "planned_gib": node.bytes_of(latent) / 2**30}


def _captured(node: Flux2VaeDecoder, latent: Tensor) -> Run:
    if not latent.is_cuda:
        return lambda: node.decode(latent)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        node.decode(latent)
    return graph.replay


def seconds(run: Run, device: torch.device, rounds: int) -> float:
    """The median time of *run*, which is warm."""
    found = []
    for _ in range(rounds + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return sorted(found[2:])[rounds // 2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
