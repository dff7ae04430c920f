"""Rules that hold on every route, whoever wrote it: the routes are taken from the router."""

import base64
import io
import wave

import pytest
from PIL import Image

from mstar_server.app import create_app
from mstar_server.state import ROUTES


def sound():
    """A tenth of a second of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(8000)
        wav.writeframes(bytes(1600))
    return file.getvalue()


def picture():
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "PNG")
    return file.getvalue()


FILE = {"file": ("a.wav", sound(), "audio/wav")}
IMAGE = {"image": ("a.png", picture(), "image/png")}

ASKS = {
    "chat": {"json": {"messages": [{"role": "user", "content": "hi"}]}},
    "completion": {"json": {"prompt": "hi"}},
    "embedding": {"json": {"input": "hi"}},
    "speech": {"json": {"input": "hi", "voice": "alloy"}},
    "transcription": {"data": {}, "files": FILE},
    "translation": {"data": {}, "files": FILE},
    "image": {"json": {"prompt": "hi"}},
    "image_edit": {"data": {"prompt": "hi"}, "files": IMAGE},
    "video": {"json": {"prompt": "hi"}},
    "generate": {"json": {"text": "hi"}},
}
"""A request for each ability, without its model."""


def ask(ability, model):
    """The request for *ability* to *model*, as a client sends it."""
    (kind, body), *files = ASKS[ability].items()
    return {kind: {**body, "model": model}, **dict(files)}


@pytest.fixture
def mounted(kit):
    """Ability → route, of those that this server has and that are no websockets."""
    app = create_app({}, kit.Hooks())
    posts = {path for path, operations in app.openapi()["paths"].items() if "post" in operations}
    found = {ability: route for ability, route in ROUTES.items() if route in posts}
    assert found.keys() <= ASKS.keys(), "a new route: say here how it is asked"
    return found


def service(kit, ability):
    """A model with no other ability."""
    return kit.Service(kit.HELLO, key="tiny", abilities=(ability,))


async def test_e22_a_model_that_cannot_names_the_route_that_can(kit, mounted):
    for ability, route in mounted.items():
        able = "chat" if ability != "chat" else "generate"
        async with kit.client(service(kit, able)) as client:
            answer = await client.post(route, **ask(ability, "tiny"))
        assert answer.status_code in (400, 404), (route, answer.text)
        error = answer.json()["error"]
        assert error["param"] == "model", (route, error)
        assert ROUTES[able] in error["message"], (route, error)


async def test_a_model_that_does_not_exist_is_a_404_with_the_nearest(kit, mounted):
    for ability, route in mounted.items():
        async with kit.client(service(kit, ability)) as client:
            answer = await client.post(route, **ask(ability, "tinny"))
        assert answer.status_code == 404, (route, answer.text)
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found"), (route, error)
        assert "'tiny'" in error["message"], (route, error)


async def test_an_unknown_field_is_named_with_the_nearest(kit, mounted):
    """A misspelt field that passed would be a wish that nobody hears."""
    for ability, route in mounted.items():
        sent = ask(ability, "tiny")
        kind = next(iter(sent))
        known = [name for name in sent[kind] if name != "model"] or ["model"]
        sent[kind][f"{known[0]}z"] = "hi"
        spoken = kit.Service(kit.HELLO, abilities=(ability,))
        async with kit.client(spoken) as client:
            answer = await client.post(route, **sent)
        assert answer.status_code == 400, (route, answer.text)
        error = answer.json()["error"]
        assert error["param"] == f"{known[0]}z", (route, error)
        assert known[0] in error["message"], (route, error)
        assert not spoken.tasks, route


def test_every_operation_documents_its_answers(kit):
    document = create_app({}, kit.Hooks()).openapi()
    assert "HTTPValidationError" not in document["components"]["schemas"], "a form that is never sent"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            answers = operation["responses"]
            assert operation.get("summary"), where
            for status, answer in answers.items():
                content = answer.get("content", {})
                if status.startswith("2"):
                    assert content or status == "204", where
                elif path != "/health/ready":
                    schema = content["application/json"]["schema"]
                    assert schema == {"$ref": "#/components/schemas/ErrorAnswer"}, f"{where}: {status}"
            assert {"400", "401", "404", "429", "500", "503"} <= answers.keys(), where


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
async def test_the_document_is_served(kit, path):
    async with kit.client() as client:
        assert (await client.get(path)).status_code == 200


URL = "data:image/png;base64," + base64.b64encode(picture()).decode()
SPOKEN = base64.b64encode(sound()).decode()
SEEN = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": URL}]}]}
ITEMS = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URL}]}]}
WITH_FILES = {
    "/v1/chat/completions": ("chat", {"json": SEEN}),
    "/v1/responses": ("chat", {"json": ITEMS}),
    "/v1/audio/speech": ("speech", {"json": {"input": "hi", "ref_audio": SPOKEN}}),
    "/v1/audio/transcriptions": ("transcription", {"data": {}, "files": FILE}),
    "/v1/audio/translations": ("translation", {"data": {}, "files": FILE}),
    "/v1/images/edits": ("image_edit", {"data": {"prompt": "hi"}, "files": IMAGE}),
    "/v1/videos": ("video", {"data": {"prompt": "hi"}, "files": {"input_reference": IMAGE["image"]}}),
    "/v1/videos/generations": ("video", {"json": {"prompt": "hi", "input_reference": URL}}),
    "/generate": ("generate", {"json": {"text": "hi", "files": [{"data": URL}]}}),
}
"""A request with a file for each route that takes some, with the ability that it needs."""


@pytest.mark.parametrize("route", WITH_FILES)
@pytest.mark.parametrize("wrong", [{"stepz": 3}, {"steps": 51}], ids=["unknown", "out of bounds"])
async def test_no_file_is_decoded_for_a_request_with_a_wrong_field(kit, route, wrong):
    """What costs nothing is judged first."""
    ability, sent = WITH_FILES[route]
    (kind, body), *files = sent.items()
    extra = {"model_kwargs": wrong} if route == "/generate" else wrong
    spoken = kit.Service(kit.HELLO, abilities=(ability,))
    async with kit.client(spoken) as client:
        answer = await client.post(route, **{kind: {**body, "model": "tiny", **extra}}, **dict(files))
        pool = client._transport.app.state.mstar.media.pool
        assert pool.pids == [], "a decoder has been started"
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].endswith(next(iter(wrong))), error
    assert "steps" in error["message"], error
    assert not spoken.tasks


@pytest.mark.parametrize("route", WITH_FILES)
async def test_the_same_request_without_the_wrong_field_is_decoded(kit, route):
    ability, sent = WITH_FILES[route]
    (kind, body), *files = sent.items()
    spoken = kit.Service(kit.HELLO, abilities=(ability,))
    async with kit.client(spoken) as client:
        await client.post(route, **{kind: {**body, "model": "tiny"}}, **dict(files))
        assert client._transport.app.state.mstar.media.pool.pids
    assert spoken.tasks


def test_every_route_that_takes_files_is_tried(kit):
    """A new one has to say here how it is asked. Voices are judged by :mod:`test_voices`."""
    document = create_app({}, kit.Hooks()).openapi()
    forms = {
        path
        for path, operations in document["paths"].items()
        if "multipart/form-data" in operations.get("post", {}).get("requestBody", {}).get("content", {})
    }
    assert forms - {"/v1/images/generations"} <= WITH_FILES.keys()
