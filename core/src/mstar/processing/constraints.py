"""A task's constraint, checked before anything is scheduled."""

from __future__ import annotations

from collections.abc import Sequence

from mstar.resources.grammars import GrammarCompiler
from mstar.spec.constraints import encode_constraint, read_constraint
from mstar.spec.errors import RequestError
from mstar.spec.tasks import Task

__all__ = ["checked_grammar"]

COMPILE_SECONDS = 5.0
"""The most that a constraint may take to compile, and its first mask to make."""


def checked_grammar(task: Task, compiler: GrammarCompiler, stop_ids: Sequence[int]) -> str | None:
    """*task*'s ``response_format`` as :attr:`SamplingParams.grammar` holds it, if it can be compiled; free text needs
    none. May take seconds: loading the library, and compiling (``COMPILE_SECONDS`` at most)."""
    form, param = task.response_format, task.format_param
    constraint = None if form is None else read_constraint(form, param)
    if constraint is None:
        return None
    if getattr(task.knobs, "ignore_eos", False):
        raise RequestError(
            f"ignore_eos: an answer with {param} ends when it is complete; leave one of them out", param="ignore_eos"
        )
    if not stop_ids:
        raise RequestError(
            f"{param}: this model has no stop token, with which a constrained answer ends",
            param=param,
            code="unsupported_value",
        )
    compiler.check(constraint, stop_ids, param, COMPILE_SECONDS)
    return encode_constraint(constraint)
