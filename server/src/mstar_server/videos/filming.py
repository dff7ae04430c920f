"""From a running answer to files: what a model makes is encoded while it makes it, off the event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mstar.spec.errors import RequestError
from mstar.spec.processor import AudioDelta, Delta, FramesDelta, ProgressDelta
from mstar_server.media.encode.clip import Clip, ClipWriter
from mstar_server.protocols import Answer

__all__ = ["film"]


async def film(
    answer: Answer,
    video: Path,
    thumbnail: Path | None = None,
    sheet: Path | None = None,
    on_progress: Callable[[float], None] | None = None,
) -> Clip:
    """Write what *answer* gives to *video*, as :class:`~mstar_server.media.encode.clip.ClipWriter` does.

    Raises what the answer raises. However it ends, what ran has been waited for, and a file that is not whole is gone.

    :param on_progress: called with the share that is done, 0…1, as far as the model tells; else with 0.
    """
    writer = ClipWriter(video, thumbnail, sheet)
    whole = False
    try:
        async for delta in answer:
            if on_progress is not None:
                on_progress(_share(delta))
            match delta:
                case FramesDelta():
                    if delta.fps is None:
                        raise RuntimeError("the model gives pictures without a rate, which make no video")
                    await _in_thread(writer.frames, delta.frames, delta.fps)
                case AudioDelta():
                    await _in_thread(writer.sound, delta.samples, delta.rate)
                case _:
                    pass  # words about the video, which no file holds
        if answer.finish_reason == "cancelled":
            raise RequestError("the video has been cancelled", code="cancelled", status=499)
        clip: Clip = await _in_thread(writer.finish)
        whole = True
        return clip
    finally:
        await _in_thread(writer.close)
        if not whole:
            for path in (video, thumbnail, sheet):
                if path is not None:
                    path.unlink(missing_ok=True)


def _share(delta: Delta) -> float:
    return min(1.0, delta.step / delta.total) if isinstance(delta, ProgressDelta) and delta.total else 0.0


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """*function* in a thread. A caller that is cancelled still waits for its end: the writer is no one else's then."""
    work = asyncio.get_running_loop().run_in_executor(None, functools.partial(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait((work,))
        raise
