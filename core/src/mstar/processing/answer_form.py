"""The constraint of a chat's answer: a format that the client asked for, or a call that it wants to have.

A model that thinks first is constrained from the end of its thoughts on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mstar.processing.channels import ReasoningTags
from mstar.processing.tool_calls import ToolFormat
from mstar.spec.constraints import Choice, EbnfGrammar, JsonObject, JsonSchema, Regex, StructuralTag, read_constraint
from mstar.spec.errors import RequestError
from mstar.spec.tasks import ChatTask, Task

__all__ = ["with_answer_form"]


def with_answer_form(
    task: Task, tools: type[ToolFormat] | None, reasoning: ReasoningTags | None, thinking: bool
) -> Task:
    """*task* with the constraint that its ``tool_choice`` and ``response_format`` come to.

    :param tools: how the model writes calls. :param thinking: its answer begins in the middle of a thought.
    :raises RequestError: a call is wanted from a model whose way of writing calls is not known, or both are asked for.
    """
    if not isinstance(task, ChatTask):
        return task
    form, param = task.response_format, task.format_param
    if task.tool_choice not in (None, "auto", "none"):
        if read_constraint(form or {"type": "text"}, param) is not None:
            message = f"{param}: an answer that must be a call (tool_choice) has no other format"
            raise RequestError(message, param=param)
        form, param = _forced_call(task, tools), "tools"
    if form is None or not thinking or reasoning is None:
        return replace(task, response_format=form, format_param=param)
    constraint = read_constraint(form, param)
    if constraint is None:
        return task
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": reasoning.end}
    # not part of the thought's end, or a thought would go on behind an end without them
    breaks = {"type": "const_string", "value": "\n\n"}
    parts = {"type": "sequence", "elements": [thought, breaks, _element(constraint)]}
    return replace(task, response_format={"type": "structural_tag", "format": parts}, format_param=param)


def _forced_call(task: ChatTask, tools: type[ToolFormat] | None) -> Mapping[str, Any]:
    if tools is None:
        raise RequestError(
            "tool_choice: how this model writes calls is not known here, so none can be made certain; use 'auto'",
            param="tool_choice",
            code="unsupported_parameter",
        )
    if not task.tools:
        raise RequestError("tool_choice: there are no tools", param="tool_choice")
    form = tools(task.tools)
    choice = task.tool_choice
    names = list(form.functions) if choice == "required" else [choice["function"]["name"]]
    return form.constraint(names, task.parallel_tool_calls)


def _element(constraint: Any) -> Mapping[str, Any]:
    """*constraint* as one element of a structural tag, in xgrammar's notation."""
    match constraint:
        case JsonObject():
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case JsonSchema():
            return {"type": "json_schema", "json_schema": constraint.json_schema.schema}
        case Regex():
            return {"type": "regex", "pattern": constraint.regex}
        case Choice():
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in constraint.choice]}
        case EbnfGrammar():
            return {"type": "grammar", "grammar": constraint.grammar}
        case StructuralTag():
            return constraint.format
        case _:
            raise TypeError(f"no element for {type(constraint).__name__}")
