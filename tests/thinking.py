"""A plugin for tests: a slow chat model that thinks before it speaks and calls the tools that it is given."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import mstar
from mstar.nn.node import Node
from mstar.spec.model import Licence, ModelSpec
from mstar.spec.processor import Delta, Prepared, ReasoningDelta, Renderer, TextDelta, ToolCallDelta
from mstar.spec.request import Done, Emit
from mstar.spec.tasks import ChatTask, Task
from mstar.testing.miniatures.common import MiniKnobs, MiniProcessor, decode
from mstar.testing.miniatures.text import Chat, SumNode

THOUGHTS = 3
"""Tokens of an answer that are thoughts."""


class SlowNode(SumNode):
    def forward(self, step: Any, ids: Any) -> dict[str, Any]:
        time.sleep(0.02)
        return super().forward(step, ids)


class SlowChat(Chat):
    def build(self, node: str) -> Node:
        return SlowNode()


class ThinkingProcessor(MiniProcessor):
    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        return ThinkingRenderer(task)


class ThinkingRenderer(Renderer):
    """The first tokens are thoughts, the others text. A person's message with tools beside it is answered by a call."""

    def __init__(self, task: Task):
        asked = isinstance(task, ChatTask) and task.messages[-1].role == "user"
        self.tools = task.tools if asked and isinstance(task, ChatTask) else ()
        self.count = 0

    def feed(self, event: Emit) -> Iterable[Delta]:
        for token in event.data:
            ids = (int(token),)
            thinks = self.count < THOUGHTS
            yield ReasoningDelta(decode(ids), ids) if thinks else TextDelta(decode(ids), ids)
            self.count += 1

    def finish(self, done: Done | None) -> Iterable[Delta]:
        for index, tool in enumerate(self.tools):
            yield ToolCallDelta(index, tool["function"]["name"], "")
            yield ToolCallDelta(index, "", json.dumps({"count": self.count}))


@mstar.hookimpl
def mstar_models() -> list[ModelSpec]:
    return [
        ModelSpec(
            key="thinker",
            family="tests",
            summary="Thinks, slowly.",
            weights=(),
            licence=Licence("Apache-2.0"),
            model="tests.thinking:SlowChat",
            processor="tests.thinking:ThinkingProcessor",
            knobs=MiniKnobs,
            abilities=("chat",),
            deployment={"device": "cpu", "dtype": "float32", "engine": {"threads": 1}},
        )
    ]
