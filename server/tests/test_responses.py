from __future__ import annotations

import contextlib
import json

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mstar.spec.errors import RequestError
from mstar.spec.processor import ReasoningDelta, TextDelta, ToolCallDelta
from mstar.spec.request import TokenLogprob
from mstar.spec.tasks import Text
from mstar_server.openai.responses.store import ResponseStore, Stored

URL = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)


def body(**changes):
    return {"model": "tiny", "input": "hi", **changes}


def user(*parts, **changes):
    return {"input": [{"role": "user", "content": list(parts)}], **changes}


def events(text):
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(found)
        EVENT.validate_python(event)
        found.append(event)
    return found


async def test_a_whole_response_has_openais_shape(kit):
    async with kit.client(kit.Service(kit.HELLO)) as client:
        reply = await client.post(URL, json=body(metadata={"a": "b"}))
    assert reply.status_code == 200, reply.text
    response = Response.model_validate(reply.json())
    assert response.output_text == "Hello 🙂"
    assert response.status == "completed"
    assert response.metadata == {"a": "b"}
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (5, 5, 10)


async def test_a_stream_ends_with_the_response_that_a_whole_answer_is(kit):
    script = (
        ReasoningDelta("Let me ", (1,)), ReasoningDelta("see.", (2,)), *kit.HELLO,
        ToolCallDelta(0, "look", ""), ToolCallDelta(0, "", '{"a"'), ToolCallDelta(0, "", ": 1}"),
        ToolCallDelta(1, "go", "{}"),
    )  # fmt: skip
    async with kit.client(kit.Service(script)) as client:
        whole = (await client.post(URL, json=body())).json()
        found = events((await client.post(URL, json=body(stream=True))).text)
    assert [e["type"] for e in found[:3]] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert found[-1]["type"] == "response.completed"
    final = found[-1]["response"]

    def plain(item):
        return {k: v for k, v in item.items() if k not in ("id", "call_id")}

    assert [plain(item) for item in final["output"]] == [plain(item) for item in whole["output"]]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert final["output"][2]["arguments"] == '{"a": 1}'
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    text = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
    assert text == "Hello 🙂"
    done = [e["item"] for e in found if e["type"] == "response.output_item.done"]
    assert done == final["output"]
    assert all(item["status"] == "completed" for item in done)


async def test_an_answer_that_was_cut_is_incomplete(kit):
    service = kit.Service(kit.HELLO)
    service.script = (*kit.HELLO,)
    async with kit.client(service) as client:
        original = service.generate

        async def cut(*arguments, **more):
            answer = await original(*arguments, **more)
            answer.reason = "length"
            return answer

        service.generate = cut
        whole = (await client.post(URL, json=body(max_output_tokens=5))).json()
        found = events((await client.post(URL, json=body(max_output_tokens=5, stream=True))).text)
    assert whole["status"] == found[-1]["response"]["status"] == "incomplete"
    assert found[-1]["type"] == "response.incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert service.tasks[0].knobs.max_tokens == 5


async def test_a_fault_in_the_middle_is_a_failed_response(kit):
    async with kit.client(kit.Service((TextDelta("Hel", (1,)), RequestError("no more", status=500)))) as client:
        found = events((await client.post(URL, json=body(stream=True))).text)
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"]["message"] == "no more"
    assert found[-1]["response"]["output"][0]["status"] == "incomplete"


async def test_conversations_go_on_from_what_is_stored(kit):
    service = kit.Service(kit.HELLO)
    async with kit.client(service) as client:
        first = (await client.post(URL, json=body(input="one", instructions="Be kind."))).json()
        second = (await client.post(URL, json=body(input="two", previous_response_id=first["id"]))).json()
        third = await client.post(URL, json=body(input="three", previous_response_id=second["id"]))
        again = (await client.get(f"{URL}/{first['id']}")).json()
        items = (await client.get(f"{URL}/{first['id']}/input_items")).json()
    assert third.status_code == 200
    said = [(m.role, m.content) for m in service.tasks[2].messages]
    hello = (Text("Hello 🙂"),)
    assert said == [
        ("user", (Text("one"),)), ("assistant", hello), ("user", (Text("two"),)), ("assistant", hello),
        ("user", (Text("three"),)),
    ]  # fmt: skip
    assert service.tasks[0].messages[0].role == "system"
    assert again == first
    assert items["data"][0]["content"] == [{"type": "input_text", "text": "one"}]
    assert (items["has_more"], items["first_id"]) == (False, items["data"][0]["id"])


async def test_what_is_not_stored_or_was_deleted_is_not_found(kit):
    async with kit.client(kit.Service(kit.HELLO)) as client:
        kept = (await client.post(URL, json=body())).json()["id"]
        not_kept = (await client.post(URL, json=body(store=False))).json()["id"]
        assert (await client.delete(f"{URL}/{kept}")).json() == {"id": kept, "object": "response", "deleted": True}
        for gone in (kept, not_kept):
            for reply in (
                await client.get(f"{URL}/{gone}"),
                await client.get(f"{URL}/{gone}/input_items"),
                await client.delete(f"{URL}/{gone}"),
                await client.post(URL, json=body(previous_response_id=gone)),
            ):
                assert (reply.status_code, reply.json()["error"]["code"]) == (404, "response_not_found")


async def test_a_tools_result_answers_the_call_before_it(kit):
    service = kit.Service(kit.HELLO)
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": "noon"},
    ]
    async with kit.client(service) as client:
        reply = await client.post(URL, json=body(input=given))
    assert reply.status_code == 200, reply.text
    user, assistant, *tools = service.tasks[0].messages
    assert (user.role, assistant.role) == ("user", "assistant")
    assert [call["id"] for call in assistant.tool_calls] == ["c1", "c2"]
    assert [(m.role, m.tool_call_id, m.content) for m in tools] == [
        ("tool", "c1", (Text("sunny"),)), ("tool", "c2", (Text("noon"),)),
    ]  # fmt: skip


async def test_log_probabilities_are_included_when_asked_for(kit):
    reported = TextDelta("Hel", (1,), (TokenLogprob(token=1, logprob=-0.5, top=[(1, -0.5)]),))
    async with kit.client(kit.Service((reported,))) as client:
        ask = body(include=["message.output_text.logprobs"], top_logprobs=1)
        whole = (await client.post(URL, json=ask)).json()
        found = events((await client.post(URL, json={**ask, "stream": True})).text)
    entries = whole["output"][0]["content"][0]["logprobs"]
    assert entries[0]["token"] == "Hel"
    assert next(e for e in found if e["type"] == "response.output_text.delta")["logprobs"] == entries


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        (user({"type": "inputtext", "text": "a"}), "input[0].content[0].type"),
        (user({"type": "input_image", "file_id": "f"}), "input[0].content[0].file_id"),
        (user({"type": "input_image", "image_url": "data:,x"}, instructions="x"), "input[0].content[0].image_url"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprob"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temprature": 1}, "temprature"),
        ({"text": {"fromat": {}}}, "text.fromat"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
)  # fmt: skip
async def test_wrong_fields_are_named(kit, wrong, param):
    service = kit.Service(kit.HELLO)
    async with kit.client(service) as client:
        reply = await client.post(URL, json=body(**wrong))
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param, reply.text
    assert not service.tasks


async def test_a_tenants_responses_are_its_own(tmp_path):
    store = ResponseStore(tmp_path / "deep" / "r.sqlite3", most=10, age_s=100)
    await store.put("ann", Stored("resp_1", None, [], {"output": []}))
    for tenant, there in (("ann", True), ("bob", False)):
        if there:
            assert (await store.get(tenant, "resp_1")).id == "resp_1"
            continue
        with pytest.raises(RequestError) as caught:
            await store.get(tenant, "resp_1")
        assert caught.value.status == 404
        with pytest.raises(RequestError):
            await store.delete(tenant, "resp_1")
    store.close()
    again = ResponseStore(tmp_path / "deep" / "r.sqlite3", most=10, age_s=100)
    assert (await again.get("ann", "resp_1")).response == {"output": []}
    again.close()


async def test_the_oldest_make_room(tmp_path):
    store = ResponseStore(None, most=3, age_s=100)
    for number in range(5):
        await store.put("", Stored(f"resp_{number}", None, [], {"output": []}))
    for number in range(2):
        with pytest.raises(RequestError):
            await store.get("", f"resp_{number}")
    assert (await store.get("", "resp_2")).id == "resp_2"
    store.close()


async def test_what_is_too_old_is_gone():
    store = ResponseStore(None, most=3, age_s=-1)
    await store.put("", Stored("resp_1", None, [], {"output": []}))
    with pytest.raises(RequestError):
        await store.get("", "resp_1")
    store.close()


async def test_nobodys_responses_make_room_for_anothers():
    store = ResponseStore(None, most=3, age_s=100)
    for name, tenant in (("a", "ann"), *((f"b{number}", "bob") for number in range(5))):
        await store.put(tenant, Stored(name, None, [], {"id": name}))
    assert (await store.get("ann", "a")).id == "a"
    left = []
    for number in range(5):
        with contextlib.suppress(RequestError):
            left.append((await store.get("bob", f"b{number}")).id)
    assert left == ["b3", "b4"]
    store.close()
