from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
import soundfile
from PIL import Image as Pillow

from mstar.spec.errors import RequestError
from mstar.spec.processor import ArrayDelta, AudioDelta, FramesDelta, TextDelta
from mstar.spec.tasks import Audio, File, Image

PIXELS = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
EVERYTHING = (
    TextDelta("a", (1,)),
    AudioDelta(np.asarray([0.0, 0.5], np.float32), 8000),
    TextDelta("b", (2,)),
    FramesDelta(PIXELS[None]),
    AudioDelta(np.asarray([1.0], np.float32), 8000),
    FramesDelta(np.stack([PIXELS, PIXELS]), fps=4.0, stream="video"),
    FramesDelta(PIXELS[None], fps=4.0, stream="video"),
    ArrayDelta(np.asarray([[1.5, 2.0]], np.float32)),
)


def png_file() -> bytes:
    out = io.BytesIO()
    Pillow.fromarray(PIXELS).save(out, "PNG")
    return out.getvalue()


def pixels_of(text: str) -> np.ndarray:
    return np.asarray(Pillow.open(io.BytesIO(base64.b64decode(text))))


async def test_the_whole_answer_joins_each_stream(kit):
    async with kit.client(kit.Service(EVERYTHING)) as client:
        reply = await client.post("/generate", json={"text": "hi"})
    answer = reply.json()
    outputs = answer["outputs"]
    assert answer["id"].startswith("gen-")
    assert (answer["finish_reason"], answer["usage"]["completion_tokens"]) == ("stop", 2)
    assert outputs["text"] == [{"stream": "text", "text": "ab"}]
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(outputs["audio"][0]["data"])))
    assert (rate, len(outputs["audio"])) == (8000, 1)
    np.testing.assert_allclose(samples, [0.0, 0.5, 1.0], atol=1e-4)
    np.testing.assert_array_equal(pixels_of(outputs["image"][0]["data"]), PIXELS)
    assert (outputs["video"][0]["fps"], len(outputs["video"][0]["frames"])) == (4.0, 3)
    assert outputs["action"] == [{"stream": "action", "dtype": "float32", "shape": [1, 2], "data": [[1.5, 2.0]]}]


async def test_streaming_gives_one_json_line_per_delta(kit):
    async with kit.client(kit.Service(EVERYTHING)) as client:
        reply = await client.post("/generate", json={"streaming": True})
    assert reply.headers["content-type"] == "application/x-ndjson"
    *deltas, done = [json.loads(line) for line in reply.text.splitlines()]
    assert done["type"] == "done"
    assert (done["finish_reason"], done["usage"]["prompt_tokens"]) == ("stop", 5)
    kinds = [(d["modality"], d["index"]) for d in deltas]
    assert kinds == [
        ("text", 0), ("audio", 0), ("text", 1), ("image", 0), ("audio", 1), ("video", 0), ("video", 1), ("action", 0),
    ]  # fmt: skip
    assert (deltas[1]["encoding"], deltas[1]["rate"], deltas[1]["channels"]) == ("pcm_s16le", 8000, 1)
    assert np.frombuffer(base64.b64decode(deltas[1]["data"]), "<i2").tolist() == [0, 16384]
    np.testing.assert_array_equal(pixels_of(deltas[3]["data"]), PIXELS)
    assert len(deltas[5]["frames"]) == 2


@pytest.mark.parametrize("form", ["multipart", "json"])
async def test_form_and_json_make_the_same_task(kit, form):
    service = kit.Service(kit.HELLO)
    sound = io.BytesIO()
    soundfile.write(sound, np.zeros(8), 16_000, format="WAV")
    files = [("a.png", png_file(), "image/png"), ("b.wav", sound.getvalue(), "audio/wav"), ("c.bin", b"xyz", "x/y")]
    async with kit.client(service) as client:
        if form == "multipart":
            fields = {
                "model": "tiny",
                "text": "look",
                "output_modalities": "text, audio",
                "model_kwargs": '{"steps": 3, "seed": 1}',
                "session": "s1",
                "stop": ["x", "y"],
            }
            reply = await client.post("/generate", data=fields, files=[("files", file) for file in files])
        else:
            body = {
                "model": "tiny",
                "text": "look",
                "output_modalities": ["text", "audio"],
                "model_kwargs": {"steps": 3, "seed": 1},
                "session": "s1",
                "stop": ["x", "y"],
                "files": [
                    {"name": name, "data": base64.b64encode(data).decode(), "media_type": media_type}
                    for name, data, media_type in files
                ],
            }
            reply = await client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    (task,) = service.tasks
    assert (task.text, task.want, task.session, task.stop) == ("look", ("text", "audio"), "s1", ("x", "y"))
    assert (task.knobs.steps, task.knobs.seed, task.knobs.model_fields_set) == (3, 1, {"steps", "seed"})
    image, audio, other = task.parts
    assert isinstance(image, Image)
    assert isinstance(audio, Audio)
    assert other == File(b"xyz", "c.bin", "x/y")


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"txt": "x"}, "txt", "did you mean 'text'"),
        ({"text": 3}, "text", "string"),
        ({"streaming": "yes"}, "streaming", "boolean"),
        ({"stop": 3}, "stop", "string"),
        ({"output_modalities": ["txt"]}, "output_modalities", "did you mean 'text'"),
        ({"output_modalities": ["smell"]}, "output_modalities", "does not make 'smell'; known: "),
        ({"model_kwargs": {"steps": 0}}, "model_kwargs.steps", "nearest valid value is 1"),
        ({"model_kwargs": {"stepps": 1}}, "model_kwargs.stepps", "did you mean 'steps'"),
        ({"model_kwargs": []}, "model_kwargs", "dictionary"),
        ({"files": [{"data": "@@"}]}, "files[0].data", "base64"),
        ({"files": [{"name": "a"}]}, "files[0].data", "required"),
        ({"files": [{"data": "", "nam": "a"}]}, "files[0].nam", "unknown"),
        ({"files": [{"data": "data:image/png;base64,iVBORw=="}]}, "files[0]", "image"),
        ({"text": "x" * 101}, "text", "limit of 100"),
        ({"session": ""}, "session", "1 to 256"),
        ({"session": "x" * 257}, "session", "1 to 256"),
        ({"\ud800": 1}, "\\ud800", "Unicode"),
        ({"x" * 10**6: 1}, "x" * 4096 + "…", "unknown"),
        ({"model_kwargs": {"seed": 2**63}}, "model_kwargs.seed", "nearest valid value"),
        ({"files": [{"data": ""}] * 3}, "files", "limit of 2"),
    ],
)
async def test_a_bad_field_is_named(kit, body, param, said):
    async with kit.client(kit.Service(kit.HELLO), max_text_chars=100, max_files=2) as client:
        # as bytes: httpx would not send half a surrogate pair
        reply = await client.post("/generate", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert said in reply.json()["error"]["message"]


MISPLACED = [
    ("seed", "'seed' is a knob of 'tiny': put it in model_kwargs, as {\"seed\": …}"),
    (
        "temprature",
        "unknown parameter 'temprature'; did you mean 'temperature'? That is a knob: put it in model_kwargs",
    ),
    ("txt", "unknown parameter 'txt'; did you mean 'text'?"),
    ("zzzzzz", "unknown parameter 'zzzzzz'; known: files, model"),
]


@pytest.mark.parametrize("form", ["json", "multipart", "urlencoded"])
@pytest.mark.parametrize(("field", "said"), MISPLACED)
async def test_a_knob_beside_the_text_is_told_where_it_belongs(kit, form, field, said):
    service = kit.Service(kit.HELLO)
    async with kit.client(service) as client:
        if form == "json":
            reply = await client.post("/generate", json={"text": "x", field: 0})
        else:
            files = [("files", ("a", b"x"))] if form == "multipart" else None
            reply = await client.post("/generate", data={"text": "x", field: "0"}, files=files)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, field, "unknown_parameter")
    assert error["message"].startswith(said)
    assert service.tasks == []


@pytest.mark.parametrize("form", ["json", "multipart"])
async def test_an_unknown_knob_is_named_with_the_nearest(kit, form):
    async with kit.client(kit.Service(kit.HELLO)) as client:
        if form == "json":
            reply = await client.post("/generate", json={"model_kwargs": {"stepps": 1}})
        else:
            reply = await client.post("/generate", data={"model_kwargs": '{"stepps": 1}'})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "model_kwargs.stepps", "unknown_parameter")
    assert error["message"] == "unknown parameter 'stepps'; did you mean 'steps'?"


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({"model_kwargs": "{"}, "model_kwargs"),
        ({"model_kwargs": "[]"}, "model_kwargs"),
        ({"streaming": "maybe"}, "streaming"),
        ({"text": ["a", "b"]}, "text"),
        ({"files": "not a file"}, "files"),
        ({"texxt": "a"}, "texxt"),
    ],
)
async def test_a_bad_form_field_is_named(kit, data, param):
    async with kit.client(kit.Service(kit.HELLO)) as client:
        reply = await client.post("/generate", data=data)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("streaming", ["true", "false"])
@pytest.mark.parametrize(
    ("param", "message", "named"),
    [
        ("parts[1]", "'parts[1]': no use for it", "files[1]"),
        ("parts[0]", "parts[0]: no use for it", "files[0]"),
        ("parts", "'parts': one clip a request", "files"),
        ("partsize", "'partsize': is odd", "partsize"),
    ],
)
async def test_what_a_processor_says_of_parts_is_said_of_files(kit, streaming, param, message, named):
    service = kit.Service()
    service.refuse = RequestError(message, param=param)
    async with kit.client(service) as client:
        reply = await client.post("/generate", data={"text": "x", "streaming": streaming})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["message"]) == (400, named, message.replace(param, named))


@pytest.mark.parametrize("streaming", ["true", "false"])
@pytest.mark.parametrize(("param", "named"), [("steps", "model_kwargs.steps"), ("text", "text"), ("stop", "stop")])
async def test_what_a_processor_says_of_a_knob_is_said_of_its_place(kit, streaming, param, named):
    service = kit.Service()
    service.refuse = RequestError(f"{param!r}: too long a story", param=param)
    async with kit.client(service) as client:
        reply = await client.post("/generate", data={"text": "x", "streaming": streaming})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["message"]) == (400, named, f"{param!r}: too long a story")


async def test_what_a_worker_says_of_parts_in_the_middle_of_an_answer_is_said_of_files(kit):
    script = (TextDelta("a", (1,)), RequestError("'parts[1]': nobody hears it", param="parts[1]"))
    async with kit.client(kit.Service(script)) as client:
        reply = await client.post("/generate", data={"text": "x", "streaming": "true"})
    last = json.loads(reply.text.splitlines()[-1])
    assert reply.status_code == 200
    assert (last["type"], last["error"]["param"]) == ("error", "files[1]")
    assert last["error"]["message"] == "'files[1]': nobody hears it"


async def test_large_kwargs_too_many_files_and_other_media_types(kit):
    async with kit.client(kit.Service(kit.HELLO), max_kwargs_bytes=50, max_files=1) as client:
        large = json.dumps({"x": "y" * 60})
        for reply in (
            await client.post("/generate", data={"model_kwargs": large}),
            await client.post("/generate", json={"model_kwargs": json.loads(large)}),
        ):
            assert (reply.status_code, reply.json()["error"]["param"]) == (413, "model_kwargs")
        for count in (2, 5):
            files = [("files", ("a", b"x"))] * count
            reply = await client.post("/generate", files=files)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "too_many_files")
            assert reply.json()["error"]["param"] == "files"
            assert "limit of 1" in reply.json()["error"]["message"]
        other = await client.post("/generate", content=b"x", headers={"content-type": "text/plain"})
        assert other.status_code == 415
        broken = await client.post("/generate", content=b"{", headers={"content-type": "application/json"})
        assert broken.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("route", ["/generate", "/v1/images/edits", "/v1/audio/transcriptions", "/v1/audio/voices"])
async def test_what_is_wrong_with_a_form_is_said_in_our_words(kit, route):
    async with kit.client(
        kit.Service(kit.HELLO), max_text_chars=100, max_speech_chars=100, max_kwargs_bytes=9
    ) as client:
        for count in (65, 66, 1000):
            reply = await client.post(route, files=[("picture[]", ("a", b"x"))] * count)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "too_many_files")
            assert reply.json()["error"]["param"] == "picture[]"
            assert reply.json()["error"]["message"] == "'picture[]': the form has more files than the limit of 64"
        long = await client.post(route, data={"text": "x" * 500}, files=[("file", ("a", b"x"))])
        assert (long.status_code, long.json()["error"]["code"]) == (413, "too_large")
        assert (long.json()["error"]["param"], "limit of 40" in long.json()["error"]["message"]) == ("text", True)
        for body in (b"--x\r\nno form", b"--x\r\nContent-Disposition: form-data\r\n\r\nx\r\n--x--\r\n"):
            headers = {"Content-Type": "multipart/form-data; boundary=x"}
            broken = await client.post(route, content=body, headers=headers)
            assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_form")


async def test_a_modality_that_the_model_does_not_take(kit):
    async with kit.client(kit.Service(kit.HELLO, inputs=("text",))) as client:
        reply = await client.post("/generate", files=[("files", ("a.png", png_file()))])
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "unsupported_modality"


async def test_the_model_must_be_named_when_there_are_two(kit):
    async with kit.client(kit.Service(kit.HELLO), kit.Service(kit.HELLO, key="other")) as client:
        reply = await client.post("/generate", json={"text": "x"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
        assert (await client.post("/generate", json={"text": "x", "model": "other"})).status_code == 200


async def test_errors_before_and_after_the_first_line(kit):
    service = kit.Service([RequestError("no", code="nope", status=422)])
    async with kit.client(service) as client:
        early = await client.post("/generate", json={"streaming": True})
        service.script = [TextDelta("a", (1,)), RequestError("no", code="nope")]
        late = await client.post("/generate", json={"streaming": True})
        whole = await client.post("/generate", json={})
    assert (early.status_code, early.json()["error"]["code"]) == (422, "nope")
    last = json.loads(late.text.splitlines()[-1])
    assert (late.status_code, last["type"], last["error"]["code"]) == (200, "error", "nope")
    assert whole.status_code == 400
