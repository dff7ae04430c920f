"""``/v1/realtime`` with real models: OpenAI's client talks to it, live and by turns."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest

from mstar.testing.miniatures.catalog import continue_sum, spoken
from mstar.testing.miniatures.common import decode, encode

from .serving import Server, serving

# OpenAI's client opens its socket in a way that its library would like to see changed
pytestmark = pytest.mark.filterwarnings("ignore:connect\\(\\) must be used:DeprecationWarning")

TRANSCRIPT = "conversation.item.input_audio_transcription"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    keys = ("mini_ctc", "mini_duplex", "mini_chat")
    with serving(*keys, extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def pcm(samples: np.ndarray) -> str:
    return base64.b64encode(np.rint(samples * 32768).astype("<i2").tobytes()).decode()


def idle(server: Server, key: str) -> bool:
    return not any(pool["used"] for pool in server.pools()[key].values())


def test_turns_are_written_down(client: openai.OpenAI, server: Server) -> None:
    with client.realtime.connect(model="mini_ctc") as talk:
        talk.session.update(session={"type": "transcription", "audio": {"input": {"turn_detection": None}}})
        for text in ("hello there", "goodbye"):
            samples = spoken(text, 24_000)
            for start in range(0, len(samples), 1000):
                talk.input_audio_buffer.append(audio=pcm(samples[start : start + 1000]))
            talk.input_audio_buffer.commit()
            for event in talk:
                assert event.type not in ("error", f"{TRANSCRIPT}.failed"), event
                if event.type == f"{TRANSCRIPT}.completed":
                    assert event.transcript == text
                    break
    assert idle(server, "mini_ctc")


def test_a_model_that_hears_live_answers_while_it_hears(client: openai.OpenAI, server: Server) -> None:
    """F1"""
    samples = np.full(8, 1 / 32, np.float32)
    with client.realtime.connect(model="mini_duplex") as talk:
        talk.session.update(session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
        talk.input_audio_buffer.append(audio=pcm(samples))
        heard, said, kinds = b"", "", []
        for event in talk:
            assert event.type != "error", event
            kinds.append(event.type)
            if event.type == "response.output_audio_transcript.delta":
                said += event.delta
                if len(said) == 2 and "input_audio_buffer.committed" not in kinds:
                    talk.input_audio_buffer.commit()  # it has answered what it has heard
            elif event.type == "response.output_audio.delta":
                heard += base64.b64decode(event.delta)
            elif event.type == "response.done":
                assert event.response.status == "completed", event
                break
    assert said == decode([0, 0])
    assert len(heard) == pytest.approx(2 * 8 * 3, abs=2)  # 8 samples at 8 kHz, as 24 kHz
    assert idle(server, "mini_duplex")


def test_a_chat_by_text(client: openai.OpenAI) -> None:
    with client.realtime.connect(model="mini_chat") as talk:
        talk.conversation.item.create(
            item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "abc"}]}
        )
        talk.response.create(response={"max_output_tokens": 5})
        said = ""
        for event in talk:
            assert event.type != "error", event
            said += event.delta if event.type == "response.output_text.delta" else ""
            if event.type == "response.done":
                break
    assert said == decode(continue_sum(encode("abc"), 5))


def test_the_example_of_the_documentation(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parent.parent / "docs/http/realtime.md"
    (source,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    samples = spoken("hello there", 24_000)
    (tmp_path / "talk.pcm").write_bytes(base64.b64decode(pcm(samples)))
    changed = source.replace("http://127.0.0.1:8000", server.url).replace("talk.pcm", str(tmp_path / "talk.pcm"))
    exec(compile(changed, str(page), "exec"), {})
    assert capsys.readouterr().out == "hello there\n"
