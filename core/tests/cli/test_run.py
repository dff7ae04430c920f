"""``mstar run``: one request, text and files in and out, from the terminal."""

from __future__ import annotations

import io
import json
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar.spec.errors import RequestError
from mstar.testing.miniatures import MINIATURES, Example

Run = Callable[..., tuple[int, str, str]]
EXPECTED = {mini.key: mini.expected for mini in MINIATURES}

TOYS = '''
from dataclasses import replace
import mstar
from mstar.spec.processor import ReasoningDelta, Renderer, TextDelta
from mstar.spec.request import Done
from mstar.spec.tasks import ChatTask, GenerateTask, Image, Text
from mstar.testing.miniatures import MINIATURES
from mstar.testing.miniatures.common import MiniProcessor, MiniRenderer, text_of
from mstar.testing.miniatures.text import Chat

ended = []

class Chatty(MiniProcessor):
    """Prints what it does."""

    def __init__(self, context):
        print("loading")
        super().__init__(context)

    def prepare(self, task, request_id):
        print("preparing")
        return super().prepare(task, request_id)

    def renderer(self, task, prepared):
        return MiniRenderer({"text": "text"}, task)

class ChattyModel(Chat):
    def build(self, node):
        print("building")
        return super().build(node)

class Muses(Renderer):
    """Thinks for three tokens, then speaks."""

    count = 0

    def feed(self, event):
        for token in event.data:
            self.count += 1
            yield (ReasoningDelta if self.count <= 3 else TextDelta)("x", (int(token),))

class Musing(MiniProcessor):
    def renderer(self, task, prepared):
        return Muses()

class Sizes(MiniProcessor):
    """Says what it was sent: the roles, the texts and the pictures' sizes."""

    def prepare(self, task, request_id):
        if isinstance(task, GenerateTask):
            words = [task.text, *map(str, task.parts)]
        else:
            words = [f"{m.role[0]}{len(m.content)}" for m in task.messages]
            words += [f"{p.pixels.shape[0]}x{p.pixels.shape[1]}" for m in task.messages for p in m.content
                if isinstance(p, Image)]
            words.append(text_of(task))
        return super().prepare(GenerateTask(text=" ".join(words), knobs=task.knobs), request_id)

@mstar.hookimpl
def mstar_models():
    specs = {mini.key: mini.spec for mini in MINIATURES}
    return [
        *(spec for spec in specs.values() if spec.key != "mini_planner"),
        replace(
            specs["mini_planner"], processor=__name__ + ":Sizes", abilities=("chat",), inputs=("text", "image")
        ),
        replace(specs["mini_chat"], key="speaker", abilities=("speech",)),
        replace(specs["mini_chat"], key="musing", processor=__name__ + ":Musing"),
        replace(specs["mini_chat"], key="chatty", processor=__name__ + ":Chatty", model=__name__ + ":ChattyModel"),
    ]

@mstar.hookimpl
def mstar_request_ended(request, event):
    ended.append(event)
'''


@pytest.fixture
def toys(mstar: Run) -> Run:
    return lambda *words, **more: mstar(*words, extra="cli_toys_run", code=TOYS, **more)


def ended() -> list[Any]:
    found: list[Any] = sys.modules["cli_toys_run"].ended
    return found


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_folder_that_cannot_be_written_is_found_before_the_model_is_loaded(
    toys: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    monkeypatch.setattr("mstar.runtime.local.load", lambda *words, **named: pytest.fail("it was loaded"))
    (tmp_path / "file").touch()
    status, _, err = toys("run", "mini_tts", "Hello", "--out", str(tmp_path / "file" / below))
    assert (status, f"{tmp_path / 'file'} is no folder" in err) == (2, True)
    monkeypatch.setattr("os.access", lambda folder, mode: False)
    status, _, err = toys("run", "mini_tts", "Hello", "--out", str(tmp_path / below))
    assert (status, f"{tmp_path} cannot be written to" in err) == (2, True)


def test_text_in_text_out(toys: Run) -> None:
    status, out, err = toys("run", "mini_chat", "Hello", "--set", "max_tokens=5", "--set", "temperature=0")
    expected = EXPECTED["mini_chat"](Example("Hello", {"max_tokens": 5}))["text"]
    assert (status, out) == (0, expected + "\n")
    assert err.startswith("5 tokens in ")
    assert err.endswith("finish reason: length\n")


@pytest.mark.parametrize("words", [("--no-stream",), ("--json",)])
def test_the_whole_text_at_the_end(toys: Run, words: tuple[str, ...]) -> None:
    status, out, _ = toys("run", "mini_chat", "Hello", "--set", "max_tokens=5", *words)
    text = EXPECTED["mini_chat"](Example("Hello", {"max_tokens": 5}))["text"]
    assert status == 0
    if words == ("--json",):
        facts = json.loads(out)
        assert (facts["text"], facts["finish_reason"], facts["files"]) == (text, "length", [])
        assert facts["usage"]["output"]["tokens"] == 5
    else:
        assert out == text + "\n"


@pytest.mark.parametrize("words", [(), ("--no-stream",), ("--json",)])
def test_what_a_models_code_prints_is_no_answer(toys: Run, words: tuple[str, ...]) -> None:
    status, out, err = toys("run", "chatty", "Hello", "--set", "max_tokens=5", *words)
    text = EXPECTED["mini_chat"](Example("Hello", {"max_tokens": 5}))["text"]
    assert status == 0
    assert (json.loads(out)["text"] if words == ("--json",) else out.removesuffix("\n")) == text
    assert {"loading", "building", "preparing"} <= set(err.splitlines())


@pytest.mark.parametrize(("tokens", "out"), [(3, ""), (4, "x\n")])
def test_thoughts_that_leave_no_room_for_an_answer_are_told(toys: Run, tokens: int, out: str) -> None:
    status, said, err = toys("run", "musing", "Hello", "--set", f"max_tokens={tokens}")
    assert (status, said) == (0, out)
    assert ("still thinking" in err and "--set max_tokens=N" in err) == (tokens == 3)


def test_a_timeline_of_the_request(toys: Run, tmp_path: Path) -> None:
    file, config = tmp_path / "trace.json", tmp_path / "d.yaml"
    config.write_text(f"engine: {{threads: 1, trace: {tmp_path / 'other.json'}}}")
    words = ("run", "mini_chat", "Hello", "--set", "max_tokens=5", "--config", str(config), "--trace", str(file))
    assert toys(*words)[0] == 0
    assert not (tmp_path / "other.json").exists()  # options win over the file
    events = json.loads(file.read_text())
    (end,) = [e for e in events if e["ph"] == "e" and e["name"] == "request"]
    assert end["args"]["reason"] == "length"
    assert end["args"]["usage"]["output"]["tokens"] == 5


def test_text_from_standard_input(toys: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    out = toys("run", "mini_chat", "-", "--set", "max_tokens=5")[1]
    assert out == EXPECTED["mini_chat"](Example("Hello", {"max_tokens": 5}))["text"] + "\n"


def test_bytes_that_are_no_text_on_standard_input(toys: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hell\xff"), encoding="utf-8"))
    assert toys("run", "mini_chat", "-") == (2, "", "standard input is no utf-8 text: byte 4: invalid start byte\n")


def test_audio_goes_to_a_file_and_overwrites_none(toys: Run, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    words = ("run", "mini_omni", "Hello", "--set", "max_tokens=4", "--out", str(folder), "--task", "generate")
    status, _, err = toys(*words)
    assert status == 0
    assert f"wrote {folder / 'mini_omni-audio.wav'}" in err
    with wave.open(str(folder / "mini_omni-audio.wav")) as file:
        frames = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    expected = EXPECTED["mini_omni"](Example("Hello", {"max_tokens": 4}))["audio"]
    assert len(frames) == len(expected)
    facts = json.loads(toys(*words, "--json")[1])
    assert [file["path"] for file in facts["files"]] == [str(folder / "mini_omni-audio-2.wav")]


def test_images_and_arrays_go_to_files(toys: Run, tmp_path: Path) -> None:
    from PIL import Image

    folder = str(tmp_path)
    facts = json.loads(toys("run", "mini_denoise", "Hi", "--out", folder, "--json")[1])
    (image,) = facts["files"]
    assert image["media_type"] == "image/png"
    with Image.open(image["path"]) as picture:
        assert picture.mode == "RGB"
    facts = json.loads(
        toys("run", "mini_rollout", "--set", "windows=3", "--set", "drive=2.0", "--out", folder, "--json")[1]
    )
    arrays = [np.load(file["path"]) for file in facts["files"]]
    expected = EXPECTED["mini_rollout"](Example(knobs={"windows": 3, "drive": 2.0}))["state"]
    np.testing.assert_allclose(np.concatenate([a.reshape(-1, 3) for a in arrays]), expected, atol=1e-5)


def test_files_and_a_system_message_go_in(toys: Run, tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    status, out, _ = toys("run", "mini_planner", "Hi", "--file", str(tmp_path / "a.png"), "--system", "S")
    assert status == 0
    assert out == EXPECTED["mini_planner"](Example("s1 u2 2x3 SHi"))["text"] + "\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("mini_chta", "Hi"), "did you mean 'mini_chat'"),
        (("mini_chat", "Hi", "--set", "max_tokns=3"), "unknown parameter 'max_tokns'; did you mean 'max_tokens'?"),
        (("mini_chat", "Hi", "--set", "max_tokens=0"), "the nearest valid value is 1"),
        (("mini_chat", "Hi", "--set", "max_tokens"), "write it as KNOB=VALUE"),
        (("mini_chat", "Hi", "--want", "audio"), "the model 'mini_chat' does not make 'audio'; known: text"),
        (("mini_omni", "Hi", "--want", "text,adio"), "does not make 'adio'; did you mean 'audio'?"),
        (("mini_chat",), "nothing to say"),
        (("mini_chat", "Hi", "--file", "no-such-file.png"), "--file no-such-file.png: No such file"),
        (("mini_chat", "Hi", "--task", "chta"), "did you mean 'chat'"),
        (("mini_rollout", "Hi", "--task", "chat"), "has no task 'chat'; it can do: generate"),
        (("mini_rollout", "--system", "S"), "--system belongs to a chat"),
        (("speaker", "Hi"), "use `mstar serve speaker`"),
        (("mini_chat", "Hi", "--config", "nowhere.yaml"), "nowhere.yaml cannot be read"),
        (("mini_chat", "x" * 300), "shorten it"),
    ],
)
def test_faults(toys: Run, words: tuple[str, ...], sentence: str) -> None:
    status, out, err = toys("run", *words)
    assert (status, out) == (2, "")
    assert sentence in err


@pytest.mark.parametrize(
    ("words", "summary"),
    [
        (("mini_chat", "Hi", "--set", "max_tokens=1"), "1 token in "),
        (("mini_omni", "Hello", "--set", "max_tokens=4", "--task", "generate"), "4 tokens, 0.00 s of audio in "),
        (("mini_denoise", "Hi"), "1 image in "),
        (("mini_rollout", "--set", "windows=3"), "3 state arrays in "),
    ],
)
def test_the_summary_names_its_units(toys: Run, tmp_path: Path, words: tuple[str, ...], summary: str) -> None:
    err = toys("run", *words, "--out", str(tmp_path))[2]
    assert err.splitlines()[-1].startswith(summary), err


BROKEN = """
from dataclasses import replace
import mstar
from mstar.testing.miniatures import MINIATURES
from mstar.testing.miniatures.common import MiniProcessor
from mstar.testing.miniatures.text import Chat

class Processor(MiniProcessor):
    def __init__(self, context):
        raise OSError("no vocabulary")

class Model(Chat):
    def build(self, node):
        return 1 / 0

@mstar.hookimpl
def mstar_models():
    mini = next(m.spec for m in MINIATURES if m.model.endswith("text:Chat"))
    return [
        replace(mini, key="bad-processor", processor=__name__ + ":Processor"),
        replace(mini, key="bad-model", model=__name__ + ":Model"),
    ]
"""


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (
            "bad-processor",
            "the processor of 'bad-processor' could not be loaded: OSError: no vocabulary (at {file}:10)",
        ),
        (
            "bad-model",
            "the worker of 'bad-model' could not be built: ZeroDivisionError: division by zero (at {file}:14)",
        ),
    ],
)
def test_a_familys_own_fault_leads_with_a_sentence(
    mstar: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str, sentence: str
) -> None:
    status, _, err = mstar("run", key, "Hi", extra="cli_toys_fragile", code=BROKEN)
    assert status == 1
    assert err.startswith(sentence.format(file=tmp_path / "cli_toys_fragile.py") + ". Mend it there")
    assert "Traceback" not in err + caplog.text
    with caplog.at_level("DEBUG"):
        mstar("run", key, "Hi", extra="cli_toys_fragile", MSTAR_LOG_LEVEL="debug")
    assert "Traceback" in caplog.text


def test_faults_that_the_worker_finds_have_their_line(toys: Run, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("placement:\n  lmm: [0]\nresources:\n  kv: {tokns: 4}\n")
    status, _, err = toys("run", "mini_chat", "Hi", "--config", str(file))
    assert status == 1
    assert sorted(err.splitlines()) == [
        f"{file}:2: placement.lmm: unknown node; did you mean 'lm'?",
        f"{file}:4: resources.kv.tokns: unknown key; did you mean 'tokens'?",
    ]


def test_a_faulty_file_is_a_fault_found(toys: Run, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("max_sesions: 1\nmax_concurrent_requests: 0\n")
    status, _, err = toys("run", "mini_chat", "Hi", "--config", str(file))
    assert status == 1
    one, two = err.splitlines()
    assert (one.startswith(f"{file}:"), two.startswith(f"{file}:")) == (True, True)


def test_a_file_of_a_kind_that_the_model_does_not_take_is_refused_before_it_is_loaded(
    toys: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mstar.runtime.local.load", None)
    file = tmp_path / "a.wav"
    with wave.open(str(file), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(800))
    status, _, err = toys("run", "mini_planner", "Hi", "--file", str(file))
    assert (status, err) == (2, f"'--file {file}': the file is audio, which the model does not take; it takes image\n")


def test_what_a_processor_says_of_a_part_is_said_of_its_file(
    toys: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    def refuse(self: Any, task: Any, request_id: str) -> Any:
        raise RequestError("'parts[1]': too small", param="parts[1]")

    monkeypatch.setattr("mstar.testing.miniatures.processors.DenoiseProcessor.prepare", refuse)
    files = [tmp_path / name for name in ("a.png", "b.png")]
    for file in files:
        Image.new("RGB", (16, 16)).save(file)
    status, _, err = toys("run", "mini_denoise", "Hi", "--file", str(files[0]), "--file", str(files[1]))
    assert (status, err.splitlines()[-1]) == (2, f"'--file {files[1]}': too small")


def test_a_damaged_file_is_named(toys: Run, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"\x89PNG\r\n and no more")
    status, _, err = toys("run", "mini_chat", "Hi", "--file", str(file))
    assert (status, "a.png" in err) == (2, True)


def test_an_interrupt_cancels_the_request(toys: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(io.StringIO):
        """Ctrl-C when the first words appear."""

        interrupted = False

        def write(self, text: str) -> int:
            if not self.interrupted:
                self.interrupted = True
                raise KeyboardInterrupt
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Impatient())
    assert toys("run", "mini_chat", "Hello", "--set", "max_tokens=200", "--set", "temperature=0")[0] == 130
    (event,) = ended()
    assert event.reason == "cancelled"
