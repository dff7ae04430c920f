"""Qwen3-TTS's 12 Hz codec on a GPU: is streamed sound the whole's, and what do steps of each size and batch cost?

    python benchmarks/codec_gpu.py --out FILE.json                        # the published shape
    python benchmarks/codec_gpu.py --tiny --device cpu --out FILE.json    # does it work? no figures

Random weights at the published sizes, float32. *Right*: frames in pieces of 1, 3, 8, 16, 25 against the same frames as
one piece, a row alone against the row among others, and each Triton kernel against plain torch; a difference above the
bound ends the program with status 1 before anything is measured. That is in float32, where a fault shows; how far
TensorFloat-32 is from it is written down. *Measured*: a step of C new frames for R rows, as one
CUDA graph with its state read and written in place: seconds, seconds of sound a second, and the share of the floor,
which is the larger of the weights' bytes at copy bandwidth and the products at a large product's rate (of the precision
that convolutions use: TensorFloat-32 unless ``--no-tf32``). ``--watermark`` adds AudioSeal's generator.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import environment, table
from gpu.floors import copy_bandwidth
from gpu.report import write
from torch import Tensor, nn

from mstar_tts import codec_ops
from mstar_tts.codec_blocks import Carry, CausalConv, CausalUpsample, settle
from mstar_tts.qwen3_tts.codec_config import CodecConfig
from mstar_tts.qwen3_tts.codec_decoder import CodecDecoder
from mstar_tts.qwen3_tts.codec_tiny import CODEC
from mstar_tts.watermark.audioseal import Generator

RAMP = (1, 3, 8, 16, 25)
ROWS = (1, 2, 4, 8, 16, 32, 64)
BOUND = {"cuda": 1e-3, "cpu": 1e-4}
"""Of streamed sound against the whole in float32, of its deviation: other shapes take other kernels, and on a GPU some
of them transform their inputs (Winograd). A piece that is joined wrongly differs by some tenths."""
ROUNDED = 0.3
"""Of sound with TensorFloat-32, whose factors have 11 bits, against float32, of its norm."""
NAMES = ("done", "lead", "kv", "tail")


def published() -> CodecConfig:
    return CodecConfig.read(
        {
            "decoder_config": {"codebook_dim": 512, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64},
            "encoder_config": {},
        }
    )


@torch.no_grad()
def random_decoder(config: CodecConfig, device: str) -> CodecDecoder:
    """Weights such that signals neither vanish nor explode."""
    torch.manual_seed(7)
    decoder = CodecDecoder(config.decoder)
    for module in decoder.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name == "weight" and parameter.ndim > 1:
                taps = parameter[:, 0].numel() if isinstance(module, nn.ConvTranspose1d) else parameter[0].numel()
                parameter.normal_(std=0.6 * taps**-0.5)
            elif name == "embedding_sum":
                parameter.normal_()
            elif name in ("alpha", "beta", "bias"):
                parameter.normal_(std=0.1)
            elif name == "gamma":
                parameter.fill_(0.1)
    settle(decoder)
    return decoder.to(device).requires_grad_(False).eval()


def drawn(config: CodecConfig, rows: int, frames: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + frames)
    codes = torch.randint(0, config.codebook_size, (rows, frames, config.groups), generator=generator)
    return codes.to(device)


def streamed(decoder: CodecDecoder, codes: Tensor, sizes: Sequence[int]) -> Tensor:
    state, sound = decoder.begin(len(codes), codes.device, torch.float32), []
    for piece in codes.split([*sizes, codes.shape[1] - sum(sizes)], 1):
        samples, state = decoder(piece, state)
        sound.append(samples)
    return torch.cat(sound, 1)


def check(decoder: CodecDecoder, config: CodecConfig, device: str, tf32: bool) -> dict[str, float]:
    """Differences, of the sound's deviation; with *tf32* also its own, of the norm.

    :raises SystemExit: one is above its bound.
    """
    codes = drawn(config, 3, 150, device)
    precision(False)
    whole = streamed(decoder, codes, ())
    scale = whole.std().item()
    x = torch.randn(3, 8, 4001, device=device) * 3
    turns, gains = torch.rand(8, device=device) * 4, torch.rand(8, device=device)
    found = {
        "streamed": (streamed(decoder, codes, (1, 3, 8, 16, 25, 25, 25)) - whole).abs().max().item() / scale,
        "alone": (streamed(decoder, codes[1:2], RAMP) - streamed(decoder, codes, RAMP)[1:2]).abs().max().item() / scale,
        "snake": (codec_ops.snake(x, turns, gains) - codec_ops.plain_snake(x, turns, gains)).abs().max().item(),
    }
    bounds = {"streamed": BOUND[device], "alone": BOUND[device], "snake": 1e-5}
    precision(tf32)
    if tf32:
        found["rounded"] = ((streamed(decoder, codes, RAMP) - whole).norm() / whole.norm()).item()
        bounds["rounded"] = ROUNDED
    wrong = [f"{name}: {value:.2e} > {bounds[name]:.0e}" for name, value in found.items() if not value <= bounds[name]]
    if wrong or not scale > 0.01:
        raise SystemExit("wrong: " + ", ".join(wrong or [f"hardly any sound ({scale:.1e})"]))
    return found


def precision(tf32: bool) -> None:
    """Of convolutions and products from now on."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32


def flops(decoder: CodecDecoder, frames: int) -> float:
    """Of the products of *frames* new frames of one row."""
    total, rate = 0.0, 1.0
    for module in (*decoder.upsample.modules(), *decoder.decoder.modules()):
        if isinstance(module, CausalConv):
            total += 2 * module.conv.weight.numel() * rate
        elif isinstance(module, CausalUpsample):
            total += 2 * module.conv.weight.numel() * rate
            rate *= module.rate
        elif isinstance(module, nn.Module) and type(module).__name__ == "Linear":
            total += 2 * module.weight.numel() * rate  # type: ignore[operator, union-attr]
    linear = sum(p.numel() for p in decoder.pre_transformer.parameters() if p.ndim == 2)
    return frames * (total + 2 * linear + 2 * decoder.pre_conv.conv.weight.numel())


def step_of(decoder: CodecDecoder, codes: Tensor) -> Callable[[], None]:
    """A step that reads and writes its state in place, captured where there are graphs."""
    state = decoder.begin(len(codes), codes.device, torch.float32)

    def run() -> None:
        _, after = decoder(codes, state)
        for name in NAMES:
            getattr(state, name).copy_(getattr(after, name))

    return captured(run, codes.device)


def marking_of(generator: Generator, rows: int, samples: int, device: str) -> Callable[[], None]:
    sound, ends = torch.zeros(rows, samples, device=device), torch.zeros(rows, generator.carried, device=device)

    def run() -> None:
        carry = Carry(ends)
        generator(sound, carry)
        ends.copy_(carry.state(ends))

    return captured(run, torch.device(device))


def captured(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median of *repeats*."""
    times = []
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def product_rate(device: str, size: int) -> float:
    """Operations a second of a square product in the precision that is set."""
    a, b, c = (torch.randn(size, size, device=device) for _ in range(3))
    return 2 * float(size) ** 3 / seconds(partial(torch.mm, a, b, out=c), device, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a tiny codec: does the program work?")
    parser.add_argument("--no-tf32", action="store_true", help="convolutions and products in float32")
    parser.add_argument("--watermark", action="store_true", help="AudioSeal's generator too")
    parser.add_argument("--rows", type=int, nargs="+", help="rows of a step (default 1 to 64)")
    given = parser.parse_args()
    device, tf32 = given.device, given.device == "cuda" and not given.no_tf32
    config = CodecConfig.read(CODEC) if given.tiny else published()
    with torch.inference_mode():
        decoder = random_decoder(config, device)
        result: dict[str, Any] = {"name": "codec_gpu", "environment": environment(("torch", "triton"))}
        result["settings"] = {"tiny": given.tiny, "device": device, "tf32": tf32}
        result["check"] = check(decoder, config, device, tf32)
        print("right:", ", ".join(f"{name} {value:.1e}" for name, value in result["check"].items()))
        shapes = decoder.state_shapes(config.decoder).values()
        result["state_bytes_per_row"] = sum(4 * torch.Size(shape).numel() for shape in shapes)
        small = given.tiny or device == "cpu"
        copy = copy_bandwidth(torch.device(device), 1 << (20 if small else 30))
        rate = product_rate(device, 256 if small else 8192)
        nbytes = sum(p.nbytes for name, p in decoder.named_parameters() if "table" not in name)
        result |= {"copy_bytes_per_s": copy, "product_flops_per_s": rate, "weight_bytes": nbytes, "rows": []}
        generator = None
        if given.watermark:
            generator = Generator((0, 1) * 8)
            settle_generator(generator, device)
        for rows in given.rows or (ROWS[:2] if small else ROWS):
            for frames in RAMP:
                taken = seconds(step_of(decoder, drawn(config, rows, frames, device)), device, 2 if small else 20)
                floor = max(nbytes / copy, rows * flops(decoder, frames) / rate)
                sound = rows * frames * config.samples_per_frame / config.rate
                row = {"rows": rows, "frames": frames, "step_s": taken, "floor_s": floor, "of_floor": floor / taken}
                row["audio_s_per_s"] = sound / taken
                if generator is not None:
                    run = marking_of(generator, rows, frames * config.samples_per_frame, device)
                    row["mark_s"] = seconds(run, device, 2 if small else 20)
                result["rows"].append(row)
                write(given.out, result)
                if device == "cuda":
                    torch.cuda.empty_cache()  # what the graph held
    shown = [{**row, **{k[:-2] + "_ms": 1e3 * v for k, v in row.items() if k.endswith("_s")}} for row in result["rows"]]
    marks = ["mark_ms"] if given.watermark else []
    table("codec steps", shown, ["rows", "frames", "step_ms", "floor_ms", "of_floor", "audio_s_per_s", *marks])


def settle_generator(generator: Generator, device: str) -> None:
    for parameter in generator.parameters():
        parameter.data = torch.randn_like(parameter) * 0.05
    generator.settle()
    generator.to(device).requires_grad_(False)


if __name__ == "__main__":
    sys.exit(main())
