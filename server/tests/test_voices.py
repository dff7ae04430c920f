"""Voices that clients upload: what is kept, for whom, and what is refused."""

from __future__ import annotations

import asyncio
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile

from mstar.spec.errors import RequestError, SetupError
from mstar.spec.processor import AudioDelta
from mstar.spec.tasks import Audio
from mstar_server.voices import VoiceStore

FIELDS = {
    "id", "object", "name", "created", "created_at", "type", "language", "gender", "description", "uploaded", "models",
}  # fmt: skip


def wav(seconds: float = 0.1, loud: float = 0.5) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, loud * np.sin(np.arange(int(seconds * 8000)) / 5), 8000, format="WAV", subtype="PCM_16")
    return out.getvalue()


@pytest.fixture
def speaking(kit: Any) -> Callable[..., Any]:
    def make(**spec: Any) -> Any:
        return kit.Service(**{"abilities": ("speech",), **spec})

    return make


async def upload(client: httpx.AsyncClient, name: Any = "Zoë", data: bytes | None = None, **fields: Any) -> Any:
    files = {"audio_sample": ("a.wav", wav() if data is None else data)}
    return await client.post("/v1/audio/voices", data={"name": name, **fields}, files=files)


async def test_every_voice_has_the_same_shape(kit: Any, speaking: Any) -> None:
    silent = kit.Service(key="silent", outputs=("text",))
    async with kit.client(speaking(), silent) as client:
        made = (await upload(client, ref_text="what is said", language="fr")).json()
        listed = (await client.get("/v1/audio/voices")).json()
        one = (await client.get("/v1/audio/voices/bob")).json()
        mine = (await client.get(f"/v1/audio/voices/{made['id']}")).json()
        none = (await client.get("/v1/audio/voices", params={"model": "silent"})).json()
        wrong = await client.get("/v1/audio/voices", params={"model": "tinny"})
    assert listed["object"] == "list"
    assert all(item.keys() == FIELDS for item in listed["data"])
    assert [item["name"] for item in listed["data"]] == ["ann", "Bob", "Zoë"]
    assert [item["uploaded"] for item in listed["data"]] == [False, False, True]
    assert (one, mine) == (listed["data"][1], made)
    assert (made["language"], made["models"], made["type"]) == ("fr", ["tiny"], "audio_sample")
    assert none["data"] == []
    assert wrong.status_code == 404


async def test_a_request_may_say_what_an_uploaded_voice_says(kit: Any, speaking: Any) -> None:
    service = kit.Service((AudioDelta(np.full(800, 0.25, np.float32), 8000),), abilities=("speech",))
    asked = {"model": "tiny", "input": "hi", "response_format": "pcm", "voice": "Zoë"}
    async with kit.client(service) as client:
        await upload(client)
        for said in ({}, {"ref_text": "what is said"}, {"ref_text": "what is said"}):
            reply = await client.post("/v1/audio/speech", json={**asked, **said})
            assert reply.status_code == 200, reply.text
        wrong = await client.post("/v1/audio/speech", json={**asked, "voice": "ann", "ref_text": "x"})
    silent, said, again = (task.sample for task in service.tasks)
    assert (silent.text, said.text, said.param) == ("", "what is said", "voice")
    assert silent.id != said.id == again.id
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "ref_text")


async def test_a_model_without_clips_refuses_an_uploaded_voice(kit: Any, speaking: Any) -> None:
    async with kit.client(speaking(inputs=("text",))) as client:
        await upload(client)
        reply = await client.post("/v1/audio/speech", json={"model": "tiny", "input": "hi", "voice": "Zoë"})
    assert reply.status_code == 400
    assert "cannot speak with an uploaded voice" in reply.json()["error"]["message"]


async def test_a_voice_survives_a_restart_and_ends_with_its_deletion(kit: Any, speaking: Any, tmp_path: Path) -> None:
    async with kit.client(speaking(), state_dir=tmp_path) as client:
        made = (await upload(client)).json()
    files = sorted((tmp_path / "voices").iterdir())
    assert [file.name for file in files] == [f"{made['id']}.flac", f"{made['id']}.json"]
    async with kit.client(speaking(), state_dir=tmp_path) as client:
        assert (await client.get("/v1/audio/voices/Zoë")).json() == made
        gone = await client.delete("/v1/audio/voices/Zoë")
        assert gone.json() == {"id": made["id"], "object": "audio.voice.deleted", "deleted": True}
        for method in ("GET", "DELETE"):
            assert (await client.request(method, f"/v1/audio/voices/{made['id']}")).status_code == 404
        assert (await upload(client)).status_code == 200
    assert len(list((tmp_path / "voices").iterdir())) == 2


async def test_parallel_uploads_lose_none(kit: Any, speaking: Any, tmp_path: Path) -> None:
    async with kit.client(speaking(), state_dir=tmp_path) as client:
        replies = await asyncio.gather(*(upload(client, f"v{number}") for number in range(12)))
        assert {reply.status_code for reply in replies} == {200}
        same = await asyncio.gather(*(upload(client, "same") for _ in range(4)))
    assert sorted(reply.status_code for reply in same) == [200, 409, 409, 409]
    assert len(VoiceStore(tmp_path / "voices", 256).list("")) == 13


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "a\\b", "..", ".hidden", "%2e%2e%2fx", "a\0b", "a\nb", "", "x" * 129, "C:x"],
)
async def test_names_that_could_be_paths_are_refused(kit: Any, speaking: Any, name: str, tmp_path: Path) -> None:
    async with kit.client(speaking(), state_dir=tmp_path) as client:
        reply = await upload(client, name)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "name")
    assert list((tmp_path / "voices").iterdir()) == []


@pytest.mark.parametrize("path", ["%2e%2e", "..%00", "a%5cb", "%252e%252e", "..%2f..%2fetc%2fpasswd"])
async def test_no_path_reaches_a_file(kit: Any, speaking: Any, path: str) -> None:
    async with kit.client(speaking()) as client:
        for method in ("GET", "DELETE"):
            reply = await client.request(method, f"/v1/audio/voices/{path}")
            assert reply.status_code in (400, 404, 405), reply.text


@pytest.mark.parametrize(
    ("fields", "files", "param"),
    [
        ({}, {"audio_sample": b"x"}, "name"),
        ({"name": "a"}, {}, "audio_sample"),
        ({"name": "a", "audio_sample": "text"}, {}, "audio_sample"),
        ({"name": "a"}, {"audio_sample": b"not a sound"}, "audio_sample"),
        ({"name": "a"}, {"audio_sample": pickle.dumps({"weights": [1.0]})}, "audio_sample"),
        ({"name": "a"}, {"audio_sample": b"PK\3\4" + bytes(64)}, "audio_sample"),
        ({"name": "a"}, {"audio_sample": b""}, "audio_sample"),
        ({"name": "a"}, {"file": b"x", "audio_sample": b"x"}, "file"),
        ({"name": "a", "text": "x", "ref_text": "x"}, {"file": b"x"}, "ref_text"),
        ({"name": "a", "language": "x" * 36}, {"file": b"x"}, "language"),
        ({"name": "a", "text": "x" * 32_769}, {"file": b"x"}, "text"),
        ({"name": "a", "type": "prompt", "prompt": "x"}, {"file": b"x"}, "prompt"),
        ({"name": "a", "type": "prompt"}, {"file": b"x"}, "type"),
        ({"name": "a", "nam": "x"}, {"file": b"x"}, "nam"),
        ({"name": "ann"}, {"file": wav()}, "name"),
        ({"name": "default"}, {"file": wav()}, "name"),
    ],
)
async def test_wrong_uploads_name_the_field(
    kit: Any, speaking: Any, fields: dict[str, str], files: dict[str, bytes], param: str
) -> None:
    """What is no sound is not opened as anything else."""
    parts = {name: ("x.wav", data) for name, data in files.items()} or {"": ("", b"")}
    async with kit.client(speaking()) as client:
        if not files:
            form = [(name, (None, value)) for name, value in fields.items()]
            reply = await client.post("/v1/audio/voices", files=form)
        else:
            reply = await client.post("/v1/audio/voices", data=fields, files=parts)
        assert (reply.status_code in (400, 409, 415), reply.json()["error"]["param"]) == (True, param), reply.text
        assert len((await client.get("/v1/audio/voices")).json()["data"]) == 2


async def test_a_body_that_is_no_form_is_told_so(kit: Any, speaking: Any) -> None:
    async with kit.client(speaking()) as client:
        assert (await client.post("/v1/audio/voices", json={"name": "a"})).status_code == 415
        torn = await client.post(
            "/v1/audio/voices", content=b"--x\r\nnonsense", headers={"content-type": "multipart/form-data; boundary=x"}
        )
        assert torn.status_code == 400


async def test_limits_are_named(kit: Any, speaking: Any) -> None:
    async with kit.client(speaking(), max_voices=1, max_voice_s=0.5) as client:
        long = await upload(client, data=wav(0.6))
        assert (long.status_code, long.json()["error"]["code"]) == (400, "audio_too_long")
        assert (await upload(client)).status_code == 200
        more = await upload(client, "other")
        assert (more.status_code, more.json()["error"]["code"]) == (400, "too_many_voices")


async def test_a_model_s_own_voice_cannot_be_deleted(kit: Any, speaking: Any) -> None:
    async with kit.client(speaking()) as client:
        assert (await client.delete("/v1/audio/voices/ann")).status_code == 400


# --- the store --------------------------------------------------------------------------------------------------------


def quiet() -> Audio:
    """16-bit steps of the smallest kind, and the lowest value that there is."""
    samples = np.tile(np.array([1, -1, 2, -2], np.float32) / 32768, 100)
    samples[7] = -1.0
    return Audio(samples, 24_000)


@pytest.mark.parametrize("on_disk", [True, False])
async def test_a_quiet_clip_is_kept_as_it_is(on_disk: bool, tmp_path: Path) -> None:
    store = VoiceStore(tmp_path if on_disk else None, 4)
    voice = await store.add("", "quiet", quiet(), "hush", None)
    sample = await store.sample(voice)
    np.testing.assert_array_equal(sample.audio.samples, quiet().samples)
    assert (sample.audio.rate, sample.text, sample.id) == (24_000, "hush", voice.sample)


async def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    store = VoiceStore(tmp_path, 4)
    voice = await store.add("one", "a", quiet(), "", None)
    await store.add("two", "a", quiet(), "", None)
    assert store.find("two", voice.id) is None
    assert [v.tenant for v in store.list("two")] == ["two"]
    with pytest.raises(RequestError, match="no uploaded voice"):
        await store.delete("two", voice.id)
    assert VoiceStore(tmp_path, 4).find("one", "a") == voice


async def test_what_was_not_finished_is_cleared_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = VoiceStore(tmp_path, 4)
    voice = await store.add("", "a", quiet(), "", None)
    (tmp_path / "voice_half.flac").write_bytes(b"half")
    (tmp_path / "voice_x.json.tmp").write_bytes(b"{")
    (tmp_path / "voice_bad.json").write_bytes(b"{")
    (tmp_path / "other.txt").write_text("not ours")
    assert [v.id for v in VoiceStore(tmp_path, 4).list("")] == [voice.id]
    assert "voice_bad.json" in caplog.text
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {f"{voice.id}.flac", f"{voice.id}.json", "voice_bad.json", "other.txt"}


async def test_a_disk_that_is_full_leaves_no_half_voice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = VoiceStore(tmp_path, 4)
    monkeypatch.setattr("mstar.files.os.fsync", _full)
    with pytest.raises(OSError, match="full"):
        await store.add("", "a", quiet(), "", None)
    assert (store.list(""), list(tmp_path.iterdir())) == ([], [])


def _full(descriptor: int) -> None:
    raise OSError(28, "the disk is full")


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="voices cannot be kept"):
        VoiceStore(tmp_path / "file" / "voices", 4)
