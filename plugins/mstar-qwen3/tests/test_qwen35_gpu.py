"""The language model on a GPU: near float32 on the CPU, in captured steps, with and without look-ahead."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3_5ForCausalLM

from mstar.spec.request import EngineRequest, SamplingParams
from mstar.testing.drive import Driver
from mstar_qwen3.tiny import write_text

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None, reason="there is no GPU"
)

KEY = "qwen3_5_4b"
LENGTHS = (1, 17, 63, 64, 65, 200, 700)
NEW = 24


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads and states of the published sizes, which the kernels are made for."""
    folder = tmp_path_factory.mktemp("qwen3_5-wide")
    write_text(folder, head_dim=256, state_dim=128)
    return folder


@pytest.fixture(scope="module")
def logits(wide_folder: Path) -> Any:
    """transformers' of whole sequences: exact, and as bfloat16 has them on the GPU."""
    load = Qwen3_5ForCausalLM.from_pretrained
    exact = load(wide_folder, dtype=torch.float32).to("cuda").eval()
    rounded = load(wide_folder, dtype=torch.bfloat16).to("cuda").eval()

    @torch.inference_mode()
    def both(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.tensor([ids], device="cuda")
        return exact(input_ids=tokens).logits[0].float(), rounded(input_ids=tokens).logits[0].float()

    return both


def driver(qwen3: Any, folder: Path, state_dtype: str = "float32", **engine: Any) -> Driver:
    return Driver(
        KEY, qwen3, folder, device="cuda", dtype="bfloat16", executor="inline", max_concurrent_requests=16,
        engine=engine, resources={"kv": {"tokens": 32768}, "gdn_state": {"state_dtype": state_dtype}},
        scheduler={"max_step_tokens": 256},
    )  # fmt: skip


def answers(worker: Driver, turn: str) -> dict[int, tuple[list[int], list[int]]]:
    """Length → prompt and greedy answer, of requests that come at once."""
    draw = np.random.default_rng(3)
    prompts = {length: draw.integers(0, 300, length) for length in LENGTHS}
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    for length, prompt in prompts.items():
        request = EngineRequest(id=f"{turn}{length}", inputs={"prompt": prompt}, sampling={"sampler": sampling})
        worker.worker.submit(request)
    worker.run()
    worker.assert_empty()
    return {n: (prompts[n].tolist(), worker.result(f"{turn}{n}")["text"]) for n in LENGTHS}


@pytest.mark.parametrize("runner", ["graphs", "eager"])
@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_answers_are_within_bfloat16s_rounding(
    qwen3: Any, wide_folder: Path, logits: Any, runner: str, lookahead: bool, state_dtype: str
) -> None:
    """Twice: the second time prompts go on from what the first one has left."""
    worker = driver(qwen3, wide_folder, state_dtype, runner=runner, lookahead=lookahead)
    for turn in ("a", "b"):
        for length, (prompt, answer) in answers(worker, turn).items():
            exact, rounded = (each[len(prompt) - 1 :] for each in logits([*prompt, *answer[:-1]]))
            error = float((exact - rounded).square().mean().sqrt())
            chosen = exact.gather(1, torch.tensor(answer, device="cuda")[:, None])[:, 0]
            gap = float((exact.amax(1) - chosen).max())
            assert gap < 10 * error, (turn, length, gap, error)
    if runner == "graphs":
        found: Any = worker.worker.engine.runner
        assert not found.faults
        assert {(key[0], key[1]) for key in found._lanes} >= {("llm", "forward")}
