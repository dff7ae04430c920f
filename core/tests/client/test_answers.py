"""What the server's two ways of writing an answer say comes back as the deltas that went in."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec
import numpy as np
import pytest

from mstar.client.answers import delta_of, result_of
from mstar.client.asks import upload
from mstar.client.live import Conversation
from mstar.spec.errors import RequestError
from mstar.spec.processor import (
    ArrayDelta,
    AudioDelta,
    Delta,
    FramesDelta,
    ProgressDelta,
    ReasoningDelta,
    SegmentDelta,
    TextDelta,
    ToolCallDelta,
    Word,
)

response = pytest.importorskip("mstar_server.native.response")

PIXELS = np.arange(48, dtype=np.uint8).reshape(1, 4, 4, 3)
DELTAS: list[Delta] = [
    TextDelta("hällo"),
    ReasoningDelta("hm"),
    ToolCallDelta(1, "look", '{"at":'),
    AudioDelta(np.linspace(-1, 1, 9, dtype=np.float32), 8000),
    AudioDelta(np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2), 44_100),
    FramesDelta(PIXELS),
    FramesDelta(np.concatenate([PIXELS, PIXELS]), 12.5, "video"),
    ArrayDelta(np.asarray([[1.5, np.nan]], np.float32)),
    ArrayDelta(np.asarray([[1, -2]], np.int16), "state", "s"),
    SegmentDelta(0.5, 1.5, "hi", (Word("hi", 0.5, 1.0),), "en", (4, 5), avg_logprob=-0.1),
    ProgressDelta(3, 7),
    ProgressDelta(3, 7, PIXELS[0]),
]


def assert_same(got: Any, want: Any, atol: float) -> None:
    assert type(got) is type(want)
    for field in dataclasses.fields(want):
        one, other = getattr(got, field.name), getattr(want, field.name)
        if isinstance(other, np.ndarray):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            np.testing.assert_allclose(one, other, atol=atol)
        else:
            assert one == other


@pytest.mark.parametrize("delta", DELTAS, ids=lambda d: type(d).__name__)
def test_a_delta_there_and_back(delta: Delta) -> None:
    said = json.loads(msgspec.json.encode(response.delta_object(delta, 0)))
    assert_same(delta_of(said), delta, atol=2e-5)  # sound is rounded to 16 bits
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(response.delta_arrays(delta, 0)))
    assert_same(delta_of(said), delta, atol=0)


def test_a_whole_answer_there_and_back() -> None:
    class Ended:
        id, prompt_tokens, completion_tokens, usage, finish_reason = "r", 3, 4, None, "stop"

    deltas = [TextDelta("a"), TextDelta("b"), ToolCallDelta(0, "f", "{"), ToolCallDelta(0, "", "}"), *DELTAS[3:4]]
    body = json.loads(msgspec.json.encode(response.whole_object(Ended(), deltas)))
    result = result_of(body)
    assert (result.text, result.finish_reason) == ("ab", "stop")
    assert [d for d in result.outputs["text"] if isinstance(d, ToolCallDelta)] == [ToolCallDelta(0, "f", "{}")]
    assert result.audio is not None
    assert_same(result.audio, DELTAS[3], atol=2e-5)


def test_what_a_newer_server_might_send_is_said() -> None:
    event = {"modality": "audio", "stream": "audio", "encoding": "opus", "data": "", "rate": 1}
    with pytest.raises(RequestError, match="'opus'; is it newer"):
        delta_of(event)


def test_items_keep_their_type() -> None:
    talk = Conversation(["s"])
    for items, dtype, shape in (
        (np.zeros((2, 3), np.uint8), "uint8", [2, 3]),
        ([[1, 2]], "float32", [1, 2]),
        (np.arange(6, dtype=">i4")[::2], "int32", [3]),
        ([True], "bool", [1]),
    ):
        frame, _ = talk.append({"s": items})
        sent = msgspec.msgpack.decode(frame)["append"]["s"]
        assert (sent["dtype"], sent["shape"]) == (dtype, shape)
        got = np.frombuffer(sent["data"], np.dtype(dtype).newbyteorder("<")).reshape(shape)
        np.testing.assert_array_equal(got, np.asarray(items))
    with pytest.raises(TypeError, match="numbers or a text"):
        talk.append({"s": [None]})


def test_an_item_without_a_name_needs_one_stream() -> None:
    assert Conversation(["s"]).alone([1]) == {"s": [1]}
    with pytest.raises(RequestError, match="a, b"):
        Conversation(["a", "b"]).alone([1])


def test_only_files_are_uploaded() -> None:
    with pytest.raises(TypeError, match="a file is a path"):
        upload(3)  # type: ignore[arg-type]
