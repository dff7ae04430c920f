"""Qwen3.5 on a GPU: the hybrid language model and its vision tower against what the device allows, and transformers.

    python benchmarks/vlm_gpu.py --shapes 4b --out FILE.json                     # six minutes
    python benchmarks/vlm_gpu.py --shapes 9b --out OTHER.json                    # eight, and 18 GB of temporary files
    python benchmarks/vlm_gpu.py --shapes 9b --parts check,decode --out FILE.json
    python benchmarks/vlm_gpu.py --shapes tiny --device cpu --out FILE.json      # does it work? no figures

Random weights at published shapes. ``check`` comes first: greedy answers to texts and to a picture against float32, by
the rule of ``decode_gpu.py``. A decode step's floor is its matrix products as one captured graph, and the rows' states
(read and written) and keys and values (read) at copy bandwidth, measured in the same run. NOTES.md says what each
figure means.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import environment, table
from gpu.check import compare
from gpu.child import failure
from gpu.engine import GREEDY, Loop
from gpu.floors import copy_bandwidth, gemm_rate, products_graph
from gpu.hybrid import SHAPES, HybridShape, publish
from gpu.report import write
from gpu.timeline import profile_steps, show_timeline
from gpu.tower import tower, tower_rows

from mstar.plugins import load_plugins
from mstar.registry import Registry, load_object
from mstar.runtime.deployment_files import packaged_deployment
from mstar.settings import Settings
from mstar.spec.deployment import merge_deployment
from mstar.spec.knobs import read_options, validate_knobs
from mstar.spec.processor import ProcessorContext
from mstar.spec.request import EngineRequest, SamplingParams
from mstar.spec.tasks import ChatTask, Image, Message, Text

PARTS = ("check", "decode", "prefill", "turns", "images", "tower", "peer")
CHECKED, NEW_TOKENS = (3, 64, 65, 200, 700), 40
"""Prompt lengths whose answers are compared with float32's, and the answers' length."""
SPECIAL = 32
"""Ids at the end of the vocabulary that no drawn prompt has."""
QUESTION = "What is in this picture?"


class Ours:
    """The engine in this process."""

    def __init__(self, shape: HybridShape, folder: Path, device: str, dtype: str):
        registry = Registry(load_plugins(Settings(plugins=(), extra_plugins=("mstar_qwen3.plugin",))))
        spec = registry.model(shape.key)
        most = max(*shape.batches, shape.chats)
        longest = max(*shape.prefills, sum(shape.turn), shape.prompt, *CHECKED) + 4 * shape.steps + 8 * most + 64
        options: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "max_concurrent_requests": most,
            "model_kwargs": {"max_tokens": longest},
            "resources": {"kv": {"tokens": max(longest, most * 2 * shape.prompt + longest)}},
            "scheduler": {"max_step_tokens": max(shape.prefills)},
        }
        self.shape, self.loop = shape, Loop(registry, shape.key, folder, options)
        merged = merge_deployment(spec.key, packaged_deployment(spec), options)
        self.spec = spec
        context = ProcessorContext(spec, folder, read_options(spec.options, merged.model_kwargs))
        self.processor = load_object(spec.processor)(context)
        self._draw = np.random.default_rng(0)

    def prompt(self, length: int) -> np.ndarray:
        return self._draw.integers(0, self.shape.facts.vocab - SPECIAL, length, dtype=np.int64)

    def picture(self) -> np.ndarray:
        """Noise, which no cache knows."""
        side = self.shape.image
        return self._draw.integers(0, 256, (side, side, 3), dtype=np.uint8)

    def ask(self, prompt: Sequence[int] | np.ndarray, new: int) -> str:
        sampling = SamplingParams(max_tokens=new, ignore_eos=True, **GREEDY)
        inputs = {"prompt": np.asarray(prompt, np.int64)}
        return self.loop.ask(EngineRequest(id=self.loop.name(), inputs=inputs, sampling={"sampler": sampling}))

    def looking(self, picture: np.ndarray, new: int) -> EngineRequest:
        """A request about *picture*, prepared as a server prepares it."""
        knobs = validate_knobs(self.spec.knobs, {"temperature": 0.0, "max_tokens": new, "ignore_eos": True})
        message = Message("user", (Image(picture), Text(QUESTION)))
        task = ChatTask(knobs=knobs, messages=(message,))
        request: EngineRequest = self.processor.prepare(task, self.loop.name()).request
        return request

    def first_token(self, *requests: EngineRequest | tuple[Sequence[int], int]) -> dict[str, float]:
        """Seconds to the first token of the median request, and to the end of the last one; all come at once."""
        began, first = time.perf_counter(), dict[str, float]()
        names = [self.loop.ask(r) if isinstance(r, EngineRequest) else self.ask(*r) for r in requests]
        while not self.loop.ended.issuperset(names):
            self.loop.step()
            now = time.perf_counter()
            for name in names:
                if name not in first and self.loop.tokens[name]:
                    first[name] = now - began
        spent = time.perf_counter() - began
        tokens = sum(len(self.loop.tokens[name]) for name in names)
        answers = [list(self.loop.tokens[name]) for name in names]
        self.loop.cancel_all()
        self.answers = answers
        return {"first_token_s": statistics.median(first.values()), "seconds": spent, "tokens": tokens}


# --- is it right? -----------------------------------------------------------------------------------------------------
class Reference:
    """transformers' logits of whole answers, exact and in bfloat16; see ``gpu.check``."""

    def __init__(self, folder: Path, device: str):
        import transformers
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        transformers.utils.logging.set_verbosity_error()
        load = transformers.Qwen3_5ForConditionalGeneration.from_pretrained
        self._models = [
            load(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
            for dtype in (torch.float32, torch.bfloat16)
        ]
        self._device, self._image = device, self._models[0].config.image_token_id
        size = {"shortest_edge": 65536, "longest_edge": 16777216}
        self._pictures = Qwen2VLImageProcessorPil(
            patch_size=16, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3, size=size
        )

    @torch.inference_mode()
    def logits(self, asked: tuple[np.ndarray, np.ndarray | None], answer: Sequence[int]) -> list[torch.Tensor]:
        """*asked*: a prompt and its picture. float32 ``[len(answer), vocab]`` of each model."""
        prompt, picture = asked
        ids = torch.from_numpy(np.where(prompt < 0, self._image, prompt))
        ids = torch.cat((ids, torch.tensor(answer[:-1], dtype=torch.int64)))[None].to(self._device)
        inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == self._image).int()}
        if picture is not None:
            from PIL import Image as Pillow

            made = self._pictures(images=[Pillow.fromarray(picture)], return_tensors="pt").to(self._device)
            inputs |= {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}
        found = (model(**inputs, use_cache=False).logits[0, len(prompt) - 1 :] for model in self._models)
        return [each.float() for each in found]


def check(ours: Ours, folder: Path, device: str) -> dict[str, Any]:
    """Texts that come at once, and a picture."""
    prompts = [ours.prompt(length) for length in CHECKED]
    ours.first_token(*((prompt, NEW_TOKENS) for prompt in prompts))
    answers: list[tuple[Any, list[int]]] = [
        ((prompt, None), answer) for prompt, answer in zip(prompts, ours.answers, strict=True)
    ]
    picture = ours.picture()
    request = ours.looking(picture, NEW_TOKENS)
    ours.first_token(request)
    seen = [((np.asarray(request.inputs["prompt"]), picture), ours.answers[0])]
    reference = Reference(folder, device)
    found = {"texts": compare(reference, answers), "picture": compare(reference, seen)}
    del reference
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
    wrong = [name for name, case in found.items() if case["wrong"]]
    return {**found, "verdict": "wrong: " + ", ".join(wrong) if wrong else "right"}


# --- measures ---------------------------------------------------------------------------------------------------------
def decode(ours: Ours, floors: dict[str, Any], device: str) -> list[dict[str, Any]]:
    """Step times by batch, against products, states, keys and values."""
    shape, rows = ours.shape, []
    for batch in shape.batches:
        new = 2 * shape.steps + 4 * shape.warm + 2 * batch * shape.prompt // max(shape.prefills) + 64
        names = [ours.ask(ours.prompt(shape.prompt), new) for _ in range(batch)]
        ours.loop.until(lambda names=names: all(ours.loop.tokens[name] for name in names))
        ours.loop.window(shape.warm)
        before = sum(len(ours.loop.tokens[name]) for name in names)
        times = ours.loop.window(shape.steps).step_times(batch)
        context = shape.prompt + (before + sum(len(ours.loop.tokens[name]) for name in names)) / 2 / batch
        moved = batch * (shape.state_bytes + context * shape.kv_bytes)
        floor = floors["linear_graph_s"][str(batch)] + moved / floors["copy_bytes_per_s"]
        step = statistics.median(times)
        row: dict[str, Any] = {
            "batch": batch, "step_ms": step * 1e3, "floor_ms": floor * 1e3, "over_floor": step / floor,
            "tokens_per_s": batch / step, "state_ms": batch * shape.state_bytes / floors["copy_bytes_per_s"] * 1e3,
        }  # fmt: skip
        if device != "cpu":
            row["timeline"] = profile_steps(ours.loop.window, shape.warm // 2, shape.steps // 4)
            row["idle_share"] = row["timeline"]["idle_share"]
        ours.loop.cancel_all()
        rows.append(row)
        print(f"  decode {batch}: {step * 1e3:.3f} ms, {row['over_floor']:.2f} of the floor", flush=True)
    return rows


def prefill(ours: Ours, floors: dict[str, Any], repeats: int, device: str) -> list[dict[str, Any]]:
    """First tokens of prompts alone, and what the device does meanwhile."""

    def asks(tokens: int, count: int, after: Callable[[], None]) -> None:
        for _ in range(count):
            ours.first_token((ours.prompt(tokens), 1))
            after()

    rows = []
    for tokens in ours.shape.prefills:
        ours.first_token((ours.prompt(tokens), 1))
        taken = [ours.first_token((ours.prompt(tokens), 1))["first_token_s"] for _ in range(repeats)]
        seconds, flops = statistics.median(taken), ours.shape.prefill_flops(tokens)
        share = flops / seconds / floors["gemm_flops_per_s"]
        row: dict[str, Any] = {
            "tokens": tokens,
            "ms": seconds * 1e3,
            "tokens_per_s": tokens / seconds,
            "of_gemm_rate": share,
        }
        print(f"  prefill {tokens}: {seconds * 1e3:.1f} ms, {share:.0%} of the rate of a product", flush=True)
        if device != "cpu":
            row["timeline"] = profile_steps(partial(asks, tokens), 1, 2)
            show_timeline(row["timeline"])
        rows.append(row)
    return rows


def turns(ours: Ours, repeats: int) -> dict[str, Any]:
    """The first token of a chat's second turn, which has the first one's states and pages, over the first turn's."""
    length, answer, question = ours.shape.turn
    firsts, seconds = [], []
    for _ in range(repeats + 1):  # the first is not counted
        prompt = ours.prompt(length)
        firsts.append(ours.first_token((prompt, answer))["first_token_s"])
        again = np.concatenate((prompt, ours.answers[0], ours.prompt(question)))
        seconds.append(ours.first_token((again, 1))["first_token_s"])
    first, second = statistics.median(firsts[1:]), statistics.median(seconds[1:])
    return {"first_s": first, "second_s": second, "second_over_first": second / first}


def images(ours: Ours, repeats: int) -> dict[str, Any]:
    """One picture's first token, and many chats with a picture each."""
    shape = ours.shape

    def looked(count: int, new: int) -> dict[str, float]:
        return ours.first_token(*(ours.looking(ours.picture(), new) for _ in range(count)))

    tokens = len(ours.looking(ours.picture(), 1).inputs["prompt"])
    for count in (1, shape.chats):
        looked(count, 1)
    alone = statistics.median(looked(1, 1)["first_token_s"] for _ in range(repeats))
    chats = looked(shape.chats, shape.answer)
    return {
        "pixels": shape.image,
        "prompt_tokens": tokens,
        "first_token_s": alone,
        "chats": shape.chats,
        "chats_first_token_s": chats["first_token_s"],
        "chats_tokens_per_s": chats["tokens"] / chats["seconds"],
    }


def peer(shape: HybridShape, folder: Path, device: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """transformers on the same prompts, a batch of one length: seconds to the first token, and of a step."""
    import transformers

    load = transformers.Qwen3_5ForConditionalGeneration.from_pretrained
    model = load(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    rows = []
    for batch in shape.batches:
        ids = torch.randint(0, shape.facts.vocab - SPECIAL, (batch, shape.prompt), device=device)
        spent = []
        for new in (1, 1, 1 + shape.warm):
            began = time.perf_counter()
            with torch.inference_mode():
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                    pad_token_id=0,
                )  # fmt: skip
            if device != "cpu":
                torch.cuda.synchronize()
            spent.append(time.perf_counter() - began)
        step = (spent[2] - spent[1]) / shape.warm
        rows.append({"batch": batch, "prompts_s": spent[1], "step_ms": step * 1e3, "tokens_per_s": batch / step})
        print(f"  transformers {batch}: prompts {spent[1]:.2f} s, a step {step * 1e3:.1f} ms", flush=True)
    return rows


# --- all --------------------------------------------------------------------------------------------------------------
def measure(
    name: str, shape: HybridShape, words: argparse.Namespace, result: dict[str, Any], save: Callable[[], None]
) -> None:
    """Fill *result* with what is found of *shape*; *save* writes it after each part. The tower is shape *name*'s."""
    device = words.device
    dtype, small = (torch.float32, True) if device == "cpu" else (torch.bfloat16, False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        target = torch.device(device)
        floors: dict[str, Any] = {
            "copy_bytes_per_s": copy_bandwidth(target, 1 << 22 if small else 4 << 30),
            "gemm_flops_per_s": gemm_rate(target, 256 if small else 8192),
        }
        result["floors"] = floors
        if not set(words.parts) <= {"tower"}:  # which has a checkpoint of its own
            publish(shape, folder, device, dtype)
        if not set(words.parts) <= {"tower", "peer"}:
            floors["linear_graph_s"] = products_graph(shape.products, target, shape.batches)
            _ours(Ours(shape, folder, device, str(dtype).removeprefix("torch.")), folder, words, result, save)
        gc.collect()
        apart: dict[str, Callable[[], Any]] = {
            "tower": partial(tower, name, device, floors["gemm_flops_per_s"], words.repeats),
            "peer": partial(peer, shape, folder, device, dtype),
        }
        for part, run in apart.items():
            if part in words.parts:
                try:
                    result[part] = run()
                except Exception as error:
                    result[part] = failure(error)
                save()


def _ours(
    ours: Ours, folder: Path, words: argparse.Namespace, result: dict[str, Any], save: Callable[[], None]
) -> None:
    result.update(ready_s=ours.loop.load_s, phases=ours.loop.phases)
    runs: dict[str, Callable[[], Any]] = {
        "check": partial(check, ours, folder, words.device),
        "decode": partial(decode, ours, result["floors"], words.device),
        "prefill": partial(prefill, ours, result["floors"], words.repeats, words.device),
        "turns": partial(turns, ours, words.repeats),
        "images": partial(images, ours, words.repeats),
    }
    for name, run in runs.items():
        if name in words.parts:
            result[name] = _part(ours, run)
            print(f"  {name}: {result[name] if isinstance(result[name], dict) else 'done'}", flush=True)
            save()
    ours.loop.close()


def _part(ours: Ours, run: Callable[[], Any]) -> Any:
    """What *run* measures. One that fails takes no other along, as long as the device answers."""
    try:
        return run()
    except Exception as error:
        failed = failure(error)
    ours.loop.cancel_all()
    return failed


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="4b", help="of " + ", ".join(SHAPES))
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", help="of decode and peer, instead of the shape's")
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args(given)
    words.parts = words.parts.split(",")
    packages = ("torch", "triton", "transformers", "flashinfer-python")
    result: dict[str, Any] = {"name": "vlm_gpu", "environment": environment(packages), "shapes": {}}
    for name in words.shapes.split(","):
        print(name, flush=True)
        found = result["shapes"].setdefault(name, {})
        shape = SHAPES[name]
        if words.batches:
            shape = replace(shape, batches=tuple(map(int, words.batches.split(","))))
        with contextlib.suppress(KeyboardInterrupt):
            measure(name, shape, words, found, lambda: write(words.out, result))
    write(words.out, result)
    for name, found in result["shapes"].items():
        columns = ("batch", "step_ms", "floor_ms", "over_floor", "tokens_per_s", "idle_share")
        table(f"{name}, decode", _rows(found, "decode"), columns)
        table(f"{name}, prefill", _rows(found, "prefill"), ("tokens", "ms", "tokens_per_s", "of_gemm_rate"))
        if "loads" in found.get("tower", {}):
            rows = tower_rows(found["tower"])
            table(f"{name}, tower: {found['tower']['check']}", rows, list(rows[0]))
        table(f"{name}, transformers", _rows(found, "peer"), ("batch", "prompts_s", "step_ms", "tokens_per_s"))
    right = all(
        found.get("check", {"verdict": "right"}).get("verdict") == "right" for found in result["shapes"].values()
    )
    parts = [part for found in result["shapes"].values() for part in found.values()]
    failed = any(isinstance(part, dict) and "failed" in part for part in parts)
    return 1 if failed or not right else 0


def _rows(found: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """None of a part that was left out or failed."""
    rows = found.get(part)
    return rows if isinstance(rows, list) else []


if __name__ == "__main__":
    raise SystemExit(main())
