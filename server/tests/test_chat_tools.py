"""Calls of tools and thoughts in chats: what clients send, and what they are sent."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mstar.spec.processor import ReasoningDelta, TextDelta, ToolCallDelta

URL = "/v1/chat/completions"
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALLS = (
    TextDelta("So. ", (1,)), ToolCallDelta(0, "look", "", (2,)), ToolCallDelta(0, "", '{"a"', (3,)),
    ToolCallDelta(0, "", ": 1}", (4,)), ToolCallDelta(1, "go", "{}", (5,)),
)  # fmt: skip


def chunks(text):
    *body, last = text.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    found = [json.loads(line.removeprefix("data: ")) for line in body]
    for chunk in found:
        ChatCompletionChunk.model_validate(chunk)
    return found


async def test_calls_come_whole(kit, chat):
    async with kit.client(kit.Service(CALLS)) as client:
        reply = await client.post(URL, json=chat(tools=[LOOK]))
    choice = ChatCompletion.model_validate_json(reply.text).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So. "
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        ("look", '{"a": 1}'),
        ("go", "{}"),
    ]
    assert len({c.id for c in choice.message.tool_calls}) == 2


async def test_a_call_alone_has_no_content(kit, chat):
    async with kit.client(kit.Service(CALLS[1:])) as client:
        message = (await client.post(URL, json=chat(tools=[LOOK]))).json()["choices"][0]["message"]
    assert message["content"] is None


async def test_streamed_calls_join_to_the_whole(kit, chat):
    async with kit.client(kit.Service(CALLS)) as client:
        parts = chunks((await client.post(URL, json=chat(tools=[LOOK], stream=True))).text)
    calls = {}
    for part in parts:
        delta = part["choices"][0]["delta"]
        assert delta.get("role") is not None or any(delta.get(k) is not None for k in ("content", "tool_calls"))
        for piece in delta.get("tool_calls", ()):
            call = calls.setdefault(piece["index"], {"id": piece.get("id"), "name": "", "arguments": ""})
            assert ("id" in piece) == ("name" in piece["function"])
            call["name"] += piece["function"].get("name", "")
            call["arguments"] += piece["function"]["arguments"]
    assert [(c["name"], c["arguments"]) for c in calls.values()] == [("look", '{"a": 1}'), ("go", "{}")]
    assert all(call["id"].startswith("call_") for call in calls.values())
    assert "".join(p["choices"][0]["delta"].get("content") or "" for p in parts) == "So. "
    assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_a_call_that_was_cut_ends_with_length(kit, chat):
    service = kit.Service(CALLS[:3])
    original = service.generate

    async def cut(*arguments, **more):
        answer = await original(*arguments, **more)
        answer.reason = "length"
        return answer

    service.generate = cut
    async with kit.client(service) as client:
        parts = chunks((await client.post(URL, json=chat(tools=[LOOK], stream=True))).text)
    assert parts[-1]["choices"][0]["finish_reason"] == "length"


async def test_thoughts_are_apart_from_the_content(kit, chat):
    script = (ReasoningDelta("Let me ", (1,)), ReasoningDelta("see.", (2,)), TextDelta("Yes.", (3,)))
    async with kit.client(kit.Service(script)) as client:
        whole = (await client.post(URL, json=chat())).json()
        ask = chat(stream=True, stream_options={"include_usage": True})
        parts = chunks((await client.post(URL, json=ask)).text)
    assert whole["choices"][0]["message"]["content"] == "Yes."
    assert whole["choices"][0]["message"]["reasoning_content"] == "Let me see."
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
    assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
    deltas = [choice["delta"] for part in parts for choice in part["choices"]]
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "Let me see."
    assert "".join(d.get("content") or "" for d in deltas) == "Yes."
    assert parts[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


async def test_what_a_client_may_say_of_tools_reaches_the_task(kit, chat):
    service = kit.Service(kit.HELLO)
    one = {"type": "function", "function": {"name": "look"}}
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "seen"},
    ]  # fmt: skip
    async with kit.client(service) as client:
        for fields in (
            {"tools": []},
            {"tools": [LOOK], "tool_choice": "auto"},
            {"tools": [LOOK], "tool_choice": "none"},
            {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False},
            {"tools": [LOOK], "tool_choice": one},
        ):
            reply = await client.post(URL, json=chat(messages=turns, **fields))
            assert reply.status_code == 200, reply.text
    assert [task.tool_choice for task in service.tasks] == [None, None, "none", "required", one]
    assert [len(task.tools) for task in service.tasks] == [0, 1, 1, 1, 1]
    assert [task.parallel_tool_calls for task in service.tasks] == [True, True, True, False, True]
    assert service.tasks[0].messages[1].reasoning == "hm"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [LOOK, LOOK]}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [LOOK] * 129}, "tools"),
        ({"tools": [LOOK], "tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": [LOOK], "tool_choice": {"type": "function", "function": {"name": "lok"}}},
            "tool_choice.function.name",
        ),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    ],
)
async def test_wrong_tools_are_named(kit, chat, fields, param):
    service = kit.Service(kit.HELLO)
    async with kit.client(service) as client:
        reply = await client.post(URL, json=chat(**fields))
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param, reply.text
    assert not service.tasks
