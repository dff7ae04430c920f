"""The talker against the reference, through the processor, the loader and a worker: prompts, logits, frames."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.plugins import load_plugins
from mstar.processing.tokenizer import TextTokenizer
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.spec.knobs import validate_knobs
from mstar.spec.request import Done
from mstar.spec.tasks import Audio, SpeechTask, VoiceSample
from mstar.testing import Driver, Example
from mstar_tts.qwen3_tts import tiny

sys.path.insert(0, str(Path(__file__).parent))
import qwen_tts_reference

TEXT = "The capital of France is Paris, 你好."
GROUPS = 16
N = 12


@dataclass(frozen=True)
class Case:
    """One request, in M*'s words. *frames*: of a clip whose codes the prompt has; *voice*: one of its own."""

    key: str
    text: str = TEXT
    language: str | None = None
    speaker: str | None = None
    instruct: str = ""
    whole: bool | None = None
    said: str = ""
    frames: int = 0
    voice: bool = False
    penalty: float = 1.05
    extra: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "speaker": Case("qwen3_tts_1p7b", speaker="ryan"),
    "streamed": Case("qwen3_tts_1p7b", speaker="Ryan", language="en", whole=False, penalty=1.3),
    "dialect": Case("qwen3_tts_1p7b", speaker="dylan", language="Chinese", text="你好,世界。"),
    "dialect, streamed": Case("qwen3_tts_1p7b", speaker="dylan", whole=False),
    "told how": Case("qwen3_tts_1p7b", speaker="vivian", language="german", instruct="Very happy."),
    "one letter": Case("qwen3_tts_1p7b", speaker="vivian", text="a", whole=False),
    "small": Case("qwen3_tts", speaker="vivian", language="english"),
    "small, told how": Case("qwen3_tts", speaker="vivian", instruct="Very happy."),
    "designed": Case("qwen3_tts_voicedesign", instruct="An old man, tired.", language="german"),
    "designed, streamed": Case("qwen3_tts_voicedesign", instruct="A child", whole=False),
    "timbre": Case("qwen3_tts_base", voice=True),
    "timbre, whole": Case("qwen3_tts_base", voice=True, whole=True, language="en"),
    "clone, long text": Case("qwen3_tts_base", voice=True, said="Hello there", frames=7),
    "clone, long clip": Case("qwen3_tts_base", voice=True, said="Hello there", frames=90),
    "clone, whole": Case("qwen3_tts_base", voice=True, said="Hello there", frames=9, whole=True),
}


def _heard(case: Case) -> tuple[Tensor, Tensor]:
    """A voice and frames."""
    random = torch.Generator().manual_seed(case.frames)
    codes = torch.randint(tiny.CODES, (case.frames, GROUPS), generator=random)
    return torch.randn(32, generator=random), codes


def _reference_case(case: Case, tokenizer: TextTokenizer) -> dict[str, Any]:
    """The same in the reference's words."""

    def ids(text: str) -> Tensor:
        return torch.tensor([tokenizer.encode(text, special=False)])

    ending = "<|im_end|>\n"
    voice, codes = _heard(case)
    told = case.instruct if case.key != "qwen3_tts" else ""
    clones = case.key == "qwen3_tts_base"
    asked: dict[str, Any] = {
        "input_ids": [ids(f"<|im_start|>assistant\n{case.text}{ending}<|im_start|>assistant\n")],
        "instruct_ids": [ids(f"<|im_start|>user\n{told}{ending}")] if told else None,
        "languages": [{None: "auto", "en": "english"}.get(case.language, case.language)],
        "speakers": None if case.speaker is None else [case.speaker],
        "non_streaming_mode": (not clones) if case.whole is None else case.whole,
        "max_new_tokens": N,
        "do_sample": False,
        "subtalker_dosample": False,
        "repetition_penalty": case.penalty,
    }
    if clones:
        asked["voice_clone_prompt"] = {
            "ref_code": [codes if case.frames else None],
            "ref_spk_embedding": [voice],
            "x_vector_only_mode": [not case.frames],
            "icl_mode": [bool(case.frames)],
        }
        asked["ref_ids"] = [ids(f"<|im_start|>assistant\n{case.said}{ending}") if case.said else None]
    return asked


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Key → checkpoint with the reference's own random weights, beside what it computed from them."""
    qwen_tts_reference.folder()
    found: dict[str, Path] = {}
    for key in dict.fromkeys(case.key for case in CASES.values()):
        folder = found[key] = tmp_path_factory.mktemp(key)
        getattr(tiny, f"write_{key}")(folder)
        tokenizer = TextTokenizer(folder)
        torch.save(
            [_reference_case(case, tokenizer) for case in CASES.values() if case.key == key], folder / "cases.pt"
        )
    qwen_tts_reference.run(Path(__file__).with_name("qwen_talker_oracle.py"), *found.values())
    return found


class Watched:
    """A worker whose talker is watched."""

    def __init__(self, key: str, folder: Path):
        registry = Registry(load_plugins(Settings(extra_plugins=("mstar_tts.plugin",))))
        engine, pools = {"threads": 1, "runner": "eager"}, {"kv": {"tokens": 8192}}
        self.driver = Driver(
            key, registry, folder, device="cpu", dtype="float32", executor="inline", engine=engine, resources=pools
        )
        self.node = self.driver.worker.engine.nodes["talker"]
        self.rows: list[Tensor] = []
        self.first: list[Tensor] = []
        self.others: list[Tensor] = []
        self.frames: list[Tensor] = []
        node: Any = self.node
        node.model.register_forward_pre_hook(lambda _, given: self.rows.append(given[0].clone()))
        node.codec_head.register_forward_hook(lambda _, __, out: self.first.append(out[0].clone()))
        node.code_predictor.register_forward_hook(lambda _, __, out: self.frames.append(out[0].clone()))
        for head in node.code_predictor.lm_head:
            head.register_forward_hook(lambda _, __, out: self.others.append(out[0].clone()))

    def run(self, case: Case) -> Done:
        task = self.task(case)
        prepared = self.driver.processor.prepare(task, "r")
        if case.voice:
            voice, codes = _heard(case)
            clips = self.driver.worker._model.clips  # type: ignore[attr-defined]
            clips.put("voice", prepared.request.params["clip"], voice.numpy())
            clips.put("frames", prepared.request.params["clip"], codes.numpy())
        self.driver.submit_prepared(prepared, Example())
        self.driver.run()
        end = self.driver.ended["r"]
        assert isinstance(end, Done), end
        return end

    def task(self, case: Case) -> SpeechTask:
        knobs = {
            "language": case.language,
            "non_streaming_mode": case.whole,
            "max_new_tokens": N,
            "do_sample": False,
            "subtalker_dosample": False,
            "repetition_penalty": case.penalty,
        }
        sample = None
        if case.voice:
            samples = np.zeros(max(12_000, 1920 * case.frames - 7), np.float32)
            sample = VoiceSample(Audio(samples, 24_000), case.said)
            knobs["x_vector_only_mode"] = not case.frames
        return SpeechTask(
            text=case.text,
            voice=case.speaker,
            instructions=case.instruct,
            sample=sample,
            knobs=validate_knobs(self.driver.spec.knobs, knobs),
        )


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_reference(name: str, folders: dict[str, Path]) -> None:
    case = CASES[name]
    folder = folders[case.key]
    number = [each for each in CASES if CASES[each].key == case.key].index(name)
    want = torch.load(folder / "outputs.pt")[number]
    got = Watched(case.key, folder)
    end = got.run(case)
    heard = len(want["codes"])
    torch.testing.assert_close(got.rows[0], want["rows"], rtol=1e-5, atol=1e-5)
    steps = min(len(got.first), len(want["first"]))
    assert steps >= heard
    torch.testing.assert_close(torch.stack(got.first[:steps]), want["first"][:steps], rtol=1e-4, atol=1e-4)
    predicted = torch.stack(got.others).view(len(got.first), GROUPS - 1, -1)
    torch.testing.assert_close(predicted[:heard], want["others"][:heard], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.stack(got.frames)[:heard], want["codes"][:, 1:])
    assert end.reason == ("length" if heard == N - 1 else "stop")
    assert got.driver.result("r")["audio"].shape == (heard * 1920,)
