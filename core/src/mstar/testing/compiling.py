"""A compiler without a past, for tests that compile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["fresh_compiler"]

_SET = ("recompile_limit", "fail_on_recompile_limit_hit", "allow_unspec_int_on_nn_module")


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Nothing that was compiled before, or told torch's compiler, counts inside; nor what happens inside afterwards."""
    import torch
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    def forget() -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

    forget()
    before = {name: getattr(dynamo, name) for name in _SET}
    threads = inductor.compile_threads
    try:
        with dynamo.patch({}), inductor.patch({}):
            yield
    finally:
        for name, value in before.items():
            setattr(dynamo, name, value)
        inductor.compile_threads = threads
        forget()
