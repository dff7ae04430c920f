"""The offline API: plain calls from any thread, and from a running loop."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import SPEC, FakeRegistry, fake_config

from mstar.runtime.local import Local, load
from mstar.runtime.result import Result
from mstar.runtime.service import Service
from mstar.settings import Settings
from mstar.spec.errors import NotReady, RequestError, SetupError
from mstar.spec.processor import AudioDelta, FramesDelta, TextDelta
from mstar.spec.request import TokenLogprob, Usage
from mstar.spec.tasks import File, Message, Text


def local(**layer: Any) -> Local:
    return Local(Service(SPEC, fake_config(**layer), FakeRegistry()))  # type: ignore[arg-type]


@pytest.fixture
def model() -> Iterator[Local]:
    with local(model_kwargs={"window": 4}) as model:
        yield model


def runs(model: Local) -> list[str]:
    running: list[str] = model.status()["running"]
    return running


def test_chat_and_its_messages(model: Local) -> None:
    assert model.chat("hello", count=4) == "0 1 2 3 "
    assert model.chat([{"role": "user", "content": "hello"}, Message("user", (Text("again"),))], count=1) == "0 "
    assert model.chat("hello", count=50, stop=("7",)) == "0 1 2 3 4 5 6 "


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "hello"}, "lacks its 'role'"),
        ({"role": "user", "contents": "hello"}, "did you mean 'content'"),
        ({"role": "user", "content": [{"type": "text", "text": "hello"}]}, "a text or parts"),
    ],
)
def test_a_message_that_is_none_is_refused(model: Local, message: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        model.chat([message])


def test_streams_and_leaving_one_early(model: Local) -> None:
    assert list(model.chat("hello", count=5, stream=True)) == ["0 1 ", "2 3 ", "4 "]
    pieces = model.chat("hello", count=1000, stream=True)
    assert next(pieces) == "0 1 "
    assert len(runs(model)) == 1
    pieces.close()  # type: ignore[attr-defined]
    while runs(model):
        pass


def test_generate(model: Local) -> None:
    result = model.generate("hello", count=5)
    assert (result.text, result.tokens, result.finish_reason) == ("0 1 2 3 4 ", (0, 1, 2, 3, 4), "stop")
    assert result.usage.output == {"tokens": 5}
    assert [delta.tokens for delta in model.generate("x", count=3, stream=True)] == [(0, 1), (2,)]  # type: ignore[union-attr]
    (array,) = model.generate(parts=[File(b"")]).arrays
    np.testing.assert_array_equal(array, np.zeros(4))


def test_a_wrong_knob_is_named(model: Local) -> None:
    with pytest.raises(RequestError, match="did you mean 'count'"):
        model.chat("hello", coun=4)


def test_a_model_that_does_not_chat_says_what_it_has() -> None:
    spec = dataclasses.replace(SPEC, abilities=("transcription", "generate"))
    with Local(Service(spec, fake_config(), FakeRegistry())) as model:  # type: ignore[arg-type]
        for stream in (False, True):
            with pytest.raises(RequestError, match="cannot chat; it has transcription, generate"):
                model.chat("hello", stream=stream)
        assert not runs(model)


@pytest.mark.parametrize("want", [("text", "adio"), "adio"])
def test_an_output_that_the_model_does_not_make_is_refused(model: Local, want: Any) -> None:
    for ask in (model.chat, model.generate):
        with pytest.raises(RequestError, match="does not make 'adio'; known: ") as caught:
            ask("hello", want=want)
        assert (caught.value.param, caught.value.status) == ("want", 400)
    assert not runs(model)


async def test_the_twins_for_a_running_loop(model: Local) -> None:
    first, second = await asyncio.gather(model.achat("hello", count=3), model.agenerate("hello", count=4))
    assert first == "0 1 2 "
    assert isinstance(second, Result)
    assert second.text == "0 1 2 3 "
    pieces = await model.achat("hello", count=3, stream=True)
    assert not isinstance(pieces, str)
    assert [piece async for piece in pieces] == ["0 1 ", "2 "]


def test_calls_from_many_threads(model: Local) -> None:
    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(lambda n: model.chat("hello", count=n), range(12)))
    assert texts == ["".join(f"{i} " for i in range(n)) for n in range(12)]


def test_close_fails_what_runs_and_ends_the_threads() -> None:
    model = local(model_kwargs={"window": 1})
    pieces = model.chat("hello", count=1000, stream=True)
    assert next(pieces) == "0 1 "
    model.close()
    model.close()
    with pytest.raises(RequestError, match="closed"):
        next(pieces)
    with pytest.raises(RequestError, match="closed"):
        model.chat("hello")
    assert not [thread.name for thread in threading.enumerate() if "fake" in thread.name and "_" not in thread.name]


def test_a_call_that_waits_when_the_model_is_closed_is_told() -> None:
    model = local()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(model.generate, live=("in",))
        while not runs(model):
            pass
        model.close()
        with pytest.raises(NotReady, match="shutting down"):
            waiting.result()


def test_a_model_that_cannot_start_leaves_nothing() -> None:
    before = threading.active_count()
    with pytest.raises(SetupError, match="no room"):
        local(model_kwargs={"setup_error": "no room"})
    assert threading.active_count() <= before


def test_a_long_start_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("mstar.runtime.local.TELL_S", 0.01)
    caplog.set_level("INFO", "mstar.runtime.local")

    class Slow(Service):
        async def start(self) -> None:
            async with asyncio.timeout(20):
                while not any(f"not ready yet ({SPEC.key}: " in message for message in caplog.messages):
                    await asyncio.sleep(0.005)
            await super().start()

    with Local(Slow(SPEC, fake_config(), FakeRegistry())) as model:  # type: ignore[arg-type]
        assert model.chat("hello", count=2) == "0 1 "


def test_a_script_may_forget_to_close() -> None:
    script = """
        import sys
        sys.path += sys.argv[1:]
        from test_local import local
        for executor in ("inline", "processes"):
            print(local(executor=executor).chat("hello", count=2))
    """
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "cluster")]
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *folders], capture_output=True, text=True, timeout=60
    )
    assert (run.stdout, run.stderr, run.returncode) == ("0 1 \n0 1 \n", "", 0)


@pytest.mark.parametrize("executor", ["inline", "processes"])
def test_load_runs_the_real_engine(executor: str) -> None:
    settings = Settings(plugins=(), extra_plugins=("mstar.testing.miniatures",))
    with load("mini_chat", settings=settings, executor=executor, device="cpu", dtype="float32") as model:
        assert model.phase.name == "ready"
        first = model.chat("abc", max_tokens=5)
        assert first
        assert "".join(model.chat("abc", max_tokens=5, stream=True)) == first


@pytest.mark.parametrize("written", ["", "executor: processes\n"])
def test_a_file_says_how_many_processes_it_takes(tmp_path: Path, written: str) -> None:
    settings = Settings(plugins=(), extra_plugins=("mstar.testing.miniatures",))
    file = tmp_path / "deployment.yaml"
    file.write_text(f"{written}placement: {{encoder: 1, decoder: 0}}\ndevice: cpu\n")
    with load("mini_seq2seq", settings=settings, config=file) as model:
        assert [one["rank"] for one in model.status()["ranks"]] == [1]  # beside rank 0
        assert model.generate("abc").text
    file.write_text(f"{written}device: cpu\n")
    with load("mini_seq2seq", settings=settings, config=file) as model:
        assert model._service._executor.in_process == (not written)


def test_a_result_joins_what_belongs_together() -> None:
    frame = np.zeros((1, 2, 2, 3), np.uint8)
    deltas = [
        TextDelta("a", (1,), (TokenLogprob(token=1, logprob=-1.0),)),
        AudioDelta(np.zeros(3, np.float32), 16000),
        TextDelta("b", (2,)),
        AudioDelta(np.ones(2, np.float32), 16000),
        FramesDelta(frame),
        FramesDelta(frame),
        FramesDelta(frame, 8.0, "video"),
        FramesDelta(np.concatenate([frame, frame]), 8.0, "video"),
    ]
    result = Result.of(deltas, "stop", Usage())
    assert (result.text, result.tokens, len(result.logprobs)) == ("ab", (1, 2), 1)
    assert result.audio is not None
    assert result.audio.samples.tolist() == [0, 0, 0, 1, 1]
    assert [image.shape for image in result.images] == [(2, 2, 3)] * 2
    assert result.video is not None
    assert (result.video.frames.shape, result.video.fps) == ((3, 2, 2, 3), 8.0)
    assert result.arrays == []
