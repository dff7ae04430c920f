"""Functions that the compiler must not look into, marked without loading it: that takes half a second and 100 MB."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["keep_eager", "never_compiled"]

_F = TypeVar("_F", bound=Callable[..., Any])
_MARKED: list[tuple[list[Callable[..., Any]], Callable[..., Any]]] = []


def never_compiled(function: _F) -> _F:
    """*function*, which runs as plain calls where its caller is compiled, too, once :func:`keep_eager` was called."""
    target: list[Callable[..., Any]] = [function]
    _MARKED.append((target, function))

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return target[0](*arguments, **named)

    return call  # type: ignore[return-value]


def keep_eager() -> None:
    """Before anything is compiled: tell the compiler of all functions that are marked."""
    for target, function in _MARKED:
        target[0] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
