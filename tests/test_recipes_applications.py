"""What applications send, as their source builds it, and what they read of the answers.

Open WebUI 0.12.4 (``routers/openai.py``, ``routers/audio/__init__.py``, ``routers/images.py``), Home Assistant
2026.11.0 (``components/openai_conversation``), Extended OpenAI Conversation 2.0.0 (``conversation.py``).
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import soundfile
from PIL import Image
from websockets.sync.client import connect

from mstar.testing.miniatures.catalog import continue_sum, embed_answer, spoken
from mstar.testing.miniatures.common import decode, encode

from .serving import Server, serving

KEYS = ("mini_chat", "mini_tts", "mini_ctc", "mini_embed", "mini_denoise", "mini_omni")
TURN = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
ANSWER = decode(continue_sum(encode("Be brief.Hi"), 16))
CLIP = spoken("hello there", 16_000)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*KEYS, extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running


def wav() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, CLIP, 16_000, format="WAV", subtype="PCM_16")
    return file.getvalue()


# --- Open WebUI

KEY = {"Authorization": "Bearer none"}
JSON = {**KEY, "Content-Type": "application/json"}


def test_open_webui_lists_models_and_voices(server: Server) -> None:
    models = server.http.get("/v1/models", headers=JSON).json()
    assert {model["id"] for model in models["data"]} == set(KEYS)
    voices = server.http.get("/v1/audio/voices").json().get("voices", [])  # it sends no key there
    assert {voice["id"]: voice["name"] for voice in voices}.items() >= {"ann": "Ann", "bob": "Bob"}.items()
    speaking = server.http.get("/v1/audio/models").json().get("models", [])
    assert "mini_tts" in [model["id"] for model in speaking]


def test_open_webui_chats(server: Server) -> None:
    body = {"stream": True, "model": "mini_chat", "messages": TURN, "stream_options": {"include_usage": True}}
    said, usage = "", None
    with server.http.stream("POST", "/v1/chat/completions", content=json.dumps(body), headers=JSON) as answer:
        assert "text/event-stream" in answer.headers["Content-Type"]
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                said += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                usage = chunk.get("usage") or usage
    assert said == ANSWER
    assert usage is not None
    assert usage["completion_tokens"] == 16


def test_open_webui_names_a_chat(server: Server) -> None:
    """Titles, tags and follow-ups: whole, with a bound of tokens."""
    body = {"model": "mini_chat", "messages": TURN, "stream": False, "max_tokens": 16}
    answer = server.http.post("/v1/chat/completions", content=json.dumps(body), headers=JSON)
    assert answer.json()["choices"][0]["message"]["content"] == ANSWER


def test_open_webui_speaks(server: Server) -> None:
    body = {"input": "Hello there.", "voice": "ann", "model": "mini_tts"}
    answer = server.http.post("/v1/audio/speech", json=body, headers=JSON)
    assert answer.headers["Content-Type"] == "audio/mpeg"
    assert soundfile.info(io.BytesIO(answer.content)).frames > 0


@pytest.mark.parametrize("language", [None, "en"])
def test_open_webui_writes_down(server: Server, language: str | None) -> None:
    """Its form is streamed: no length, a file without a media type."""
    fields = {"model": "mini_ctc", **({"language": language} if language else {})}
    parts = [f'Content-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()]
    head = 'Content-Disposition: form-data; name="file"; filename="talk.wav"\r\nContent-Type: application/octet-stream'

    def chunks() -> Iterator[bytes]:
        yield "".join(f"--edge\r\nContent-Type: text/plain; charset=utf-8\r\n{part}" for part in parts).encode()
        yield f"--edge\r\n{head}\r\n\r\n".encode()
        data = wav()
        for start in range(0, len(data), 4096):
            yield data[start : start + 4096]
        yield b"\r\n--edge--\r\n"

    kind = {"Content-Type": "multipart/form-data; boundary=edge"}
    answer = server.http.post("/v1/audio/transcriptions", content=chunks(), headers={**KEY, **kind})
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"] == "hello there"


def test_open_webui_speaks_over_realtime(server: Server) -> None:
    """Its engine ``openai-realtime``."""
    sound = b""
    with connect(f"{server.url.replace('http', 'ws')}/v1/realtime?model=mini_omni", additional_headers=KEY) as socket:
        while (event := json.loads(socket.recv(timeout=30)))["type"] != "response.done":
            assert event["type"] != "error", event
            if event["type"] == "session.created":
                output = {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "ann"}
                audio = {"input": {"turn_detection": None, "transcription": None}, "output": output}
                common = {"output_modalities": ["audio"], "tools": [], "tool_choice": "none", "instructions": "Read."}
                session = {"type": "realtime", "audio": audio, **common}
                socket.send(json.dumps({"type": "session.update", "session": session}))
            elif event["type"] == "session.updated":
                content = [{"type": "input_text", "text": "Hello there."}]
                given = [{"type": "message", "role": "user", "content": content}]
                response = {"conversation": "none", **common, "input": given}
                socket.send(json.dumps({"type": "response.create", "response": response}))
            elif event["type"] == "response.created":
                response_id = event["response"]["id"]
            elif event["type"] == "response.output_audio.delta":
                assert event["response_id"] == response_id
                sound += base64.b64decode(event["delta"], validate=True)
    response = event["response"]
    assert response["id"] == response_id
    # this model goes on until its bound; of another the application wants "completed"
    assert response["status_details"]["reason"] == "max_output_tokens"
    assert sound
    assert len(sound) % 2 == 0


def test_open_webui_embeds(server: Server) -> None:
    body = json.dumps({"input": ["abc", "d"], "model": "mini_embed"})
    data = server.http.post("/v1/embeddings", content=body, headers=JSON).json()["data"]
    assert [item["embedding"] for item in data] == [embed_answer(encode(text)).tolist() for text in ("abc", "d")]


def test_open_webui_draws_and_edits(server: Server) -> None:
    body = {"model": "mini_denoise", "prompt": "a bird", "n": 1, "size": "64x64", "response_format": "b64_json"}
    drawn = server.http.post("/v1/images/generations", json=body, headers=JSON).json()["data"][0]
    picture = base64.b64decode(drawn["b64_json"])
    assert Image.open(io.BytesIO(picture)).size == (64, 64)
    assert not drawn.get("url")
    fields = {"model": "mini_denoise", "prompt": "a red bird", "response_format": "b64_json"}
    for name in ("image", "image[]"):
        files = {name: ("image.png", picture, "image/png")}
        edited = server.http.post("/v1/images/edits", data=fields, files=files, headers=KEY).json()["data"][0]
        assert Image.open(io.BytesIO(base64.b64decode(edited["b64_json"]))).size == (64, 64)


# --- Home Assistant


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


TOOL = {"type": "object", "properties": {"name": {"type": "string"}}, "required": []}


def test_home_assistant_converses(client: openai.OpenAI) -> None:
    assert "mini_chat" in [model.id for model in client.models.list(timeout=10.0)]
    given = [{"type": "message", "role": "developer", "content": "Be brief."}]
    given += [{"type": "message", "role": "user", "content": "Hi"}]
    options: dict[str, Any] = {"top_p": 1.0, "temperature": 1.0, "prompt_cache_retention": "24h"}
    function = {"type": "function", "name": "HassTurnOn", "parameters": TOOL, "description": "On.", "strict": False}
    extra = {"top_k": 1}  # the answer can be known
    stream = client.responses.create(
        model="mini_chat", input=given, max_output_tokens=16, safety_identifier="01K", prompt_cache_key="01K",
        service_tier="auto", store=False, stream=True, tools=[function], extra_body=extra, **options,
    )  # fmt: skip
    events = list(stream)
    kinds = [event.type for event in events]
    assert "response.output_item.added" in kinds
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert kinds[-1] == "response.incomplete"  # the bound; it says so
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert events[-1].response.usage.output_tokens == 16


def test_home_assistant_speaks(server: Server) -> None:
    """With another model's name: its own cannot be set."""

    async def speak() -> bytes:
        asked = {"model": "mini_tts", "voice": "ann", "input": "Hello there.", "instructions": "", "speed": 1.0}
        sound = bytearray()
        async with (
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
            client.audio.speech.with_streaming_response.create(**asked, response_format="mp3") as response,
        ):
            async for chunk in response.iter_bytes():
                sound.extend(chunk)
        return bytes(sound)

    assert soundfile.info(io.BytesIO(asyncio.run(speak()))).frames > 0


def test_home_assistant_writes_down(client: openai.OpenAI) -> None:
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes((CLIP * 32767).astype("<i2").tobytes())
    prompt = "The following conversation is a smart home user talking to Home Assistant."
    heard = client.audio.transcriptions.create(
        model="mini_ctc", file=("a.wav", stream.getvalue()), response_format="json", language="en", prompt=prompt
    )
    assert heard.text == "hello there"


def test_extended_openai_conversation(client: openai.OpenAI) -> None:
    function = {"name": "execute_services", "description": "Executes.", "parameters": TOOL}
    words: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "tool_choice": "auto"}
    common: dict[str, Any] = {"model": "mini_chat", "messages": TURN, "top_p": 1, "temperature": 0.5, "user": "01K"}
    answer = client.chat.completions.create(**common, max_tokens=16, **words)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"
    assert not answer.choices[0].message.tool_calls
    old: dict[str, Any] = {"functions": [function], "function_call": "auto"}  # with "use tools" off
    with pytest.raises(openai.BadRequestError, match="functions"):
        client.chat.completions.create(**common, max_tokens=150, **old)
