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
MODELS = ("mini_chat", "mini_embed", "mini_tts")
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
    faults = []
    for result in document.get_all_operations():
        operation = result.ok()
        try:
            check(operation, mode)
        except Exception as error:
            faults.append(f"{operation.method} {operation.path}: {error}")
    assert not faults, "\n\n".join(faults)


def check(operation: Any, mode: Any) -> None:
    """Ask *operation* for *EXAMPLES* answers. Raises what is wrong with one of them."""

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(operation.as_strategy(generation_mode=mode))
    def asked(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            # else nearly every request would end at "no such model"
            case.body["model"] = random.Random(repr(case.body)).choice((*MODELS, case.body["model"]))
        case.call_and_validate(checks=CHECKS, timeout=30)

    with contextlib.suppress(Unsatisfiable):  # nothing about a request without parameters and body can be forbidden
        asked()
