"""The page at ``/``, used as people use it: in a browser, against the real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mstar.testing.miniatures.catalog import continue_sum
from mstar.testing.miniatures.common import decode, encode

from .browsing import Browser, browsing, needs_chromium
from .serving import Server, serving
from .thinking import THOUGHTS

pytestmark = [needs_chromium, pytest.mark.timeout(300)]

MODELS = ("mini_chat", "mini_denoise", "mini_embed", "mini_world", "mini_duplex", "thinker")
PLUGINS = ("mstar.testing.miniatures", "tests.thinking")
KEY = "a-key-for-tests"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*MODELS, extra_plugins=PLUGINS, executor="inline") as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The browser, whose pages must not have complained about anything."""
    yield chromium
    assert chromium.complaints() == []


def answer(text: str, tokens: int = 16) -> str:
    return decode(continue_sum(encode(text), tokens))


def say(browser: Browser, text: str) -> str:
    """Send *text* in the chat; the answer once it is complete."""
    before = len(browser.all(".turn[data-role=assistant]"))
    browser.one(".composer textarea").send_keys(text + "\n")
    browser.wait(lambda: len(browser.all(".turn[data-role=assistant] .foot button")) > 2 * before, "an answer's end")
    return str(browser.all(".turn[data-role=assistant] .markdown")[-1].text)


def code(browser: Browser, kind: str) -> str:
    """What the page shows as code for the last request."""
    if not browser.one("details.code").get_attribute("open"):
        browser.one("details.code > summary").click()
    browser.called(".code .tab", kind).click()
    return str(browser.one(".code pre").text)


def run(words: Sequence[str], folder: Path | None = None) -> str:
    """What a program prints that must end well."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_python(source: str, folder: Path | None = None) -> str:
    return run([sys.executable, "-c", source], folder)


def test_a_chat_is_streamed_and_its_code_gives_the_same(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/mini_chat/chat")
    browser.one("[data-field=max_tokens] input").send_keys("9")
    assert say(browser, "abc") == answer("abc", 9)
    assert "3 + 9 tokens" in browser.text(".turn[data-role=assistant] .foot")
    shown = code(browser, "curl")
    lines = run(["bash", "-ec", shown])
    pieces = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
    assert "".join(c["delta"].get("content", "") for p in pieces for c in p["choices"]) == answer("abc", 9)
    assert '"max_tokens": 9' in shown
    assert "temperature" not in shown, "what was left alone is not sent"
    assert run_python(code(browser, "Python")) == answer("abc", 9)
    assert say(browser, "d") == answer("abc" + answer("abc", 9) + "d", 9), "the second turn knows of the first"


def test_an_error_stands_at_the_field_that_it_names(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/mini_chat/chat")
    browser.one("[data-field=top_p] input").send_keys("1.5")
    browser.one(".composer textarea").send_keys("abc\n")
    assert "less than or equal to 1" in browser.text("[data-field=top_p] .error")
    field = browser.one("[data-field=top_p] input")
    assert field.get_attribute("aria-invalid") == "true"
    assert field == browser.driver.switch_to.active_element
    assert browser.one(".composer textarea").get_attribute("value") == "abc", "the question is not lost"
    field.clear()
    assert say(browser, "") == answer("abc")
    assert browser.all("[aria-invalid]") == []
    assert [line for line in browser.complaints() if "400 (Bad Request)" not in line] == []


def test_a_chat_is_stopped(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/thinker/chat")
    browser.one("[data-field=max_tokens] input").send_keys("200")  # four seconds
    browser.one(".composer textarea").send_keys("abc\n")
    browser.text(".turn[data-role=assistant] .markdown")
    browser.one(".send.stop").click()
    browser.wait(lambda: browser.one(".composer .status").text == "Stopped.", "the word that it stopped")
    assert len(browser.text(".turn[data-role=assistant] .markdown")) < 190
    assert not any(pool["used"] for pool in server.pools()["thinker"].values())


def test_thoughts_are_folded_and_tools_are_answered_by_hand(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/thinker/chat")
    browser.one(".settings details > summary").click()
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    browser.one("[data-field=tools] textarea").send_keys(json.dumps([tool]))
    assert say(browser, "abc") == answer("abc")[THOUGHTS:]
    thoughts = browser.one("details.reasoning")
    assert thoughts.get_attribute("open") is None
    thoughts.click()
    assert browser.text("details.reasoning .text") == answer("abc")[:THOUGHTS]
    assert browser.text(".tool-call strong") == "weather"
    assert json.loads(browser.text(".tool-call code")) == {"count": 16}
    browser.one(".tool-call textarea").send_keys("sunny")
    browser.called(".tool-calls button", "Send results").click()
    browser.wait(lambda: len(browser.all(".turn[data-role=assistant] .foot button")) == 4, "the second answer")
    so_far = "abc" + answer("abc")[THOUGHTS:] + "sunny"
    assert browser.all(".turn[data-role=assistant] .markdown")[-1].text == answer(so_far)[THOUGHTS:]


def test_the_page_follows_a_long_answer(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/mini_chat/chat", height=500)
    for text in ("abc", "d", "e"):
        say(browser, text)
    last = browser.all(".turn[data-role=assistant] .foot")[-1]
    bottom = "return arguments[0].getBoundingClientRect().bottom"
    composer = "return document.querySelector('.composer').getBoundingClientRect().top"
    browser.wait(lambda: 0 < browser.script(bottom, last) <= browser.script(composer), "the answer's end in sight")


def test_what_is_typed_is_text(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/mini_chat/chat")
    hostile = "<img src=x onerror='document.title=1'>"
    say(browser, hostile)
    assert browser.text(".turn[data-role=user] .text") == hostile
    assert browser.all(".output img") == []


def test_markdown_is_shown_and_html_is_not(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/mini_chat/chat")
    source = """# A

- **b** `c`
- [d](https://e.f)

<script>g</script> [h](javascript:i)

```py
j < k
```
|l|m|
|-|-|
|n|o|"""
    shown = browser.driver.execute_async_script(
        """const [text, done] = arguments;
        import(new URL("playground/markdown.js", document.baseURI.split("#")[0])).then(({ markdown }) => {
          const box = document.createElement("div");
          box.append(...markdown(text));
          done({ tags: [...box.querySelectorAll("*")].map((e) => e.tagName.toLowerCase()), text: box.textContent });
        });""",
        source,
    )
    assert {"h3", "ul", "li", "strong", "code", "a", "pre", "table", "th", "td"} <= set(shown["tags"])
    assert not {"script", "img", "iframe"} & set(shown["tags"])
    assert shown["tags"].count("a") == 1
    assert "<script>g</script>" in shown["text"]
    assert "j < k" in shown["text"]


def test_a_picture_is_made(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/mini_denoise/generate")
    browser.one(".composer textarea").send_keys("abc")
    browser.one("[data-field=size] input").send_keys("3")
    browser.one(".send").click()
    picture = browser.one("[data-modality=image] img")
    assert browser.wait(lambda: browser.script("return arguments[0].naturalWidth", picture)) == 3
    assert "FramesDelta" in run_python(code(browser, "Python"))


def test_code_in_a_knobs_help_is_shown_as_code(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/mini_denoise/generate")
    assert browser.one("[data-field=guidance] .help code").text == "0"
    assert browser.text("[data-field=guidance] .help") == "Guidance scale; 0 is none."


def test_texts_are_compared(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/mini_embed/embeddings")
    browser.one(".composer textarea").clear()
    browser.one(".composer textarea").send_keys("abc\nabc\nzzzzzz")
    browser.one(".send").click()
    cells = [float(cell.text) for cell in browser.wait(lambda: browser.all(".heat td"))]
    assert [cells[i] for i in (0, 1, 4, 8)] == [1.0] * 4
    assert cells[2] == cells[6] < 1.0


def test_a_world_is_steered_by_keys(browser: Browser, server: Server) -> None:
    from selenium.webdriver import ActionChains

    browser.open(f"{server.url}/#/mini_world/live")
    browser.one(".send").click()
    frames = "[data-stream=frames] output"
    browser.text(frames)
    ActionChains(browser.driver).key_down("w").perform()
    browser.wait(lambda: [e.text for e in browser.all(frames)] == ["1", "0", "0"], "the world going forward")
    ActionChains(browser.driver).key_up("w").key_down("a").perform()
    browser.wait(lambda: [e.text for e in browser.all(frames)] == ["0", "-1", "0"], "the world turning left")
    ActionChains(browser.driver).key_up("a").perform()
    browser.one(".send").click()
    browser.wait(lambda: browser.one(".composer .status").text.startswith("Ended"), "the session's end")
    assert 'call.push("controls", np.array([[0, 0, 0]], np.float32))' in code(browser, "Python")
    assert "ArrayDelta" in run_python(code(browser, "Python"))


def test_a_duplex_model_hears_the_microphone(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/mini_duplex/live")
    browser.one(".send").click()
    browser.text("[data-stream=text] .text")
    browser.one("[data-stream=audio]")
    browser.one(".send.stop").click()
    browser.wait(lambda: browser.one(".composer .status").text.startswith("Ended"), "the session's end")
    sound = browser.one("[data-stream=audio] audio")
    assert browser.wait(lambda: browser.script("return arguments[0].duration", sound)) > 0
    assert not any(pool["used"] for pool in server.pools()["mini_duplex"].values())


def test_a_key_is_asked_for_and_kept_in_the_tab_only(chromium: Browser) -> None:
    from selenium.webdriver import ActionChains

    browser = chromium
    options = {"api_key": KEY}
    with serving("mini_world", extra_plugins=PLUGINS, executor="inline", server_options=options) as server:
        browser.open(server.url)
        browser.one("#key-input").send_keys("wrong\n")
        browser.wait(lambda: "valid key" in browser.one("#key-error").text and browser.one("#key-dialog"), "the dialog")
        browser.one("#key-input").clear()
        browser.one("#key-input").send_keys(KEY + "\n")
        browser.one(".composer")
        assert browser.script("return {...sessionStorage}") == {"mstar-api-key": KEY}
        assert KEY not in json.dumps(browser.script("return [{...localStorage}, document.cookie, location.href]"))
        browser.one(".send").click()  # a socket, which has no headers
        browser.text("[data-stream=frames] output")
        ActionChains(browser.driver).send_keys("w").perform()
        browser.one(".send").click()
        browser.wait(lambda: browser.one(".composer .status").text.startswith("Ended"), "the session's end")
        shown = code(browser, "Python")
        assert 'os.environ["MSTAR_API_KEY"]' in shown
        assert KEY not in shown
        assert [line for line in browser.complaints() if "401 (Unauthorized)" not in line] == []
        browser.script("sessionStorage.clear()")


def test_below_a_proxys_path(chromium: Browser) -> None:
    browser = chromium
    options = {"root_path": "/models"}
    with serving("mini_chat", extra_plugins=PLUGINS, executor="inline", server_options=options) as server:
        browser.open(f"{server.url}/models/")
        assert say(browser, "abc") == answer("abc")
        assert f"{server.url}/models/v1" in code(browser, "Python")
        assert browser.complaints() == []


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_fits_and_names_its_controls(browser: Browser, server: Server, width: int, theme: str) -> None:
    browser.open(f"{server.url}/", width=width, theme=theme)
    browser.one(".composer")
    for model in MODELS:
        browser.script("location.hash = `#/${arguments[0]}`", model)
        browser.wait(lambda model=model: model in browser.driver.title, model)
        for view in [link.get_attribute("href").rpartition("/")[2] for link in browser.all("nav a")]:
            browser.script("location.hash = `#/${arguments[0]}/${arguments[1]}`", model, view)
            browser.wait(
                lambda view=view: browser.one("nav a[aria-current]").get_attribute("href").endswith(view), view
            )
            found: Any = browser.script(_LOOK)
            assert found == {"wide": False, "nameless": [], "faint": []}, (model, view)


_LOOK = (Path(__file__).parent / "page_checks.js").read_text(encoding="utf-8")
