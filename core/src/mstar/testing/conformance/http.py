"""Checks over HTTP: the real server application and a real worker, without a socket.

The core never imports the server: it is looked up by name, and these checks are skipped where it is not installed.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import pkgutil
import wave
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from mstar.cluster.base import WorkerConfig
from mstar.runtime.deployment_files import packaged_deployment
from mstar.runtime.service import Service
from mstar.spec.deployment import merge_deployment
from mstar.spec.model import ModelSpec
from mstar.spec.sound import wav
from mstar.spec.tasks import Audio
from mstar.testing.conformance import http_pictures
from mstar.testing.conformance.http_pictures import picture_body
from mstar.testing.conformance.knob_values import bad_values
from mstar.testing.conformance.subject import Subject, fail
from mstar.testing.conformance.uploads import chat_content, files, unsendable, wav_file
from mstar.testing.examples import Example, draw_examples

__all__ = ["HttpChecks"]


class HttpChecks:
    """Round trips on the model's routes, and bad requests."""

    def test_http_round_trip(self, mstar_model: Subject) -> None:
        """Every declared ability answers a sample request on its route, whole and streamed."""
        key, unserved = mstar_model.spec.key, []
        (example,) = draw_examples(mstar_model.spec, 1, seed=81)
        with _serving(mstar_model) as server:
            for ability in mstar_model.spec.abilities:
                route = server.routes.get(ability)
                if route not in server.mounted:
                    unserved.append(f"{ability}: this server has no route {route or 'for it'} yet")
                elif ability not in _ROUND_TRIPS:
                    unserved.append(f"{ability}: the suite has no sample request for {route} yet")
                elif reason := unsendable(example.parts):
                    unserved.append(f"{ability}: {reason}")
                elif ability == "generate" and server.live(example):
                    _live(server, example)
                else:
                    _ROUND_TRIPS[ability](server, route, example)
            server.check_idle("requests over HTTP ended")
        if unserved:
            pytest.skip(f"{key!r}: not tried: {'; '.join(unserved)}")

    def test_bad_requests(self, mstar_model: Subject) -> None:
        """Wrong knobs and fields are answered 400 with the field's name, before anything is scheduled."""
        spec = mstar_model.spec
        (example,) = draw_examples(spec, 1, seed=82)
        if reason := unsendable(example.parts):
            pytest.skip(f"{spec.key!r}: {reason}")
        with _serving(mstar_model) as server:
            asked = [ability for ability in _WRONG if ability in spec.abilities]
            if not asked:
                pytest.skip(f"{spec.key!r} is served on none of {', '.join(server.routes[a] for a in _WRONG)}")
            for ability in asked:
                _refusals(server, ability, example)
            if server.status()["steps"]:
                fail(f"{spec.key!r}: a request that was refused had been scheduled already")


def _refusals(server: _Server, ability: str, example: Example) -> None:
    """Send what must be refused on *ability*'s route."""
    route, spec = server.routes[ability], server.spec
    body = _BODIES[ability](spec, example)
    for name, value, why in (*bad_values(spec.knobs), ("no_such_knob", 1, "unknown")):
        knobs = {"model_kwargs": {**body["model_kwargs"], name: value}} if ability == "generate" else {name: value}
        server.check_refused(route, {**body, **knobs}, name, f"{name}={json.dumps(value)[:60]}, which is {why}")
    for field, wrong in _WRONG[ability]:
        server.check_refused(route, {**body, field: wrong}, field, f"{field}={wrong!r}")
    server.check_refused(route, {**body, "model": spec.key + "x"}, "model", "a wrong model")


_WRONG: Mapping[str, Sequence[tuple[str, Any]]] = {
    "generate": (("text", 7), ("model_kwargs", "x"), ("output_modalities", [1]), ("files", [7]), ("nonsense", 1)),
    "chat": (("messages", []), ("messages", "x"), ("messages", [{"role": "nobody", "content": "x"}]), ("nonsense", 1)),
    "image": (("prompt", ""), ("size", "0x0"), ("size", "big"), ("n", 0), ("output_format", "x"), ("nonsense", 1)),
    "video": (("prompt", ""), ("size", "0x0"), ("size", "big"), ("seconds", 0), ("seconds", "x"), ("nonsense", 1)),
}


class _Server:
    """The model behind the server's application, and a client of it."""

    def __init__(self, subject: Subject, service: Service, client: Any):
        self.subject, self.spec, self.service, self.client = subject, subject.spec, service, client
        self.routes: dict[str, str] = pkgutil.resolve_name("mstar_server.state:ROUTES")
        self.mounted: frozenset[str] = client.app.state.mstar.mounted
        self.client_streams = subject.driver().client_streams

    def live(self, example: Example) -> tuple[str, ...]:
        return self.client_streams if example.live is None else example.live

    def post(self, route: str, body: dict[str, Any]) -> Any:
        answer = self.client.post(route, json=body)
        if answer.status_code != 200:
            fail(f"{self.spec.key!r}: POST {route} was answered {answer.status_code}: {answer.text}\n  body: {body}")
        return answer

    def check_refused(self, route: str, body: dict[str, Any], field: str, what: str) -> None:
        answer = self.client.post(route, json=body)
        if answer.status_code == 200:
            fail(f"{self.spec.key!r}: POST {route} accepts {what}")
        error = answer.json()["error"]
        if not 400 <= answer.status_code < 500 or field not in (error["param"] or ""):
            fail(
                f"{self.spec.key!r}: POST {route} with {what} was answered {answer.status_code} with param "
                f"{error['param']!r}; it should be a 4xx that names {field!r}: {error['message']}"
            )

    def status(self) -> Any:
        return self.client.portal.call(self.service.status)

    def check_idle(self, what: str) -> None:
        status = self.status()
        used = {name: usage for name, usage in status["resources"].items() if usage["used"]}
        if status["running"] or status["waiting"] or used:
            fail(f"{self.spec.key!r}: {what}, but the worker still holds {used or status}")


@contextmanager
def _serving(subject: Subject) -> Iterator[_Server]:
    if importlib.util.find_spec("mstar_server") is None:
        pytest.skip("mstar-server is not installed")
    try:
        from starlette.testclient import TestClient
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"starlette's test client cannot be used: {error}")
    subject.driver()  # skips what does not load
    key = subject.spec.key
    deployment = merge_deployment(key, packaged_deployment(subject.spec), subject.overrides, {"executor": "inline"})
    weights = None if subject.weights is None else str(subject.weights)
    service = Service(subject.spec, WorkerConfig(key=key, weights=weights, deployment=deployment), subject.registry)
    app = pkgutil.resolve_name("mstar_server.app:create_app")({key: service}, subject.registry)
    with TestClient(app, raise_server_exceptions=False) as client:
        portal: Any = client.portal
        portal.call(service.start)
        try:
            yield _Server(subject, service, client)
        finally:
            portal.call(service.stop)
            portal.call(app.state.mstar.close)


# --- one function per ability -----------------------------------------------------------------------------------------


def _generate_body(spec: ModelSpec, example: Example) -> dict[str, Any]:
    body: dict[str, Any] = {"model": spec.key, "text": example.text, "model_kwargs": dict(example.knobs)}
    if example.parts:
        body["files"] = files(example.parts)
    return {**body, "output_modalities": list(example.want)} if example.want else body


def _generate(server: _Server, route: str, example: Example) -> None:
    body = _generate_body(server.spec, example)
    whole = server.post(route, body).json()
    _check_outputs(server.spec, whole["outputs"])
    lines = [json.loads(line) for line in server.post(route, {**body, "streaming": True}).text.splitlines()]
    if lines[-1]["type"] != "done":
        fail(f"{server.spec.key!r}: the stream of POST {route} ended with {lines[-1]}")
    deltas = [line for line in lines if line["type"] == "delta"]
    _check_same_text(server.spec, route, _texts(whole["outputs"]), "".join(d.get("text", "") for d in deltas))
    missing = whole["outputs"].keys() - {delta["modality"] for delta in deltas}
    if missing:
        fail(f"{server.spec.key!r}: POST {route} gives {', '.join(sorted(missing))} whole, but not when streamed")


def _chat_body(spec: ModelSpec, example: Example) -> dict[str, Any]:
    message = {"role": "user", "content": chat_content(example.text, example.parts)}
    return {"model": spec.key, "messages": [message], **example.knobs}


def _chat(server: _Server, route: str, example: Example) -> None:
    body = _chat_body(server.spec, example)
    choice = server.post(route, body).json()["choices"][0]
    if not isinstance(choice["message"]["content"], str) or choice["finish_reason"] not in ("stop", "length"):
        fail(f"{server.spec.key!r}: POST {route} answered no text with a finish reason: {choice}")
    choices = _chunks(server, route, {**body, "stream": True})
    streamed = "".join(choice["delta"].get("content") or "" for choice in choices)
    _check_same_text(server.spec, route, choice["message"]["content"], streamed)


def _completion(server: _Server, route: str, example: Example) -> None:
    body = {"model": server.spec.key, "prompt": example.text, **example.knobs}
    choice = server.post(route, body).json()["choices"][0]
    if not isinstance(choice["text"], str) or choice["finish_reason"] not in ("stop", "length"):
        fail(f"{server.spec.key!r}: POST {route} answered no text with a finish reason: {choice}")
    choices = _chunks(server, route, {**body, "stream": True})
    _check_same_text(server.spec, route, choice["text"], "".join(choice["text"] for choice in choices))


def _chunks(server: _Server, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices in the events of a stream."""
    text = server.post(route, body).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        fail(f"{server.spec.key!r}: the stream of POST {route} ended with {events[-1]}")
    return [choice for event in events[:-1] for choice in json.loads(event).get("choices", ())]


def _embedding(server: _Server, route: str, example: Example) -> None:
    knobs = {name: value for name, value in example.knobs.items() if name in server.spec.knobs.model_fields}
    data = server.post(route, {"model": server.spec.key, "input": [example.text, example.text], **knobs}).json()["data"]
    if len(data) != 2 or not data[0]["embedding"] or len(data[0]["embedding"]) != len(data[1]["embedding"]):
        fail(f"{server.spec.key!r}: POST {route} did not give two vectors of one size for two texts: {data}")


def _speech(server: _Server, route: str, example: Example) -> None:
    """A whole file says how long it is, and what is streamed is the same sound."""
    key = server.spec.key
    knobs = {name: value for name, value in example.knobs.items() if name in server.spec.knobs.model_fields}
    body = {"model": key, "input": example.text if example.text.strip() else "a", **knobs}
    clip = next((part for part in example.parts if isinstance(part, Audio)), None)
    if clip is not None:  # a voice to be cloned
        body["ref_audio"] = base64.b64encode(wav(clip.samples, clip.rate)).decode()
    file = server.post(route, {**body, "response_format": "wav"})
    with wave.open(io.BytesIO(file.content)) as clip:
        rate, whole = clip.getframerate(), clip.readframes(clip.getnframes())
    if not whole or int(file.headers["x-sample-rate"]) != rate:
        fail(f"{key!r}: POST {route} answered {len(whole)} bytes of sound at {rate} Hz, with headers {file.headers}")
    streamed = server.post(route, {**body, "response_format": "pcm", "stream": True}).content
    if streamed != whole:
        fail(f"{key!r}: POST {route} gives {len(whole)} bytes of sound whole and {len(streamed)} others streamed")
    events = server.post(route, {**body, "response_format": "pcm", "stream_format": "sse"}).text
    lines = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: ")]
    if lines[-1]["type"] != "speech.audio.done":
        fail(f"{key!r}: the events of POST {route} end with {lines[-1]}")
    if b"".join(base64.b64decode(line["audio"]) for line in lines[:-1]) != whole:
        fail(f"{key!r}: the events of POST {route} carry another sound than the whole answer")
    server.check_refused(route, {**body, "voice": "no such voice"}, "voice", "a voice that there is not")


def _transcription(server: _Server, route: str, example: Example) -> None:
    """Any clip will do: the sample request's, or a second of soft noise."""
    part = next((part for part in example.parts if isinstance(part, Audio)), None)
    if part is None:
        part = Audio(np.random.default_rng(83).normal(0, 0.01, 16_000).astype(np.float32), 16_000)
    fields = {"model": server.spec.key}
    for name, value in example.knobs.items():
        if name in server.spec.knobs.model_fields and value is not None:
            fields[name] = value if isinstance(value, str) else json.dumps(value)

    def ask(**more: str) -> Any:
        answer = server.client.post(route, data={**fields, **more}, files={"file": wav_file(part)})
        if answer.status_code != 200:
            fail(f"{server.spec.key!r}: POST {route} was answered {answer.status_code}: {answer.text}")
        return answer

    text = ask().json()["text"]
    verbose = ask(response_format="verbose_json").json()
    _check_same_text(server.spec, route, verbose["text"], text)
    times = [time for segment in verbose["segments"] for time in (segment["start"], segment["end"])]
    if times != sorted(times) or any(not 0 <= time <= verbose["duration"] for time in times):
        fail(f"{server.spec.key!r}: POST {route} gives segments whose times are out of order or of the clip: {times}")
    if not ask(response_format="vtt").text.startswith("WEBVTT"):
        fail(f"{server.spec.key!r}: POST {route} gives no WebVTT for response_format=vtt")
    if route.endswith("/translations"):
        return  # whole only
    events = [line[6:] for line in ask(stream="true").text.splitlines() if line.startswith("data: {")]
    said = [json.loads(event) for event in events]
    if [event["type"] for event in said].count("transcript.text.done") != 1:
        fail(f"{server.spec.key!r}: the stream of POST {route} does not end with one transcript.text.done: {said[-1:]}")
    deltas = "".join(event["delta"] for event in said if event["type"] == "transcript.text.delta")
    _check_same_text(server.spec, route, text, deltas)


def _realtime(server: _Server, route: str, example: Example) -> None:
    """A tenth of a second of soft noise, committed: the model's answer to it, or its transcript, ends."""
    noise = np.random.default_rng(84).normal(0, 0.01, 2400)
    audio = base64.b64encode((noise * 32767).astype("<i2").tobytes()).decode()
    events: list[dict[str, Any]] = []
    ends = ("response.done", "conversation.item.input_audio_transcription.completed", "error")
    # The test client ends the application's task by cancelling it, and reports that as an error of its own.
    with suppress(CancelledError), server.client.websocket_connect(f"{route}?model={server.spec.key}") as socket:
        socket.send_json({"type": "session.update", "session": {"audio": {"input": {"turn_detection": None}}}})
        socket.send_json({"type": "input_audio_buffer.append", "audio": audio})
        socket.send_json({"type": "input_audio_buffer.commit"})
        while not events or events[-1]["type"] not in ends:
            events.append(socket.receive_json())
    last = events[-1]
    if last["type"] == "error" or last.get("response", {}).get("status") not in (None, "completed", "incomplete"):
        fail(f"{server.spec.key!r}: a session on {route} ended with {last}")


_BODIES = {"generate": _generate_body, "chat": _chat_body, "image": picture_body, "video": picture_body}
_ROUND_TRIPS = {
    "realtime": _realtime,
    "generate": _generate,
    "chat": _chat,
    "completion": _completion,
    "embedding": _embedding,
    "image": http_pictures.image,
    "image_edit": http_pictures.edit,
    "video": http_pictures.video,
    "speech": _speech,
    "transcription": _transcription,
    "translation": _transcription,
}


def _live(server: _Server, example: Example) -> None:
    """A request that its client feeds while it runs, over the socket."""
    route, outputs = "/generate/ws", dict[str, list[Any]]()
    if route not in server.mounted:
        pytest.skip(f"this server has no route {route} yet")
    lines: list[dict[str, Any]] = []
    # The test client ends the application's task by cancelling it, and reports that as an error of its own.
    with suppress(CancelledError), server.client.websocket_connect(route) as socket:
        body = _generate_body(server.spec, example)
        socket.send_json({"id": "r0", **body, "live": list(server.live(example))})
        for stream, part in example.appends:
            socket.send_json({"id": "r0", "append": {stream: np.asarray(part).tolist()}})
        socket.send_json({"id": "r0", "end_input": True})
        while not lines or lines[-1]["type"] == "delta":
            lines.append(socket.receive_json())
    if not lines or lines[-1]["type"] != "done":
        fail(f"{server.spec.key!r}: a live request on {route} ended with {lines[-1:]}")
    for line in lines[:-1]:
        outputs.setdefault(line["modality"], []).append(line)
    _check_outputs(server.spec, outputs)


def _check_outputs(spec: ModelSpec, outputs: dict[str, Any]) -> None:
    if not outputs:
        fail(f"{spec.key!r}: the answer has no output; the spec declares {', '.join(spec.outputs)}")
    undeclared = outputs.keys() - {*spec.outputs, "segment"}  # where a transcript's text was said goes with it
    if undeclared:
        fail(f"{spec.key!r}: the answer has {', '.join(undeclared)}, which ModelSpec.outputs does not declare")


def _texts(outputs: dict[str, Any]) -> str:
    return "".join(item["text"] for items in outputs.values() for item in items if "text" in item)


def _check_same_text(spec: ModelSpec, route: str, whole: str, streamed: str) -> None:
    if whole != streamed:
        fail(f"{spec.key!r}: POST {route} says {whole!r} whole and {streamed!r} streamed")
