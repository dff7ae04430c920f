"""Models that are loaded on demand: one load for all who ask, a quick no after a failure, room for one another."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from mstar.cluster.base import Phase
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.knobs import SamplingKnobs
from mstar.spec.processor import Voice
from mstar.spec.tasks import GenerateTask
from mstar_server.on_demand import Shelf
from mstar_server.options import ServerOptions

CHAT = "/v1/chat/completions"
LIMIT_S = 5.0


async def until(condition) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.005)


class Loads:
    """Makes services that load until they are let, and remembers them."""

    def __init__(self, kit, at_once: bool = True):
        self.kit, self.at_once, self.made, self.error = kit, at_once, [], None

    def __call__(self):
        service = self.kit.Service(self.kit.HELLO, key=self.key)
        service.start_error = self.error
        if not self.at_once:
            service.phase = Phase(name="weights", progress=0.5)
        self.made.append(service)
        return service


@pytest.fixture
async def house(kit):
    """Starts a server's application with models on demand; gives the client and the loads by key."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*keys, resident=(), at_once=True, peeks=(), **options):
            shelf = Shelf(ServerOptions(**options))
            loads = {key: Loads(kit, at_once) for key in keys}
            for key, load in loads.items():
                load.key = key
            models = [shelf.add(kit.make_spec(key=key), loads[key], *peeks) for key in keys]
            for model in models:
                stack.push_async_callback(model.stop)
            client = await stack.enter_async_context(kit.client(*resident, *models, **options))
            return client, loads, models

        yield start


def states(listing) -> dict[str, str]:
    return {model["id"]: model["state"] for model in listing.json()["data"]}


async def test_the_first_request_loads_and_waits(house, chat):
    client, loads, _ = await house("a", "b")
    assert (await client.get("/health/ready")).status_code == 200, "nothing is needed for the server to be ready"
    assert states(await client.get("/v1/models")) == {"a": "unloaded", "b": "unloaded"}
    bad = await client.post(CHAT, json=chat(model="a", temperature=-1))
    assert (bad.status_code, loads["a"].made) == (400, []), "what is not valid loads nothing"
    reply = await client.post(CHAT, json=chat(model="a", logprobs=True))
    assert reply.json()["choices"][0]["message"]["content"] == "Hello 🙂"
    assert states(await client.get("/v1/models")) == {"a": "loaded", "b": "unloaded"}
    missing = await client.post(CHAT, json=chat(model="aa"))
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    health = (await client.get("/health")).json()
    assert (health["status"], health["models"]["b"]["phase"]) == ("ready", "unloaded")


async def test_many_first_requests_are_one_load(house, chat):
    client, loads, _ = await house("a", at_once=False)
    asked = [asyncio.create_task(client.post(CHAT, json=chat(model="a", stream=bool(n % 2)))) for n in range(6)]
    await until(lambda: loads["a"].made)
    asked[0].cancel()  # one of them leaves: the load is not its own
    assert states(await client.get("/v1/models")) == {"a": "loading"}
    loads["a"].made[0].started.set()
    replies = await asyncio.gather(*asked[1:])
    assert [reply.status_code for reply in replies] == [200] * 5
    assert len(loads["a"].made) == 1
    assert len(loads["a"].made[0].answers) == 5


async def test_a_load_that_takes_long_is_a_503_with_its_phase(house, chat):
    client, loads, _ = await house("a", at_once=False, load_wait_s=0.05)
    first = await client.post(CHAT, json=chat(model="a"))
    limited = await client.post(CHAT, json=chat(model="a", stream=True), headers={"X-Request-Timeout": "0.01"})
    for reply in (first, limited):
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
        assert "weights (50%)" in reply.json()["error"]["message"]
    loads["a"].made[0].started.set()
    await asyncio.sleep(0.01)
    assert (await client.post(CHAT, json=chat(model="a"))).status_code == 200
    assert len(loads["a"].made) == 1


@pytest.mark.parametrize("error", [SetupError("no weights there"), ZeroDivisionError("oops")])
async def test_a_load_that_fails_is_not_hammered(house, chat, monkeypatch, caplog, error):
    client, loads, models = await house("a")
    loads["a"].error = error
    replies = [await client.post(CHAT, json=chat(model="a")) for _ in range(20)]
    replies += await asyncio.gather(*(client.post("/generate", json={"model": "a"}) for _ in range(20)))
    for reply in replies:
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "load_failed")
        assert str(error) in reply.json()["error"]["message"]
        assert 1 <= int(reply.headers["retry-after"]) <= 5
    assert len(loads["a"].made) == 1
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    assert states(await client.get("/v1/models")) == {"a": "failed"}
    forced = await client.post("/v1/models/a/load")
    assert (forced.status_code, len(loads["a"].made)) == (503, 2)
    assert int(forced.headers["retry-after"]) > 5, "the pause has doubled"
    loads["a"].error = None
    models[0]._retry_at = 0.0  # it has passed
    assert (await client.post(CHAT, json=chat(model="a"))).status_code == 200
    assert states(await client.get("/v1/models")) == {"a": "loaded"}


async def test_unload_and_load_by_hand(house, kit, chat):
    resident = kit.Service(kit.HELLO)
    client, loads, _ = await house("org/a", resident=[resident])
    assert (await client.post("/v1/models/org/a/load")).json()["state"] == "loaded"
    service = loads["org/a"].made[0]
    release = asyncio.Event()
    service.script = [release]
    request = asyncio.create_task(client.post(CHAT, json=chat(model="org/a")))
    await until(lambda: service.answers)
    used = await client.post("/v1/models/org/a/unload")
    release.set()
    await request
    service.sessions = 1
    kept = await client.post("/v1/models/org/a/unload")
    for reply in (used, kept):
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "model_in_use")
    assert not service.stopped
    service.sessions = 0
    assert (await client.post("/v1/models/org/a/unload")).json()["state"] == "unloaded"
    assert service.stopped
    assert (await client.post("/v1/models/org/a/unload")).status_code == 200
    assert (await client.post(CHAT, json=chat(model="org/a"))).status_code == 200
    assert len(loads["org/a"].made) == 2
    assert (await client.post("/v1/models/tiny/unload")).json()["error"]["code"] == "always_loaded"
    assert (await client.post("/v1/models/tiny/load")).json()["state"] == "loaded"
    assert (await client.post("/v1/models/x/load")).status_code == 404


@pytest.mark.parametrize("idle", [0.0, 0.2])
async def test_unloaded_when_idle(house, chat, idle):
    client, loads, _ = await house("a", idle_unload_s=idle)
    assert (await client.post(CHAT, json=chat(model="a"))).status_code == 200
    first = loads["a"].made[0]
    first.sessions = 1
    await asyncio.sleep(idle + 0.3)
    assert not first.stopped, "a session is kept"
    release = asyncio.Event()
    first.script = [release]
    request = asyncio.create_task(client.post(CHAT, json=chat(model="a")))
    await until(lambda: len(first.answers) == 2)
    first.sessions = 0
    await asyncio.sleep(idle + 0.3)
    assert not first.stopped, "a request runs"
    release.set()
    assert (await request).status_code == 200
    await until(lambda: first.stopped)
    assert states(await client.get("/v1/models")) == {"a": "unloaded"}
    assert (await client.post(CHAT, json=chat(model="a"))).status_code == 200


async def test_a_model_that_is_held_is_not_unloaded(house, kit):
    """A clip's windows are requests, and between two of them it is still in use."""
    _, loads, (model,) = await house("a", idle_unload_s=0.0)
    task = GenerateTask(knobs=SamplingKnobs(), want=("text",), text="x")
    hold = model.hold()
    assert [d.text async for d in await hold.generate(task)] == [d.text for d in kit.HELLO]
    with pytest.raises(RequestError, match="in use"):
        await model.unload()
    await asyncio.sleep(0.2)
    (service,) = loads["a"].made
    assert not service.stopped
    assert len(service.holds) == 1
    hold.close()
    hold.close()
    assert (service.holds, model.open_requests) == ([], 0)
    await until(lambda: service.stopped)


async def test_never_unloaded_by_default(house, chat):
    client, loads, _ = await house("a")
    assert (await client.post(CHAT, json=chat(model="a"))).status_code == 200
    await asyncio.sleep(0.3)
    assert not loads["a"].made[0].stopped


async def test_a_request_that_comes_while_it_is_unloaded_loads_it_again(house, chat):
    client, loads, models = await house("a")
    await client.post("/v1/models/a/load")
    first, stopping = loads["a"].made[0], asyncio.Event()
    stop = first.stop

    async def slow_stop():
        await stopping.wait()
        await stop()

    first.stop = slow_stop
    unloading = asyncio.create_task(client.post("/v1/models/a/unload"))
    await until(lambda: models[0].phase.name == "unloading")
    request = asyncio.create_task(client.post(CHAT, json=chat(model="a")))
    await asyncio.sleep(0.02)
    assert len(loads["a"].made) == 1, "not before the first has given its memory back"
    stopping.set()
    assert (await request).status_code == 200
    assert (await unloading).status_code == 200
    assert len(loads["a"].made) == 2


async def test_the_one_used_longest_ago_makes_room(house, chat):
    client, loads, _ = await house("a", "b", "c", max_loaded=2)
    for key in ("a", "b", "a", "c"):
        assert (await client.post(CHAT, json=chat(model=key))).status_code == 200
    assert states(await client.get("/v1/models")) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
    release = asyncio.Event()
    running = []
    for key in ("a", "c"):
        loads[key].made[0].script = [release]
        running.append(asyncio.create_task(client.post(CHAT, json=chat(model=key))))
    await until(lambda: all(len(loads[key].made[0].answers) > 1 for key in "ac"))
    refused = await client.post(CHAT, json=chat(model="b"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_room")
    assert refused.headers["retry-after"] == "5"
    release.set()
    await asyncio.gather(*running)
    assert (await client.post(CHAT, json=chat(model="b"))).status_code == 200, "it was no failure to remember"


async def test_stopping_while_it_loads_ends_those_who_wait(house, chat):
    client, loads, models = await house("a", at_once=False)
    request = asyncio.create_task(client.post(CHAT, json=chat(model="a")))
    await until(lambda: loads["a"].made)
    await models[0].stop()
    reply = await asyncio.wait_for(request, LIMIT_S)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "not_ready")


async def test_a_model_that_is_being_unloaded_makes_room(house, chat):
    client, loads, models = await house("a", "b", max_loaded=1)
    await client.post("/v1/models/a/load")
    first, stopping = loads["a"].made[0], asyncio.Event()
    first.stop = stopping.wait
    unloading = asyncio.create_task(client.post("/v1/models/a/unload"))
    await until(lambda: models[0].phase.name == "unloading")
    request = asyncio.create_task(client.post(CHAT, json=chat(model="b")))
    await asyncio.sleep(0.02)
    assert loads["b"].made == []
    stopping.set()
    assert (await request).status_code == 200
    assert (await unloading).status_code == 200


async def voices(client) -> list[str]:
    return [voice["id"] for voice in (await client.get("/v1/audio/voices")).json()["data"]]


async def test_voices_are_listed_before_their_model_is_loaded_and_after(kit, house, chat):
    asked = []

    def peek():
        asked.append(1)
        return kit.Service().processor

    client, loads, (model,) = await house("big", peeks=(peek,))
    assert await voices(client) == await voices(client) == ["ann", "bob"]
    assert (len(asked), loads["big"].made) == (1, []), "looked for once, and nothing is loaded for it"
    assert (await client.get("/v1/audio/voices/ann")).json()["models"] == ["big"]
    assert (await client.post(CHAT, json=chat(model="big"))).status_code == 200
    loads["big"].made[0].processor.voices = lambda: (Voice("carl"),)
    assert await voices(client) == ["carl"], "whatever the loaded model says"
    await model.unload()
    assert await voices(client) == ["carl"]
    assert len(asked) == 1


async def test_a_model_whose_weights_are_not_there_has_no_voices_yet(kit, house):
    there = []
    client, loads, _ = await house("big", peeks=(lambda: kit.Service().processor if there else None,))
    assert await voices(client) == []
    there.append("weights")
    assert await voices(client) == ["ann", "bob"]
    assert loads["big"].made == []


async def test_a_processor_that_is_broken_costs_only_its_own_voices(kit, house, caplog):
    def peek():
        raise SetupError("the tokenizer is missing")

    client, _, _ = await house("big", peeks=(peek,), resident=(kit.Service(key="small"),))
    assert await voices(client) == await voices(client) == ["ann", "bob"]
    assert caplog.text.count("the tokenizer is missing") == 1


async def test_a_voice_of_a_model_that_is_not_loaded_cannot_be_uploaded_again(kit, house):
    client, _, _ = await house("big", peeks=(lambda: kit.Service().processor,))
    reply = await client.post(
        "/v1/audio/voices", data={"name": "ann"}, files={"audio_sample": ("a.wav", b"RIFF", "audio/wav")}
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "voice_exists")
