"""The garbage collector of a process that serves: what was loaded stays, and is not looked through again and again."""

from __future__ import annotations

import gc

__all__ = ["YOUNG_OBJECTS", "settle"]

YOUNG_OBJECTS = 5000
"""How many objects the collector lets pile up before it looks for circles among them. With CPython's own 700, a quarter
of the time of a server with 1,000 streams goes into it (benchmarks/NOTES.md)."""


def settle() -> None:
    """For a process that does nothing but serve, when all is ready: what is there now is never looked at again.

    One look through all that PyTorch, transformers and a model's graphs keep takes 0.3 s, in which no step is launched
    and a listener hears a gap. ``gc.unfreeze()`` takes it back.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
