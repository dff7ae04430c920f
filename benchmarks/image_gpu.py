"""Pictures on a GPU: the engine against diffusers, against its own plain calls, and against what the device allows.

    python benchmarks/image_gpu.py --out FILE.json                                  # all shapes; no network, no weights
    python benchmarks/image_gpu.py --shapes klein-4b --parts floor,graphs,vae,diffusers --rounds 3 --at-once 1,4 \\
        --out FILE.json                                                             # under two minutes
    python benchmarks/image_gpu.py --shapes tiny --device cpu --out FILE.json       # does it work? no figures

Models have random weights at published shapes. Each part runs in a process of its own, which imports what it needs
while the one before measures, and the file is written after each: what breaks or takes longer than ``--limit`` is
reported, and the next goes on.

Parts, in the order in which they are run: ``floor``: products and attention of one step alone, and the step itself by
plain PyTorch operations, with the fused kernels, and captured, the last two compared with the first. ``graphs``
(captured steps, the default): latency of one request, pictures a second at 1, 4 and 16 at once. ``timeline``: where the
time of one such request goes, step by step and gap by gap. ``plain`` (neither kernels of M*'s own nor graphs): as
``graphs``; its pictures are what others' PSNR is to. ``vae``: decoding. ``diffusers``:
the reference, in batches of the same sizes. ``http``: ``graphs`` behind ``mstar serve``, and how long its files take to
encode. ``eager``: the kernels without
graphs. ``compiled`` (and compiled layers), ``vae-compiled``, ``diffusers-compiled``: minutes each. ``exact``: compiled
with exact norms and eager rounding.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from common import environment, table

ENGINES: dict[str, dict[str, Any]] = {
    "graphs": {"engine": {"compile": False}},
    "plain": {"engine": {"runner": "eager", "compile": False}},
    "eager": {"engine": {"runner": "eager", "compile": False}},
    "compiled": {"engine": {"compile": True}},
    "exact": {
        "engine": {"compile": True, "compile_rounding": True},
        "model_kwargs": {"compile_exact_ops": ["norms"]},
    },
}
PARTS = (
    "floor", "graphs", "timeline", "plain", "vae", "diffusers", "http", "eager", "compiled", "vae-compiled",
    "diffusers-compiled", "exact",
)  # fmt: skip
_OURS = ("image.steps", "mstar.worker.core", "mstar_diffusion.flux2.model", "mstar_diffusion.z_image.model")
_DIFFUSERS = (
    "image.reference",
    "transformers.models.qwen3.modeling_qwen3",
    "diffusers.pipelines.flux2.pipeline_flux2_klein",
    "diffusers.pipelines.z_image.pipeline_z_image",
)
MINUTES = ("compiled", "exact")
"""Parts that compile for each number of requests: one at a time is measured."""
MOST_ROWS = 8
"""Of a denoise step."""
PROMPT = "A lighthouse on a cliff at dawn, gulls around it, long exposure, the sea a mist below"
PACKAGES = ("torch", "triton", "diffusers", "transformers", "mstar-core", "mstar-diffusion")
PLUGINS = ("image.random_weights",)


def main(words: Sequence[str]) -> int:
    os.environ["MSTAR_BENCH_RANDOM"] = "1"  # for this process and those that it starts
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="z-image,klein-4b,klein-9b")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", default="1,4,16", help="numbers of requests at a time")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of what a median is taken of")
    parser.add_argument("--limit", type=float, default=590, help="seconds for one part")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--child", nargs=3, metavar=("SHAPE", "PART", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if strange := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(strange))}; known: {', '.join(PARTS)}")
    if args.child:
        _import_for(args.child[1])
        if not sys.stdin.readline():  # nobody waits for it any more
            return 1
        args.out.write_text(json.dumps(measure(*args.child, args)))
        return 0
    found: dict[str, Any] = {"environment": environment(PACKAGES), "settings": _settings(args), "results": {}}
    for shape in args.shapes.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            results = found["results"][shape] = {}
            parts = sorted(args.parts.split(","), key=PARTS.index)
            children = [_start(shape, parts[0], scratch, args)]
            for number, part in enumerate(parts):
                if number + 1 < len(parts):  # it imports what it needs while this one measures
                    children.append(_start(shape, parts[number + 1], scratch, args))
                results[part] = _finish(children[number], Path(scratch) / f"{part}.json", args)
                _derive(results, Path(scratch))
                args.out.write_text(json.dumps(found, indent=2) + "\n")
    _print(found["results"])
    return 1 if any("error" in part for shape in found["results"].values() for part in shape.values()) else 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: str(value) for name, value in vars(args).items() if name not in ("child", "out")}


def _start(shape: str, part: str, scratch: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    """The process of a part, which waits for a line before it touches the device."""
    out = Path(scratch) / f"{part}.json"
    words = [sys.executable, __file__, "--child", shape, part, scratch, "--out", str(out), "--device", args.device]
    words += ["--at-once", args.at_once, "--rounds", str(args.rounds)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def _finish(child: subprocess.Popen[str], out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What the part of *child* found, which it writes to *out*: it begins now."""
    began = time.monotonic()
    with child:
        try:
            _, said = child.communicate("\n", timeout=args.limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # what the child started, too: it holds the device
            child.communicate()
            return {"error": f"took longer than {args.limit:.0f} s"}
    if child.returncode or not out.is_file():
        return {"error": said.strip().splitlines()[-8:], "part_s": time.monotonic() - began}
    found: dict[str, Any] = json.loads(out.read_text())
    return {**found, "part_s": time.monotonic() - began}


def _import_for(part: str) -> None:
    """What takes longest to import, without touching the device."""
    for name in _DIFFUSERS if part.startswith("diffusers") else _OURS:
        importlib.import_module(name)


# --- parts ------------------------------------------------------------------------------------------------------------
def measure(shape_name: str, part: str, scratch: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one part, in this process."""
    from image.shapes import SHAPES, write_shape

    shape, folder = SHAPES[shape_name], Path(scratch) / "weights"
    if not folder.exists():
        folder.mkdir()
        write_shape(shape, folder)
    at_once = [1] if part in MINUTES else [int(number) for number in args.at_once.split(",")]
    if part == "plain":
        _without_kernels()
    if part in ENGINES:
        return _engine(shape, folder, part, at_once, args, Path(scratch) / f"{part}.npy")
    if part == "timeline":
        return _timeline(shape, folder, args, Path(scratch) / "trace.json")
    if part == "http":
        return _http(shape, folder, at_once, args)
    if part == "floor":
        return _floor(shape, folder, args)
    if part.startswith("vae"):
        return _vae(shape, folder, args, part == "vae-compiled")
    return _diffusers(shape, folder, part, at_once, args)


def _without_kernels() -> None:
    """From now on PyTorch's own operations only, in this process."""
    from mstar.nn import ops

    ops.cuda_kernels_fault = lambda: "they are what is compared with"  # type: ignore[assignment]


def _options(shape: Any, part: str, device: str, at_once: Sequence[int]) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(ENGINES[part]))
    options = fields.setdefault("model_kwargs", {})
    options["capture_sizes"] = [[shape.size, shape.size]]
    options["capture_batch_sizes"] = sorted({min(count, MOST_ROWS) for count in (1, *at_once)})
    if shape.flux2:
        options["capture_edit_sizes"] = []
    if device == "cpu":  # no machine code, and no graphs: that the parts run is all that is asked there
        fields["engine"] = {}
    return {**fields, "max_concurrent_requests": 16}


def _settings_of() -> Any:
    import importlib.metadata
    from dataclasses import replace

    from mstar.settings import Settings

    installed = importlib.metadata.entry_points(group="mstar.plugins", name="diffusion")
    more = () if installed else ("mstar_diffusion.plugin",)
    return replace(Settings.from_env(os.environ), extra_plugins=(*PLUGINS, *more))


def _engine(
    shape: Any, folder: Path, part: str, at_once: Sequence[int], args: argparse.Namespace, pictures: Path
) -> dict[str, Any]:
    import mstar

    began = time.perf_counter()
    settings = _settings_of()
    options = _options(shape, part, args.device, at_once)
    with mstar.load(shape.key, weights=str(folder), device=args.device, settings=settings, **options) as model:
        start_s = time.perf_counter() - began
        knobs = {"width": shape.size, "height": shape.size, "num_inference_steps": shape.steps}

        async def some(count: int, first: int = 0) -> list[Any]:
            asked = (model.agenerate(PROMPT, seed=first + index, **knobs) for index in range(count))
            return list(await asyncio.gather(*asked))

        # what is compiled or captured at the first requests is not what is measured
        for count in at_once:
            asyncio.run(some(count))
        found = {"start_s": start_s, **_rates(lambda count: asyncio.run(some(count)), at_once, args.rounds)}
        answers = [answer for seed in range(4) for answer in asyncio.run(some(1, seed))]
        np.save(pictures, np.stack([answer.outputs["image"][0].frames[0] for answer in answers]))
    return found | _memory(args.device)


def _timeline(shape: Any, folder: Path, args: argparse.Namespace, trace: Path) -> dict[str, Any]:
    from gpu.timeline import digest as kernels
    from gpu.timeline import profile_run
    from image.timeline import Asked, digest, read_trace

    import mstar

    options = _options(shape, "graphs", args.device, [1])
    options["engine"]["trace"] = str(trace)
    knobs = {"width": shape.size, "height": shape.size, "num_inference_steps": shape.steps}
    prepared: list[float] = []
    with mstar.load(shape.key, weights=str(folder), device=args.device, settings=_settings_of(), **options) as model:
        processor = model._service.processor
        plain = processor.prepare

        def prepare(*given: Any) -> Any:
            began = time.monotonic()
            try:
                return plain(*given)
            finally:
                prepared.append(time.monotonic() - began)

        processor.prepare = prepare  # type: ignore[method-assign]

        def ask(seed: int) -> Asked:
            began = time.monotonic()
            model.generate(PROMPT, seed=seed, **knobs)
            return Asked(began, time.monotonic(), prepared[-1])

        for seed in range(2):
            ask(seed)
        rounds = [ask(seed) for seed in range(max(args.rounds, 3))]
        found: dict[str, Any] = {}
        if args.device == "cuda":
            found["kernels"] = kernels(profile_run(lambda: ask(0)), 1)
        found["engine"] = dict(model.status()["engine"])
    events = read_trace(trace)
    digests = sorted((digest(events, asked) for asked in rounds), key=lambda d: float(d["total"]))
    return {**digests[len(digests) // 2], "totals": [d["total"] for d in digests], **found}


def _rates(run: Callable[[int], Any], at_once: Sequence[int], rounds: int) -> dict[str, Any]:
    """Median seconds of one request, and pictures a second at each number of requests at once."""
    found: dict[str, Any] = {}
    for count in at_once:
        times = []
        for _ in range(rounds if count == 1 else max(2, rounds // 2)):
            began = time.perf_counter()
            run(count)
            times.append(time.perf_counter() - began)
        median = sorted(times)[len(times) // 2]
        found[f"pictures_per_s_{count}"] = count / median
        if count == 1:
            found["latency_s"] = median
    return found


def _memory(device: str) -> dict[str, float]:
    import torch

    return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if device == "cuda" else {}


def _node(shape: Any, folder: Path, name: str, device: Any, dtype: Any) -> Any:
    from image.random_weights import draw

    from mstar.nn.model import BuildContext
    from mstar.plugins import load_plugins
    from mstar.registry import Registry, load_object
    from mstar.weights import loader

    spec = Registry(load_plugins(_settings_of())).model(shape.key)
    model = load_object(spec.model)(BuildContext(folder, dtype, device, spec.options()))
    node = model.on_meta(name)
    loader._materialise(node, model.weights(name), device, dtype)
    draw(node)
    model.loaded(name, node)
    return node.to(device).eval(), model


def _step(device: Any, dtype: Any) -> Any:
    import torch

    from mstar.nn.node import Step

    offsets = torch.arange(2, device=device)
    return Step([1], offsets, offsets[:-1], [True], {}, device, dtype, None, "step")


def _place(args: argparse.Namespace) -> tuple[Any, Any]:
    import torch

    device = torch.device(args.device)
    return device, torch.bfloat16 if device.type == "cuda" else torch.float32


def _floor(shape: Any, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from image.floor import floor
    from image.steps import ways

    device, dtype = _place(args)
    node, model = _node(shape, folder, "dit", device, dtype)
    facts, side, tokens = model.facts(), shape.size // 16, 512 if shape.flux2 else 64
    inputs = {
        "latent": torch.randn(1, side, side, facts.channels, device=device, dtype=dtype if shape.flux2 else None),
        "prompt": torch.randn(1, tokens, facts.prompt, device=device, dtype=dtype),
        "sigmas": torch.linspace(1, 0, 101, device=device)[None],
        "index": torch.zeros(1, dtype=torch.int64, device=device),
    }
    step = _step(device, dtype)
    with torch.inference_mode():
        found = {**floor(node, inputs, step, args.rounds, shape.steps), "steps": shape.steps}
        return found | ways(node, inputs, step, args.rounds, shape.steps)


def _vae(shape: Any, folder: Path, args: argparse.Namespace, compiled: bool) -> dict[str, Any]:
    import torch
    from image.steady import seconds

    from mstar.engine.compile import compile_regions

    device, dtype = _place(args)
    node, model = _node(shape, folder, "vae_decoder", device, dtype)
    side = shape.size // 16
    latent = torch.randn(1, side, side, model.facts().channels, device=device, dtype=dtype)
    step, found = _step(device, dtype), {}
    with torch.inference_mode():
        found["plain_s"] = seconds(lambda: node.forward(step, latent), device, args.rounds)
        (plain,) = node.forward(step, latent)["image"]
        found |= _memory(args.device)
        if compiled and device.type == "cuda":
            compile_regions({"vae_decoder": node})
            found["compiled_s"] = seconds(lambda: node.forward(step, latent), device, args.rounds)
            (other,) = node.forward(step, latent)["image"]
            found["compiled_psnr_db"] = psnr(other.cpu().numpy(), plain.cpu().numpy())
    return found


def _diffusers(shape: Any, folder: Path, part: str, at_once: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from image.reference import reference_pipeline

    device, dtype = _place(args)
    pipe = reference_pipeline(shape, folder, device, dtype)
    if part == "diffusers-compiled" and device.type == "cuda":
        pipe.transformer = torch.compile(pipe.transformer)
        pipe.vae.decode = torch.compile(pipe.vae.decode)
    more: dict[str, Any] = {"text_encoder_out_layers": (1, 2, 3)} if shape.flux2 and not shape.changes else {}
    more |= {} if shape.flux2 else {"guidance_scale": 0.0}

    def run(count: int) -> None:
        # batches of four at most: sixteen at 1024 x 1024 need more than a device has
        for begin in range(0, count, 4):
            size = min(4, count - begin)
            pipe(
                prompt=[PROMPT] * size,
                width=shape.size,
                height=shape.size,
                num_inference_steps=shape.steps,
                generator=[torch.Generator().manual_seed(seed) for seed in range(begin, begin + size)],
                **more,
            )

    with torch.inference_mode():
        for count in at_once:
            run(count)
        return _rates(run, at_once, args.rounds) | _memory(args.device)


def _http(shape: Any, folder: Path, at_once: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    from image.over_http import Clients, encoding_seconds

    options = _options(shape, "graphs", args.device, at_once)
    config = folder.parent / "serve.yaml"
    config.write_text(json.dumps({"model": shape.key, "weights": str(folder), "device": args.device, **options}))
    more = {"MSTAR_EXTRA_PLUGINS": ",".join(_settings_of().extra_plugins), "PYTHONPATH": os.pathsep.join(sys.path)}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = "from mstar.cli.app import main; main()"
    words = [sys.executable, "-c", command, "serve", shape.key, "--config", str(config), "--port", str(port)]
    with subprocess.Popen(words, env={**os.environ, **more}, stdout=sys.stderr) as server:
        try:
            _until_ready(url, server)
            body = {"model": shape.key, "prompt": PROMPT, "size": f"{shape.size}x{shape.size}"}
            with Clients(port, {**body, "num_inference_steps": shape.steps}, max(at_once)) as clients:
                for count in at_once:
                    clients.ask(count)
                found = _rates(clients.ask, at_once, args.rounds)
                return found | {"encode_s": encoding_seconds(clients.ask(1)[0], args.rounds)}
        finally:
            server.terminate()
            server.wait(30)


def _until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    import httpx

    while server.poll() is None:
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the server ended with status {server.returncode} before it was ready")


# --- what follows from the figures ------------------------------------------------------------------------------------
def psnr(one: np.ndarray, other: np.ndarray) -> float:
    """Peak signal to noise of pictures of 8 bits, in dB; 99 for the same picture."""
    error = float(np.mean((one.astype(np.float64) - other.astype(np.float64)) ** 2))
    return 99.0 if error == 0 else 10 * math.log10(255**2 / error)


def _derive(results: dict[str, Any], scratch: Path) -> None:
    plain = scratch / "plain.npy"
    for part in ENGINES:
        file = scratch / f"{part}.npy"
        if part != "plain" and plain.is_file() and file.is_file():
            pairs = zip(np.load(file), np.load(plain), strict=True)
            results[part]["psnr_db"] = min(psnr(one, other) for one, other in pairs)
    best = min((results[p]["latency_s"] for p in ENGINES if "latency_s" in results.get(p, {})), default=None)
    for part, word in (("diffusers", "over_diffusers"), ("diffusers-compiled", "over_compiled_diffusers")):
        if best and "latency_s" in results.get(part, {}):
            results.setdefault("derived", {})[word] = results[part]["latency_s"] / best
    if "latency_s" in results.get("http", {}) and "latency_s" in results.get("graphs", {}):
        http, offline = results["http"], results["graphs"]["latency_s"]
        derived = results.setdefault("derived", {})
        derived["http_over_offline"] = http["latency_s"] / offline
        # offline nobody makes a PNG file of it, and base64 of that
        derived["http_over_encoded"] = http["latency_s"] / (offline + http["encode_s"])
    floor = results.get("floor", {})
    if "step_floor_s" in floor:
        derived = results.setdefault("derived", {})
        derived["floor_s_a_step"] = floor["step_floor_s"]
        derived |= {f"{way}_share_of_floor": floor["step_floor_s"] / floor[f"{way}_step_s"] for way in _timed(floor)}
        decoding = [results.get(part, {}) for part in ("vae", "vae-compiled")]
        vae = min((found[key] for found in decoding for key in ("plain_s", "compiled_s") if key in found), default=None)
        if best and vae is not None:
            derived["share_of_floor"] = floor["steps"] * floor["step_floor_s"] / max(best - vae, 1e-9)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items()}


def _timed(floor: dict[str, Any]) -> list[str]:
    return [way for way in ("plain", "fused", "captured") if f"{way}_step_s" in floor]


def _print(results: dict[str, Any]) -> None:
    for shape, parts in results.items():
        rows = [{"part": name, **{k: v for k, v in found.items() if k != "error"}} for name, found in parts.items()]
        columns = [
            "part",
            "latency_s",
            "pictures_per_s_1",
            "pictures_per_s_4",
            "pictures_per_s_16",
            "psnr_db",
            "part_s",
        ]
        table(shape, rows, columns, digits=3)
        if "steps" in parts.get("timeline", {}):
            from image.timeline import stages

            table(f"{shape}, one picture", stages(parts["timeline"]), ["part", "ms", "share"])
            steps = [{**step, "host": json.dumps(_rounded(step["host"]))} for step in parts["timeline"]["steps"]]
            table(f"{shape}, its steps", steps, ["step", "ms", "gap", "captured", "ahead", "host"])
        for name, found in parts.items():
            if "error" in found:
                print(f"{shape} {name}: {found['error']}", file=sys.stderr)
        print(json.dumps(parts.get("derived", {})))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
