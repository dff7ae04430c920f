"""The language model against transformers' Qwen3.5, one prompt at a time, and against itself in batches and chunks."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from mstar.resources.base import Owner, Row
from mstar.spec.request import Done, EngineRequest, SamplingParams
from mstar.testing.drive import Driver

KEY = "qwen3_5_4b"
NEW = 12
LENGTHS = (1, 2, 15, 17, 63, 64, 65, 130)  # around pages of 16 and chunks of 64


def ids(length: int, seed: int = 0) -> list[int]:
    return [random.Random(length * 100 + seed + i).randrange(300) for i in range(length)]


def reference_of(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model with the weights in *folder*, whichever layout they have."""
    config = json.loads((folder / "config.json").read_text())
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config.get("text_config", config)))
    tensors = load_file(folder / "model.safetensors")
    known = {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}
    known = {name: tensor for name, tensor in known.items() if not name.startswith(("mtp.", "model.visual."))}
    missing, unknown = model.load_state_dict(known, strict=False)
    assert not unknown
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.to(dtype).eval()


@pytest.fixture(scope="module", params=["whole", "text"])
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return reference_of(folder)


@torch.no_grad()
def answer(reference: Any, prompt: Sequence[int], new: int = NEW) -> list[int]:
    """Greedy, without a cache."""
    found = list(prompt)
    for _ in range(new):
        found.append(int(reference(input_ids=torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(prompt) :]


def driver(qwen3: Any, folder: Path, step_tokens: int = 512, **overrides: Any) -> Driver:
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "executor": "inline",
        "engine": {"threads": 1},
        "max_concurrent_requests": 16,
        "resources": {"kv": {"tokens": 8192}},
        "scheduler": {"max_step_tokens": step_tokens},
    }
    return Driver(KEY, qwen3, folder, **{**settings, **overrides})


def submit(driver: Driver, name: str, prompt: Sequence[int], new: int = NEW, **more: Any) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    driver.worker.submit(
        EngineRequest(id=name, inputs={"prompt": np.array(prompt, np.int64)}, sampling={"sampler": sampling}, **more)
    )


def said(driver: Driver, name: str) -> list[int]:
    found: list[int] = driver.result(name)["text"]
    return found


class Logits:
    """What the node makes of the rows of each step, from now on."""

    def __init__(self, driver: Driver, monkeypatch: pytest.MonkeyPatch):
        self.steps: list[Tensor] = []
        node = driver.worker.engine.nodes["llm"]
        plain = node.logits

        def record(hidden: Tensor) -> Tensor:
            found: Tensor = plain(hidden)
            self.steps.append(found.clone())
            return found

        monkeypatch.setattr(node, "logits", record)


def state(driver: Driver, name: str) -> dict[str, list[Tensor]]:
    """A running request's, layer by layer."""
    resource = driver.worker.resources["gdn_state"]
    row = Row(Owner(name))
    view = resource.plan([row])
    layers = range(resource.spec.layers)  # type: ignore[attr-defined]
    found = {kind: [view.read(kind, layer)[0].clone() for layer in layers] for kind in ("conv", "delta")}
    resource.rollback([row])
    return found


def test_greedy_answers_alone_and_together(qwen3: Any, folder: Path, reference: Any) -> None:
    wanted = {length: answer(reference, ids(length)) for length in LENGTHS}
    assert len(set(map(tuple, wanted.values()))) == len(LENGTHS)
    assert all(len(set(tokens)) > 3 for tokens in wanted.values())
    alone = driver(qwen3, folder)
    for length in LENGTHS:
        submit(alone, f"r{length}", ids(length))
        alone.run()
        assert said(alone, f"r{length}") == wanted[length]
    together = driver(qwen3, folder, step_tokens=48)  # chunks of prompts beside decodes
    for length in LENGTHS:
        submit(together, f"r{length}", ids(length))
    together.run()
    assert {length: said(together, f"r{length}") for length in LENGTHS} == wanted
    for each in (alone, together):
        each.assert_empty()


@pytest.mark.parametrize("step_tokens", [1, 7, 16, 63, 64, 65, 100])
def test_logits_and_state_do_not_depend_on_where_a_prompt_is_cut(
    qwen3: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, step_tokens: int
) -> None:
    folder, prompt = folders["text"], ids(150)
    reference = reference_of(folder)
    with torch.no_grad():
        want = reference(input_ids=torch.tensor([prompt]), use_cache=True)
    worker = driver(qwen3, folder, step_tokens)
    logits = Logits(worker, monkeypatch)
    submit(worker, "r", prompt)
    worker.run(until=lambda: bool(worker.emitted.get("r")))
    found = state(worker, "r")
    chunks = -(-len(prompt) // step_tokens)
    assert len(logits.steps) >= chunks
    torch.testing.assert_close(logits.steps[-1], want.logits[:, -1], rtol=2e-4, atol=2e-4)
    linear = [i for i, kind in enumerate(reference.config.layer_types) if kind == "linear_attention"]
    for index, layer in enumerate(linear):
        cache = want.past_key_values
        exact = cache.get_recurrent_state(layer, state_idx=0)[0]
        torch.testing.assert_close(found["delta"][index], exact, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            found["conv"][index], cache.get_conv_state(layer, state_idx=0)[0, :, 1:], rtol=1e-4, atol=1e-4
        )
    worker.cancel("r")
    worker.run()
    worker.assert_empty()


def test_every_logit_of_an_answer(qwen3: Any, folder: Path, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent decode against one pass by chunks."""
    prompt = ids(40)
    worker = driver(qwen3, folder)
    logits = Logits(worker, monkeypatch)
    submit(worker, "r", prompt, new=90)
    worker.run()
    tokens = said(worker, "r")
    with torch.no_grad():
        want = reference(input_ids=torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    torch.testing.assert_close(torch.cat(logits.steps), want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("length", "new", "least"), [(100, 30, 112), (800, 2, 784)])
def test_a_second_turn_begins_where_the_first_one_ended(
    qwen3: Any, folder: Path, reference: Any, length: int, new: int, least: int
) -> None:
    """A state is kept where a page ends: of a short prompt the last one of its answer, of a long one its own too."""
    worker = driver(qwen3, folder)
    first = ids(length)
    submit(worker, "one", first, new)
    worker.run()
    second = [*first, *said(worker, "one"), *ids(30, seed=1)]
    submit(worker, "two", second)
    worker.run()
    end = worker.ended["two"]
    assert isinstance(end, Done)
    assert end.usage.cached >= least
    assert said(worker, "two") == answer(reference, second)
    worker.assert_empty()


def test_a_batch_in_bfloat16_is_near_transformers(qwen3: Any, folders: dict[str, Path]) -> None:
    """As near as transformers' own bfloat16 is to float32, and so with the state in bfloat16 but for its rounding."""
    folder, prompt = folders["text"], ids(90)
    exact, rounded = (reference_of(folder, dtype) for dtype in (torch.float32, torch.bfloat16))
    with torch.no_grad():
        want, theirs = (model(input_ids=torch.tensor([prompt])).logits[0, -1].float() for model in (exact, rounded))
    error = (theirs - want).square().mean().sqrt()
    for state_dtype, limit in (("float32", 2.0), ("bfloat16", 6.0)):
        resources = {"kv": {"tokens": 8192}, "gdn_state": {"state_dtype": state_dtype}}
        worker = driver(qwen3, folder, 64, dtype="bfloat16", resources=resources)
        with pytest.MonkeyPatch.context() as patch:
            logits = Logits(worker, patch)
            submit(worker, "r", prompt, new=1)
            worker.run()
        ours = (logits.steps[-1][0].float() - want).square().mean().sqrt()
        assert ours < limit * error, (state_dtype, ours, error)
        pool = worker.worker.resources["gdn_state"].pool("delta")  # type: ignore[attr-defined]
        assert pool.dtype is getattr(torch, state_dtype)
