"""Parity: what the engine says in bfloat16, against a full forward pass in float32 of another implementation.

The engine answers greedily. Then transformers reads prompt and answer in one pass in float32 with the same weights, and
every token must be the likeliest there, unless the float32 gap between the likeliest and it is within a tolerance. The
tolerance is what bfloat16 costs anyone: :data:`TOLERANCE` times the root mean square error of the logits of
transformers' own bfloat16 pass over the same tokens. A wrong cache, mask or position is off by many times that.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu.checkpoints import publish
from gpu.child import Job, failure
from gpu.deploy import known_options
from gpu.engine import GREEDY, Engine, bench_registry
from gpu.shapes import CHECKED, SHAPES
from mstar.spec.errors import SetupError

__all__ = ["TOLERANCE", "Reference", "check", "compare"]

TOLERANCE = 8.0
"""Multiples of the RMS error. The difference of two logits has √2 of one's: this is beyond five deviations of it."""
LEAST_TOLERANCE = 1e-4
ALONE = (70,)
MIXED = (1, 5, 16, 17, 40, 64, 97, 130, 200)
"""Prompt lengths. Around the page size, and longer than a step, so that prompts come in chunks beside decodes."""
STEP_TOKENS = 96
NEW_TOKENS = 40


def check(job: Job, state: dict[str, Any]) -> dict[str, Any]:
    """Every attention backend, with lookahead and graphs on and off on the small shapes; one published shape with what
    is the default. Fails as a part when a row does."""
    rows: list[dict[str, Any]] = []
    for name in (*CHECKED, *([] if job.shape in (*CHECKED, "tiny") else [job.shape])):
        small = name in CHECKED
        folder = publish(SHAPES[name], Path(job.folder) / name, job.device)
        reference = Reference(folder, job.device)
        for options in _variants(job.device, every=small):
            rows.append({"shape": name, "options": options, **_row(name, folder, job, options, reference)})
            print("  " + _line(rows[-1]), flush=True)
        reference.close()
    wrong = [row for row in rows if row["verdict"] == "wrong"]
    return {
        "rows": rows,
        "tolerance": f"{TOLERANCE} × RMS error of transformers' bfloat16 logits",
        "verdict": "wrong" if wrong else "right",
        **({"failed": "; ".join(_line(row) for row in wrong)[:2000]} if wrong else {}),
    }


def _variants(device: str, every: bool) -> Iterator[dict[str, Any]]:
    """Fields of the ``engine`` section; those that this version does not have are left out."""
    registry = bench_registry()
    backends = [*registry.attention_backends()]
    runners = ("graphs", "eager") if device.startswith("cuda") else ("eager",)
    known = (("runner", runners), ("lookahead", (True, False)))
    switches = {name: values for name, values in known if _has(name)}
    combinations = itertools.product(*switches.values()) if every else [()]
    for values, backend in itertools.product(list(combinations), backends):
        yield {"attention": backend, **dict(zip(switches, values, strict=False))}


def _has(option: str) -> bool:
    return bool(known_options(**{option: None}))


def _row(name: str, folder: Path, job: Job, options: dict[str, Any], reference: Reference) -> dict[str, Any]:
    try:
        engine = Engine(name, folder, _deployment(job.device, options))
    except SetupError as error:
        return {"verdict": "not usable", "reason": str(error)[:600]}
    except Exception as error:
        return {"verdict": "wrong", **failure(error)}
    try:
        cases = {}
        for case, lengths in (("alone", ALONE), ("mixed", MIXED)):
            cases[case] = compare(reference, _answers(engine, lengths))
        wrong = any(found["wrong"] for found in cases.values())
        return {"verdict": "wrong" if wrong else "right", "cases": cases}
    except Exception as error:
        return {"verdict": "wrong", **failure(error)}
    finally:
        engine.close()


def _deployment(device: str, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "device": device,
        "dtype": "bfloat16",
        "max_concurrent_requests": len(MIXED),
        "model_kwargs": {"max_tokens": 512},
        "resources": {"kv": {"tokens": 512 * len(MIXED)}},
        "scheduler": {"max_step_tokens": STEP_TOKENS},
        "engine": options,
    }


def _answers(engine: Engine, lengths: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of requests that come at once."""
    prompts = [engine.prompt(length) for length in lengths]
    names = [engine.submit(prompt, NEW_TOKENS, **GREEDY) for prompt in prompts]
    engine.run_to_end(names)
    found = [(prompt.tolist(), engine.tokens[name]) for prompt, name in zip(prompts, names, strict=True)]
    engine.cancel_all()
    return found


class Reference:
    """transformers on the same checkpoint: logits of whole sequences in float32, and in bfloat16 for the tolerance."""

    def __init__(self, folder: Path, device: str):
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self.device = device
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._exact, self._rounded = (
            load(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
            for dtype in (torch.float32, torch.bfloat16)
        )

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[Tensor, Tensor]:
        """float32 ``[len(answer), vocab]`` before each token of *answer*: exact, and as bfloat16 has them."""
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=self.device)
        exact, rounded = (
            model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float() for model in (self._exact, self._rounded)
        )
        return exact, rounded

    def close(self) -> None:
        del self._exact, self._rounded
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def compare(reference: Any, answers: Sequence[tuple[Any, list[int]]], length: int = NEW_TOKENS) -> dict[str, Any]:
    """Count the tokens that are not float32's choice, and those of them that rounding does not explain.

    :param reference: a :class:`Reference`, or what has its ``logits`` for another kind of prompt. :param length: of
        each answer.
    """
    tokens = other = 0
    gaps: list[Tensor] = []
    squares: list[Tensor] = []
    for prompt, answer in answers:
        if len(answer) != length:
            raise AssertionError(f"{len(answer)} tokens instead of {length}")
        exact, rounded = reference.logits(prompt, answer)
        chosen = exact.gather(1, torch.tensor(answer, device=exact.device).unsqueeze(1)).squeeze(1)
        gap = exact.amax(1) - chosen
        gaps.append(gap)
        squares.append((exact - rounded).nan_to_num(0.0).square().mean(1))  # -inf: never allowed
        tokens += len(answer)
        other += int((gap > 0).sum())
    every = torch.cat(gaps)
    noise = math.sqrt(float(torch.cat(squares).mean()))
    tolerance = max(TOLERANCE * noise, LEAST_TOLERANCE)
    return {
        "requests": len(answers),
        "tokens": tokens,
        "not_first": other,
        "wrong": int((every > tolerance).sum()),
        "largest_gap": float(every.max()),
        "rms_error_bfloat16": noise,
        "tolerance": tolerance,
    }


def _line(row: dict[str, Any]) -> str:
    text = f"{row['shape']} {row['options']}: {row['verdict']}"
    if "cases" in row:
        text += "".join(
            f"; {name}: {found['not_first']} of {found['tokens']} others, gap {found['largest_gap']:.4f} of "
            f"{found['tolerance']:.4f}"
            for name, found in row["cases"].items()
        )
    return text + (f" ({row.get('reason') or row.get('failed')})" if "cases" not in row else "")
