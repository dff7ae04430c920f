"""The playground's views of sound, pictures and videos, in a browser against the real server."""

from __future__ import annotations

import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from .browsing import Browser, browsing, needs_chromium
from .serving import Server, serving
from .test_playground import answer, code, run, run_python

pytestmark = [needs_chromium, pytest.mark.timeout(300)]

MODELS = ("mini_tts", "mini_omni", "mini_ctc", "mini_denoise", "mini_video")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*MODELS, extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    yield chromium
    assert chromium.complaints() == []


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """Two seconds of beeps."""
    path = tmp_path / "clip.wav"
    samples = (np.sin(np.arange(32000) / 10) * 8000 * (np.arange(32000) // 4000 % 2)).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples.tobytes())
    return path


def finish(browser: Browser) -> str:
    """What the view says once its request has ended."""
    browser.wait(lambda: not browser.all(".send.stop"), "the request's end")
    return browser.text(".composer .status")


def duration(browser: Browser, selector: str) -> float:
    """Of a sound or video, once the browser has read it."""
    element = browser.one(selector)
    return float(browser.wait(lambda: browser.script("return arguments[0].duration", element), f"length of {selector}"))


def run_shown(browser: Browser, folder: Path) -> None:
    """Run both forms of the shown code in *folder*, where its files are."""
    run(["bash", "-ec", code(browser, "curl")], folder)
    run_python(code(browser, "Python"), folder)


def test_a_text_is_spoken(browser: Browser, server: Server, tmp_path: Path) -> None:
    browser.open(f"{server.url}/#/mini_tts/speech")
    browser.one(".composer textarea").clear()
    browser.one(".composer textarea").send_keys("abc")
    browser.one(".send").click()
    said = finish(browser)
    assert said.endswith("s of sound")
    assert duration(browser, ".output audio") == pytest.approx(float(said.split()[0]), abs=0.01)
    run_shown(browser, tmp_path)
    size = (tmp_path / "speech.pcm").stat().st_size
    assert size / 2 / 8000 == pytest.approx(duration(browser, ".output audio"), abs=0.01)


def test_a_clip_becomes_a_voice(browser: Browser, server: Server, clip: Path) -> None:
    browser.open(f"{server.url}/#/mini_tts/speech")
    browser.one(".settings details > summary").click()
    browser.one("[data-field=name] input").send_keys("beeper")
    browser.hidden("[data-field=audio_sample] input[type=file]").send_keys(str(clip))
    browser.one("[data-field=audio_sample] .chip")
    browser.called(".side button", "Add the voice").click()
    chosen = browser.one("[data-field=voice] input")
    name = browser.wait(lambda: chosen.get_attribute("value"))
    assert name in [option.get_attribute("value") for option in browser.all("datalist option")]
    browser.one(".send").click()
    assert finish(browser).endswith("s of sound")
    voices = server.http.get("/v1/audio/voices").json()["data"]
    assert [voice["id"] for voice in voices if voice["name"] == "beeper"] == [name]


def test_a_chat_answers_with_sound(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/mini_omni/chat")
    browser.one(".choice input").click()
    browser.one(".composer textarea").send_keys("abc\n")
    assert duration(browser, ".turn[data-role=assistant] audio") > 0
    assert browser.text(".turn[data-role=assistant] .markdown") == answer("abc")


def test_a_clip_is_written_down(browser: Browser, server: Server, clip: Path) -> None:
    browser.open(f"{server.url}/#/mini_ctc/transcription")
    browser.hidden("[data-field=file] input[type=file]").send_keys(str(clip))
    browser.one("[data-field=file] .chip")
    with clip.open("rb") as file:
        form = {"model": "mini_ctc", "response_format": "verbose_json"}
        told = server.http.post("/v1/audio/transcriptions", data=form, files={"file": file}).json()
    for format_ in ("json", "verbose_json"):
        browser.script("arguments[0].value = arguments[1]", browser.one("[data-field=response_format] select"), format_)
        browser.one(".send").click()
        finish(browser)
        browser.wait(
            lambda: [one.get_attribute("textContent") for one in browser.all(".output .text")] == [told["text"]],
            "the transcript",
        )
    assert len(browser.all(".segments li")) == len(told["segments"])
    run_shown(browser, clip.parent)


def test_the_microphone_is_written_down(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/mini_ctc/transcription")
    browser.one(".record").click()
    browser.wait(lambda: "1." in browser.one(".record").text, "a second of sound")  # it beeps once a second
    browser.one(".record").click()
    assert browser.text(".chip .chip-name") == "recording.wav"
    assert duration(browser, ".chip audio") > 0.9
    browser.one(".send").click()
    finish(browser)
    assert browser.text(".output .text")


def test_pictures_are_made_and_changed(browser: Browser, server: Server, tmp_path: Path) -> None:
    browser.open(f"{server.url}/#/mini_denoise/images")
    browser.one(".composer textarea").send_keys("abc")
    browser.one("[data-field=size] input").send_keys("16x8")
    browser.one("[data-field=n] input").send_keys("2")
    browser.one(".send").click()
    assert finish(browser).startswith("2 in")
    for image in browser.all("figure img"):
        assert browser.wait(lambda image=image: browser.script("return arguments[0].naturalWidth", image)) == 16
    run_shown(browser, tmp_path)
    with Image.open(tmp_path / "image.png") as made:
        assert made.size == (16, 8)
    browser.called("figure button", "Change this").click()
    browser.one("[data-field=image] .chip")
    browser.one("[data-field=n] input").clear()
    browser.one(".send").click()
    assert finish(browser).startswith("1 in")
    Image.new("RGB", (16, 8), "red").save(tmp_path / "picture.png")
    run_shown(browser, tmp_path)
    assert "image[]=@picture.png" in code(browser, "curl")


def test_a_size_that_the_model_does_not_make_is_said_at_its_field(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/mini_denoise/images")
    browser.one(".composer textarea").send_keys("abc")
    browser.one("[data-field=size] input").send_keys("15x8")
    browser.one(".send").click()
    assert "nearest" in browser.text("[data-field=size] .error")
    assert [line for line in browser.complaints() if "400 (Bad Request)" not in line] == []


def test_a_video_is_a_job_that_outlives_the_page(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/mini_video/videos")
    browser.one(".composer textarea").send_keys("abc")
    browser.one("[data-field=size] input").send_keys("64x32")
    browser.one(".send").click()
    assert finish(browser) == "completed"
    assert duration(browser, ".job video") > 0
    job = browser.one(".job").get_attribute("data-job")
    browser.open(f"{server.url}/#/mini_video/videos")
    assert duration(browser, f"[data-job={job}] video") > 0
    browser.one(f"[data-job={job}] .buttons button").click()
    browser.wait(lambda: not browser.all(f"[data-job={job}]"), "the job going")
    assert server.http.get(f"/v1/videos/{job}").status_code == 404
    assert [line for line in browser.complaints() if "404" not in line] == []
