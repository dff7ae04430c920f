"""Log lines for people and for programs."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from mstar.cluster.base import WorkerConfig
from mstar.log_format import JsonFormatter, TextFormatter
from mstar.spec.deployment import merge_deployment


def record(message: str, *arguments: Any, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("mstar.x", logging.WARNING, __file__, 1, message, arguments, None)
    made.__dict__.update(extra)
    return made


def test_a_line_in_json() -> None:
    line = json.loads(JsonFormatter("m").format(record("%d of\n%s", 3, "é", request_id="r1", fields={"status": 200})))
    assert line["message"] == "3 of\né"
    assert (line["level"], line["logger"], line["worker"], line["request_id"]) == ("warning", "mstar.x", "m", "r1")
    assert line["status"] == 200
    assert line["time"].endswith("Z")


def test_fields_replace_nothing_and_may_be_anything() -> None:
    text = JsonFormatter().format(record("hello", fields={"message": "other", "what": object}))
    assert "\n" not in text
    assert json.loads(text)["message"] == "hello"


def test_a_traceback_is_one_field() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        made = record("failed")
        made.exc_info = sys.exc_info()
    line = json.loads(JsonFormatter().format(made))
    assert line["exception"].endswith("ValueError: no")


def test_a_line_in_words_begins_with_its_request() -> None:
    assert (
        TextFormatter("50%")
        .format(record("hello", request_id="r%d"))
        .endswith("WARNING worker 50%: mstar.x: [r%d] hello")
    )
    assert TextFormatter().format(record("hello")).endswith("WARNING mstar.x: hello")


def test_a_line_of_one_of_several_workers_says_of_which() -> None:
    deployment = merge_deployment("m", {"replicas": 2, "placement": {"lm": [0, 1]}})
    place = WorkerConfig(key="m", weights=None, deployment=deployment, rank=1, replica=0).place
    assert (
        TextFormatter("m", place).format(record("hello")).endswith("WARNING worker m, copy 0, rank 1: mstar.x: hello")
    )
    line = json.loads(JsonFormatter("m", place).format(record("hello", fields={"rank": 7})))
    assert (line["worker"], line["copy"], line["rank"]) == ("m", 0, 1)
    alone = WorkerConfig(key="m", weights=None, deployment=merge_deployment("m"))
    assert alone.place == {}
