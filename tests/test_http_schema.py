"""The OpenAPI document against the server: whatever requests it allows or forbids, no answer is a fault of the server
or one that the document does not know.

``MSTAR_SCHEMA_EXAMPLES`` sets how many requests are made of each operation (default 8).
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis.errors import Unsatisfiable  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from .serving import Server, serving  # noqa: E402

EXAMPLES = int(os.environ.get("MSTAR_SCHEMA_EXAMPLES", "8"))
MODELS = ("mini_chat", "mini_embed", "mini_tts", "mini_ctc", "mini_denoise", "mini_video")
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*MODELS, extra_plugins=("mstar.testing.miniatures",), executor="inline") as running:
        yield running
        for key, pools in running.pools().items():
            assert not any(pool["used"] for pool in pools.values()), key


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_no_answer_is_a_surprise(server: Server, mode: Any) -> None:
    """*mode*: requests that the document allows, and ones that it forbids."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    known = {name for part in document.raw_schema["components"]["schemas"].values() for name in part["properties"]}
    faults = []
    for result in document.get_all_operations():
        operation = result.ok()
        try:
            check(operation, mode, known)
        except Exception as error:
            faults.append(f"{operation.method} {operation.path}: {error}")
    assert not faults, "\n\n".join(faults)


def check(operation: Any, mode: Any, known: set[str]) -> None:
    """Ask *operation* for *EXAMPLES* answers. Raises what is wrong with one of them."""

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(operation.as_strategy(generation_mode=mode))
    def asked(case: Any) -> None:
        rng = random.Random(repr(case.body))
        if isinstance(case.body, dict) and rng.random() < 0.8:
            # else nearly every request would end at an unknown model or field: models' knobs are fields of the body
            case.body = {name: value for name, value in case.body.items() if name in known}
            if "model" in case.body:
                case.body["model"] = rng.choice(MODELS)
        case.call_and_validate(checks=CHECKS, timeout=30)

    with contextlib.suppress(Unsatisfiable):  # nothing about a request without parameters and body can be forbidden
        asked()
