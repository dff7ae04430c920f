"""Sessions on a real server, the model's part played by a script: what a client may send, and all that can go wrong."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
from websockets.asyncio.client import connect

from mstar.spec.errors import RequestError
from mstar.spec.model import LiveInput
from mstar.spec.processor import AudioDelta, TextDelta, ToolCallDelta
from mstar.spec.request import TokenLogprob

LIMIT_S = 10.0
SPEECH = np.random.default_rng(1).normal(0, 0.1, 12_000)
TRANSCRIPT = "conversation.item.input_audio_transcription"
MANUAL = {"audio": {"input": {"turn_detection": None}}}


def pcm(samples) -> str:
    return base64.b64encode((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()).decode()


class Talk:
    def __init__(self, socket):
        self.socket = socket

    async def say(self, kind, **fields) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def hear(self) -> dict:
        async with asyncio.timeout(LIMIT_S):
            event = json.loads(await self.socket.recv())
        assert event["event_id"]
        return event

    async def until(self, *kinds) -> list[dict]:
        events = [await self.hear()]
        while events[-1]["type"] not in kinds:
            events.append(await self.hear())
        return events

    async def update(self, **session) -> dict:
        await self.say("session.update", session=session)
        return (await self.until("session.updated", "error"))[-1]

    async def append(self, samples) -> None:
        for start in range(0, len(samples), 4800):
            await self.say("input_audio_buffer.append", audio=pcm(samples[start : start + 4800]))


@pytest.fixture
def talk(kit):
    @contextlib.asynccontextmanager
    async def opened(*services, query="?model=tiny", headers=None, subprotocols=None, **options):
        async with (
            kit.server(*services, **options) as address,
            connect(
                f"ws://{address}/v1/realtime{query}",
                additional_headers=headers,
                subprotocols=subprotocols,
                max_size=None,
            ) as socket,
        ):
            yield Talk(socket)

    return opened


HELLO = (TextDelta("Hel", (1,)), TextDelta("lo", (2,)))
WELL_SAID = (TextDelta("well"), TextDelta(" said"))


def chat(kit, script=HELLO, **more):
    facts = {"abilities": ("chat",), "outputs": ("text",)} | more
    return kit.Service(script, **facts)


def scribe(kit, script=WELL_SAID, **more):
    return kit.Service(script, **({"key": "scribe", "abilities": ("transcription",)} | more))


def user(text: str) -> dict:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def kinds(events) -> list[str]:
    return [event["type"] for event in events]


async def test_a_text_is_answered(kit, talk):
    tiny = chat(kit)
    async with talk(tiny) as client:
        created = await client.hear()
        assert (created["type"], created["session"]["type"]) == ("session.created", "realtime")
        assert created["session"]["output_modalities"] == ["text"]
        await client.update(instructions="Be brief.", max_output_tokens=9)
        await client.say("conversation.item.create", item=user("hi"))
        added, done = await client.hear(), await client.hear()
        assert kinds([added, done]) == ["conversation.item.added", "conversation.item.done"]
        await client.say("response.create")
        events = await client.until("response.done")
    assert kinds(events) == [
        "response.created", "response.output_item.added", "conversation.item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.delta", "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "conversation.item.done", "response.done",
    ]  # fmt: skip
    assert events[2]["previous_item_id"] == added["item"]["id"]
    response = events[-1]["response"]
    assert (response["status"], response["output"][0]["content"]) == (
        "completed",
        [{"type": "output_text", "text": "Hello"}],
    )
    assert (response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == (5, 2)
    (task,) = tiny.tasks
    assert [(m.role, m.content[0].text) for m in task.messages] == [("system", "Be brief."), ("user", "hi")]
    assert (task.knobs.max_tokens, task.want) == (9, ("text",))


async def test_speech_is_answered_with_speech(kit, talk):
    sound = AudioDelta(np.full(800, 0.25, np.float32), 8000)
    tiny = chat(kit, [TextDelta("Hi", (1,)), sound, sound], outputs=("text", "audio"))
    async with talk(tiny) as client:
        assert (await client.hear())["session"]["output_modalities"] == ["audio"]
        await client.update(**MANUAL)
        await client.append(np.tile(SPEECH, 12))  # six seconds
        await client.say("input_audio_buffer.commit")
        assert kinds(await client.until("conversation.item.done"))[0] == "input_audio_buffer.committed"
        await client.say("response.create")
        events = await client.until("response.done")
    audio = b"".join(base64.b64decode(e["delta"]) for e in events if e["type"] == "response.output_audio.delta")
    assert len(audio) == pytest.approx(2 * 4800, abs=8)
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_audio_transcript.delta") == "Hi"
    assert events[-1]["response"]["output"][0]["content"] == [{"type": "output_audio", "transcript": "Hi"}]
    (task,) = tiny.tasks
    assert task.want == ("text", "audio")
    (part,) = task.messages[0].content
    assert (len(part.samples), part.rate) == (144_000, 24_000)


async def test_turns_are_found_and_answered(kit, talk):
    tiny = chat(kit)
    async with talk(tiny) as client:
        await client.append(np.concatenate([np.zeros(24_000), SPEECH, np.zeros(24_000)]))
        events = await client.until("response.done")
        assert kinds(events)[1:4] == [
            "input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped", "input_audio_buffer.committed",
        ]  # fmt: skip
        assert events[1]["audio_start_ms"] == pytest.approx(700, abs=30)
        assert events[2]["audio_end_ms"] == pytest.approx(2000, abs=30)
        assert events[1]["item_id"] == events[3]["item_id"] == events[4]["item"]["id"]
    samples = tiny.tasks[0].messages[0].content[0].samples
    assert len(samples) / 24_000 == pytest.approx(1.3, abs=0.15)  # padding, speech, silence


async def test_speech_interrupts_the_answer(kit, talk):
    tiny = chat(kit, [TextDelta("Hel"), asyncio.Event()])
    async with talk(tiny) as client:
        await client.say("conversation.item.create", item=user("hi"))
        await client.say("response.create")
        await client.until("response.output_text.delta")
        await client.append(np.concatenate([np.zeros(12_000), SPEECH]))
        response = (await client.until("response.done"))[-1]["response"]
    assert (response["status"], response["status_details"]["reason"]) == ("cancelled", "turn_detected")
    assert response["output"][0]["status"] == "incomplete"
    assert tiny.answers[0].cancelled.is_set()


async def test_a_transcription_session_writes_down_and_never_answers(kit, talk):
    async with talk(scribe(kit), query="?intent=transcription&model=scribe") as client:
        assert (await client.hear())["session"]["type"] == "transcription"
        await client.update(type="transcription", audio={"input": {"turn_detection": None}})
        await client.append(SPEECH)
        await client.say("input_audio_buffer.commit")
        events = await client.until(f"{TRANSCRIPT}.completed")
        assert [e["delta"] for e in events if e["type"] == f"{TRANSCRIPT}.delta"] == ["well", " said"]
        assert (events[-1]["transcript"], events[-1]["usage"]) == ("well said", {"type": "duration", "seconds": 0.5})
        await client.say("response.create", event_id="mine")
        error = await client.hear()
        assert (error["type"], error["error"]["event_id"]) == ("error", "mine")
        await client.append(SPEECH)
        await client.say("input_audio_buffer.commit")
        assert (await client.until(f"{TRANSCRIPT}.completed"))[0]["previous_item_id"] == events[-1]["item_id"]


LOGPROBS = "item.input_audio_transcription.logprobs"
SPELLED = [
    TextDelta(text, (token,), (TokenLogprob(token=token, logprob=value),))
    for text, token, value in (("Hel", 1, -0.5), ("lo", 2, -1.5))
]
TOLD = [
    {"token": "Hel", "bytes": list(b"Hel"), "logprob": -0.5},
    {"token": "lo", "bytes": list(b"lo"), "logprob": -1.5},
]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("headers", [None, {"OpenAI-Beta": "realtime=v1"}], ids=["ga", "beta"])
async def test_log_probabilities_come_with_the_words_where_they_are_wanted(kit, talk, live, headers):
    abilities = ("realtime", "transcription") if live else ("transcription",)
    made = scribe(kit, SPELLED, abilities=abilities)
    async with talk(made, query="?intent=transcription&model=scribe", headers=headers) as client:
        for include in (None, [LOGPROBS], []):
            wish = {"turn_detection": None, "include": include} if headers else {**MANUAL, "include": include}
            kind = "transcription_session" if headers else "session"
            await client.say(f"{kind}.update", session={"type": "transcription", **wish})
            updated = (await client.until(f"{kind}.updated", "error"))[-1]
            assert updated["session"]["include"] == (include or None)
            await client.append(SPEECH)
            await client.say("input_audio_buffer.commit")
            events = await client.until(f"{TRANSCRIPT}.completed", f"{TRANSCRIPT}.failed")
            deltas = [event for event in events if event["type"] == f"{TRANSCRIPT}.delta"]
            told = [event.get("logprobs") for event in (*deltas, events[-1])]
            assert told == ([TOLD[:1], TOLD[1:], TOLD] if include else [None] * 3)
            assert made.tasks[-1].logprobs == (0 if include else None)


async def test_what_cannot_be_included_is_refused(kit, talk):
    plain = scribe(kit)
    plain.processor = SimpleNamespace(windows=plain.processor.windows)
    async with talk(plain, query="?model=scribe") as client:
        for include, param in (
            ([LOGPROBS], "session.include"),
            (["item.words"], "session.include[0]"),
            (LOGPROBS, "session.include"),
            ([1], "session.include"),
        ):
            event = await client.update(include=include)
            assert (event["type"], event["error"]["param"]) == ("error", param), event
        assert (await client.update(include=[]))["type"] == "session.updated"
        await client.update(**MANUAL)
        await client.append(SPEECH)
        await client.say("input_audio_buffer.commit")
        assert (await client.until(f"{TRANSCRIPT}.completed"))[-1]["transcript"] == "well said"


async def test_a_model_that_only_writes_down_makes_a_transcription_session(kit, talk):
    async with talk(scribe(kit), query="?model=scribe") as client:
        assert (await client.hear())["session"]["type"] == "transcription"
        error = await client.update(type="realtime")
        assert error["error"]["param"] == "session.type"


async def test_a_model_that_can_be_fed_with_speech_writes_down_live(kit, talk):
    more = asyncio.Event()
    fed = scribe(kit, (TextDelta("well"), more, TextDelta(" said")), live=(LiveInput("audio", "audio"),))
    async with talk(fed, query="?model=scribe") as client:
        assert (await client.hear())["session"]["type"] == "transcription"
        await client.update(**MANUAL)
        await client.append(SPEECH)
        (delta,) = await client.until(f"{TRANSCRIPT}.delta")  # before the turn is over
        await client.say("input_audio_buffer.commit")
        more.set()
        events = await client.until(f"{TRANSCRIPT}.completed")
        assert (events[-1]["transcript"], events[-1]["item_id"]) == ("well said", delta["item_id"])
        (task,) = fed.tasks
        assert (task.live, task.audio) == (("audio",), None)
        pushed = [fed.answers[0]._pushes.get_nowait() for _ in range(fed.answers[0]._pushes.qsize())]
        assert sum(len(part.samples) for _, part, _ in pushed if part is not None) == len(SPEECH)
        assert [end for _, _, end in pushed] == [False] * (len(pushed) - 1) + [True]
        refused = await client.update(type="realtime")  # it hears, and does not answer
        assert refused["error"]["param"] == "session.type"


async def test_nothing_more_is_told_of_a_live_turn_that_is_cleared(kit, talk):
    more = asyncio.Event()
    fed = scribe(kit, (TextDelta("well"), more, TextDelta(" said")), live=(LiveInput("audio", "audio"),))
    async with talk(fed, query="?model=scribe") as client:
        await client.update(**MANUAL)
        await client.append(SPEECH)
        (dropped,) = await client.until(f"{TRANSCRIPT}.delta")
        await client.say("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        assert fed.answers[0].cancelled.is_set()
        more.set()
        await client.append(SPEECH)
        await client.say("input_audio_buffer.commit")
        events = await client.until(f"{TRANSCRIPT}.completed")
        assert dropped["item_id"] not in {event.get("item_id") for event in events}


async def test_a_live_turn_whose_client_says_nothing_more_does_not_keep_the_session(kit, talk):
    """Nor the model's place that it holds."""
    fed = scribe(kit, (TextDelta("well"), asyncio.Event()), live=(LiveInput("audio", "audio"),))
    async with talk(fed, query="?model=scribe", realtime_idle_s=0.3) as client:
        await client.update(**MANUAL)
        await client.append(SPEECH)
        assert (await client.until("error"))[-1]["error"]["code"] == "session_expired"
        await client.socket.wait_closed()
        assert client.socket.close_code == 1000
    assert fed.answers[0].cancelled.is_set()


async def test_another_model_writes_down_for_one_that_does_not_hear(kit, talk):
    tiny = chat(kit, inputs=("text",))
    async with talk(tiny, scribe(kit)) as client:
        await client.hear()
        await client.append(SPEECH)
        for _ in range(3):
            assert (await client.hear())["error"]["param"] == "session.audio.input.transcription.model"
        updated = await client.update(audio={"input": {"transcription": {"model": "scribe"}, "turn_detection": None}})
        assert updated["session"]["audio"]["input"]["transcription"]["model"] == "scribe"
        await client.append(SPEECH)
        await client.say("input_audio_buffer.commit")
        await client.say("response.create")
        await client.until("response.done")
    assert tiny.tasks[0].messages[0].content[0].text == "well said"


async def test_a_transcription_that_fails_is_told_and_the_session_goes_on(kit, talk):
    made = scribe(kit, [RequestError("too odd", param="audio")])
    async with talk(made, query="?model=scribe") as client:
        await client.update(**MANUAL)
        await client.append(SPEECH)
        await client.say("input_audio_buffer.commit")
        assert (await client.until(f"{TRANSCRIPT}.failed"))[-1]["error"]["message"] == "too odd"
        made.script = [TextDelta("fine")]
        await client.append(SPEECH)
        await client.say("input_audio_buffer.commit")
        assert (await client.until(f"{TRANSCRIPT}.completed"))[-1]["transcript"] == "fine"


async def test_tools_are_called_and_answered(kit, talk):
    calls = [ToolCallDelta(0, "look", '{"at"'), ToolCallDelta(0, "", ": 1}")]
    tiny = chat(kit)
    tiny.script = lambda n: calls if n == 0 else [TextDelta("ok")]
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    async with talk(tiny) as client:
        assert (await client.update(tools=[tool]))["session"]["tools"] == [tool]
        await client.say("conversation.item.create", item=user("hi"))
        await client.say("response.create")
        events = await client.until("response.done")
        (call,) = events[-1]["response"]["output"]
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "look", '{"at": 1}')
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "seen"}
        await client.say("conversation.item.create", item=output)
        await client.say("response.create")
        await client.until("response.done")
    said = tiny.tasks[1].messages
    assert [m.role for m in said] == ["user", "assistant", "tool"]
    assert (said[1].tool_calls[0]["function"]["name"], said[2].tool_call_id) == ("look", call["call_id"])


async def test_cancel_and_one_response_at_a_time(kit, talk):
    tiny = chat(kit, [TextDelta("Hel"), asyncio.Event()])
    async with talk(tiny) as client:
        await client.say("response.cancel")
        assert (await client.until("error"))[-1]["error"]["code"] == "response_cancel_not_active"
        await client.say("response.create", response={"metadata": {"a": "b"}, "conversation": "none"})
        created = (await client.until("response.output_text.delta"))[0]
        assert (created["response"]["metadata"], created["response"]["conversation_id"]) == ({"a": "b"}, None)
        await client.say("response.create")
        assert (await client.hear())["error"]["code"] == "conversation_already_has_active_response"
        await client.say("response.cancel", response_id=created["response"]["id"])
        response = (await client.until("response.done"))[-1]["response"]
        assert (response["status"], response["status_details"]["reason"]) == ("cancelled", "client_cancelled")
        assert tiny.answers[0].cancelled.is_set()


async def test_a_response_that_fails_is_done(kit, talk):
    async with talk(chat(kit, [TextDelta("a"), RequestError("broken")])) as client:
        await client.say("response.create")
        response = (await client.until("response.done"))[-1]["response"]
        assert (response["status"], response["status_details"]["error"]["message"]) == ("failed", "broken")


async def test_items_are_kept_shown_deleted_and_truncated(kit, talk):
    tiny = chat(kit)
    async with talk(tiny) as client:
        await client.hear()
        await client.say("conversation.item.create", item={**user("one"), "id": "a"})
        await client.say("conversation.item.create", item={**user("zero"), "id": "b"}, previous_item_id="root")
        answer = {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "long"}],
            "id": "c",
        }
        await client.say("conversation.item.create", item=answer)
        for _ in range(6):
            await client.hear()
        await client.say("conversation.item.retrieve", item_id="a")
        assert (await client.hear())["item"]["content"] == [{"type": "input_text", "text": "one"}]
        await client.say("conversation.item.truncate", item_id="c", content_index=0, audio_end_ms=10)
        assert (await client.hear())["type"] == "conversation.item.truncated"
        await client.say("conversation.item.delete", item_id="a")
        assert (await client.hear())["type"] == "conversation.item.deleted"
        await client.say("conversation.item.retrieve", item_id="a")
        assert (await client.hear())["error"]["code"] == "item_not_found"
        await client.say("response.create")
        await client.until("response.done")
    assert [m.content[0].text for m in tiny.tasks[0].messages] == ["zero"]


@pytest.mark.parametrize("how", ["header", "subprotocol"])
async def test_the_beta_has_its_own_names(kit, talk, how):
    extra = (
        {"headers": {"OpenAI-Beta": "realtime=v1"}}
        if how == "header"
        else {"subprotocols": ["realtime", "openai-beta.realtime-v1"]}
    )
    async with talk(chat(kit), **extra) as client:
        session = (await client.hear())["session"]
        assert (session["modalities"], session["input_audio_format"]) == (["text"], "pcm16")
        session = (
            await client.update(
                modalities=["text", "audio"], voice="alloy", input_audio_format="g711_ulaw", turn_detection=None,
                temperature=0.8, max_response_output_tokens="inf", input_audio_transcription=None, tools=[],
            )
        )["session"]  # fmt: skip
        assert (session["modalities"], session["input_audio_format"], session["turn_detection"]) == (
            ["text"], "g711_ulaw", None,
        )  # fmt: skip
        await client.say("conversation.item.create", item=user("hi"))
        assert (await client.hear())["type"] == "conversation.item.created"
        await client.say("response.create", response={"modalities": ["text"]})
        events = await client.until("response.done")
    assert "response.text.delta" in kinds(events)
    assert not [
        kind for kind in kinds(events) if "output_text" in kind or (kind[-9:] == "item.done" and "conv" in kind)
    ]
    assert events[-1]["response"]["output"][0]["content"] == [{"type": "text", "text": "Hello"}]


async def test_the_betas_transcription_sessions(kit, talk):
    beta = {"OpenAI-Beta": "realtime=v1"}
    async with talk(chat(kit), scribe(kit), query="?intent=transcription", headers=beta) as client:
        assert (await client.hear())["type"] == "transcription_session.created"
        session = {
            "input_audio_format": "g711_alaw",
            "input_audio_transcription": {"model": "scribe"},
            "turn_detection": None,
        }
        await client.say("transcription_session.update", session=session)
        assert (await client.hear())["type"] == "transcription_session.updated"
        await client.say("input_audio_buffer.append", audio=base64.b64encode(bytes(8000)).decode())
        await client.say("input_audio_buffer.commit")
        assert (await client.until(f"{TRANSCRIPT}.completed"))[-1]["usage"]["seconds"] == 1.0


WRONG = [
    ("{", None), ("[]", None), ('{"type": 7}', "type"), ('{"type": "sesion.update"}', "type"),
    ('{"type": "input_audio_buffer.append"}', "audio"),
    ('{"type": "input_audio_buffer.append", "audio": "!"}', "audio"),
    ('{"type": "input_audio_buffer.commit", "now": 1}', "now"), ('{"type": "input_audio_buffer.commit"}', None),
    ('{"type": "session.update"}', "session"),
    ('{"type": "session.update", "session": {"voise": "a"}}', "session.voise"),
    ('{"type": "session.update", "session": {"audio": {"in": 1}}}', "session.audio.in"),
    ('{"type": "session.update", "session": {"output_modalities": ["audio"]}}', "session.output_modalities"),
    ('{"type": "session.update", "session": {"model": "other"}}', "session.model"),
    ('{"type": "session.update", "session": {"audio": {"input": {"transcription": {"model": "no"}}}}}', "model"),
    ('{"type": "session.update", "session": {"max_output_tokens": 0}}', "session.max_output_tokens"),
    ('{"type": "session.update", "session": {"prompt": {"id": "x"}}}', "session.prompt"),
    ('{"type": "conversation.item.create", "item": {"type": "thing"}}', "item.type"),
    ('{"type": "conversation.item.create", "item": {"type": "message", "role": "me"}}', "item.role"),
    ('{"type": "conversation.item.delete", "item_id": "no"}', "item_id"),
    ('{"type": "output_audio_buffer.clear"}', "type"),
    ('{"type": "response.create", "response": {"input": 1}}', "response.input"),
]  # fmt: skip


async def test_whatever_is_wrong_is_told_and_the_session_goes_on(kit, talk):
    async with talk(chat(kit), max_socket_message_bytes=2000) as client:
        await client.hear()
        for text, param in WRONG:
            await client.socket.send(text)
            event = await client.hear()
            assert (event["type"], event["error"]["param"]) == ("error", param), (text, event)
        await client.socket.send(b"binary")
        assert (await client.hear())["error"]["code"] == "unsupported_frame"
        await client.say("input_audio_buffer.append", audio="A" * 4000)
        assert (await client.hear())["error"]["code"] == "too_large"
        await client.say("response.create")
        assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"


@pytest.mark.parametrize(("query", "word"), [("?model=tinny", "tiny"), ("?model=draw", "/v1/images/generations")])
async def test_a_model_that_cannot_is_told_before_the_end(kit, talk, query, word):
    draw = kit.Service(key="draw", abilities=("image", "generate"))
    async with talk(chat(kit), draw, query=query) as client:
        event = await client.hear()
        assert (event["type"], event["error"]["param"]) == ("error", "model")
        assert word in event["error"]["message"] or "/generate" in event["error"]["message"]
        await client.socket.wait_closed()
        assert client.socket.close_code == 1008


async def test_an_idle_session_ends_with_a_reason_and_a_busy_one_does_not(kit, talk):
    gate = asyncio.Event()
    async with talk(chat(kit, [gate, TextDelta("late")]), realtime_idle_s=0.3) as client:
        await client.say("response.create")
        await asyncio.sleep(0.8)
        gate.set()
        assert (await client.until("response.done"))[-1]["response"]["status"] == "completed"
        assert (await client.until("error"))[-1]["error"]["code"] == "session_expired"
        await client.socket.wait_closed()
        assert (client.socket.close_code, client.socket.close_reason) == (1000, "nothing was sent for 0.3 seconds")


async def test_pings_are_answered_while_a_model_thinks(kit, talk):
    async with talk(chat(kit, [asyncio.Event()])) as client:
        await client.say("response.create")
        await client.until("response.created")
        async with asyncio.timeout(LIMIT_S):
            await (await client.socket.ping())


async def test_when_the_client_leaves_everything_ends(kit, talk):
    tiny, made = chat(kit, [TextDelta("a"), asyncio.Event()]), scribe(kit, [asyncio.Event()])
    async with talk(tiny, made) as client:
        await client.update(audio={"input": {"transcription": {"model": "scribe"}, "turn_detection": None}})
        await client.append(SPEECH)
        await client.say("input_audio_buffer.commit")
        await client.say("response.create")
        await client.until("response.output_text.delta")
        await client.socket.close()
        async with asyncio.timeout(LIMIT_S):
            await tiny.answers[0].cancelled.wait()
            await made.answers[0].cancelled.wait()


async def test_the_buffer_and_the_conversation_are_bounded(kit, talk):
    async with talk(chat(kit), max_realtime_audio_s=1.0, max_realtime_items=2) as client:
        await client.update(**MANUAL)
        await client.append(np.tile(SPEECH, 3))
        assert (await client.until("error"))[-1]["error"]["code"] == "input_audio_buffer_full"
        await client.say("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        for _ in range(3):
            await client.say("conversation.item.create", item=user("x"))
        assert (await client.until("error"))[-1]["error"]["code"] == "conversation_full"
