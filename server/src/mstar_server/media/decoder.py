"""From files to task parts: what a route asks for its request's media.

``state.media`` of :class:`~mstar_server.state.ServerState` is a :class:`Media`. A route names what it has as
:class:`Item` objects, awaits :meth:`Media.decode`, and hands the parts to its adapter, which stays synchronous and free
of files. Everything goes the same way: URLs through the one fetcher, bytes through the pool of decoders.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mstar.spec.errors import RequestError
from mstar.spec.tasks import Audio, File, Image, Part, Video
from mstar_server.media.child import Reply
from mstar_server.media.decoders import DECODERS, Job
from mstar_server.media.fetch import Fetcher
from mstar_server.media.kinds import require, sniff
from mstar_server.media.limits import DEFAULT_SAMPLING, Kind, MediaFault, MediaLimits, Sampling
from mstar_server.media.output import Decoded, Output, anonymous_file, map_array
from mstar_server.media.pool import DecoderPool
from mstar_server.media.source import Source
from mstar_server.media.values import split_data_url, split_frames_url
from mstar_server.options import ServerOptions

__all__ = ["MODALITIES", "Item", "Media", "decode_file"]

MODALITIES = ("image", "audio", "video")
_LARGE_CHARS = 1 << 20


@dataclass(frozen=True)
class Item:
    """One file of a request.

    :param kind: what it must be. ``any``: what its first bytes say, if the caller *takes* that; a file of no known kind
        becomes a :class:`~mstar.spec.tasks.File`.
    :param content: the file: bytes, a :class:`Source`, or a text that is its URL (``data:``, ``https:``, ``http:``).
    :param param: its name in errors. :param takes: the kinds that are of use, for ``any``.
    :param sampling: which frames of a video are wanted, and whether its sound is.
    :param fields: kind → the field of the request that takes such files, for a file that is of another kind.
    :param name: and *media_type*: what the client says it is; kept for files of no known kind.
    """

    kind: Kind
    content: bytes | str | Source
    param: str
    takes: tuple[str, ...] = MODALITIES
    sampling: Sampling = DEFAULT_SAMPLING
    name: str = ""
    media_type: str = "application/octet-stream"
    fields: Mapping[str, str] = field(default_factory=dict)


class Media:
    """Fetches and decodes. Owned by the server's state; nothing is started before it is needed.

    :param pool: and *fetcher*: others than the options describe, for tests.
    """

    def __init__(self, options: ServerOptions, pool: DecoderPool | None = None, fetcher: Fetcher | None = None):
        self.options, self.limits = options, MediaLimits.of(options)
        processes = options.media_processes or max(1, min(4, (os.cpu_count() or 1) // 2))
        self.pool = pool or DecoderPool(
            processes, options.media_timeout_s, options.max_decoder_memory_bytes, options.max_media_waiting
        )
        self.fetcher = fetcher or Fetcher(options)

    async def close(self) -> None:
        """End the decoders' processes and open connections."""
        await self.pool.close()
        await self.fetcher.close()

    async def decode(self, items: Sequence[Item]) -> list[Part]:
        """The parts of one request's *items*, in order; together they may have ``max_decoded_bytes``.

        Raises the first :class:`RequestError` (4xx that names the item's field); what is still being decoded is given
        up then, as when the caller is cancelled.
        """
        budget = _Budget(self.limits.max_decoded_bytes)
        turns = asyncio.Semaphore(self.pool.processes)  # the files of one request do not fill the queue
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._decode(item, budget, turns)) for item in items]
        except* Exception as errors:
            raise _first(errors) from None
        return [task.result() for task in tasks]

    async def _decode(self, item: Item, budget: _Budget, turns: asyncio.Semaphore) -> Part:
        async with turns:
            source, parts = await self._source(item)
            try:
                if source.size > self.options.max_file_bytes:
                    message = f"a file of {source.size} bytes is larger than the limit of {self.options.max_file_bytes}"
                    raise MediaFault(message, "file_too_large", 413)
                decoder = "frames" if parts else _decoder(item, source)
                if decoder is None:
                    budget.spend(source.size)
                    return File(source.read(), item.name, item.media_type)
                limits = msgspec.structs.replace(self.limits, max_decoded_bytes=budget.left)
                job = Job(decoder=decoder, limits=limits, sampling=item.sampling, takes=item.takes, parts=parts)
                reply, output = await self.pool.run(job, source)
            except MediaFault as fault:
                raise _request_error(fault, item.param) from None
            finally:
                source.close()
        try:
            decoded = _checked(reply)
            budget.spend(os.fstat(output).st_size)
            return _part(decoded, output)
        except MediaFault as fault:
            raise _request_error(fault, item.param) from None
        finally:
            os.close(output)

    async def _source(self, item: Item) -> tuple[Source, tuple[int, ...]]:
        """The item's file; and the sizes of a video's frames if it was sent as images, else nothing."""
        content = item.content
        if isinstance(content, Source):
            return content, ()
        if isinstance(content, bytes):
            return await Source.of_bytes(content), ()
        if content[:5].lower() != "data:":
            return await self.fetcher.fetch(content, item.param), ()
        frames = None
        if item.kind == "video":
            frames = await _maybe_in_thread(split_frames_url, content, item.param)
        if frames is None:
            _, data = await _maybe_in_thread(split_data_url, content, item.param)
            return await Source.of_bytes(data), ()
        return await Source.of_bytes(*frames), tuple(map(len, frames))


def decode_file(
    data: bytes,
    name: str,
    media_type: str,
    param: str,
    options: ServerOptions,
    takes: tuple[str, ...] = MODALITIES,
) -> Part:
    """*data* as the part that its first bytes say it is, decoded in this process: for a user's own files, and slowly
    enough to need a thread. Raises :class:`RequestError`, also for a kind that is none of *takes*."""
    item = Item("any", data, param, takes=takes, name=name, media_type=media_type)
    source = asyncio.run(Source.of_bytes(data))
    output = anonymous_file()
    try:
        decoder = _decoder(item, source)
        if decoder is None:
            return File(data, name, media_type)
        limits = MediaLimits.of(options)
        job = Job(decoder=decoder, limits=limits, sampling=Sampling(audio=True), takes=takes)
        return _part(DECODERS[decoder](source.fd, job, Output(output, limits.max_decoded_bytes)), output)
    except MediaFault as fault:
        raise _request_error(fault, param) from None
    finally:
        source.close()
        os.close(output)


class _Budget:
    """Decoded bytes that a request has left."""

    def __init__(self, limit: int):
        self.limit = self.left = limit

    def spend(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            message = f"the request's files decode to more than the limit of {self.limit} bytes"
            raise MediaFault(message, "decoded_too_large", 413)


def _decoder(item: Item, source: Source) -> str | None:
    """Which decoder the item needs; ``None`` for bytes of no known kind. Refuses what is of another kind than it must
    be, or none that the caller takes."""
    if item.kind != "any":
        require(source.head(), "image" if item.kind == "mask" else item.kind, item.fields)
        return item.kind
    container = sniff(source.head(), item.media_type.startswith("audio/"))
    if container is None or not container.kinds:
        return None
    useful = [kind for kind in container.kinds if kind in item.takes]
    if not useful:
        takes = ", ".join(item.takes) or "no files"
        message = f"the file is {' or '.join(container.kinds)}, which the model does not take; it takes {takes}"
        raise MediaFault(message, "unsupported_modality")
    return container.kinds[0] if len(container.kinds) == 1 else "any"


def _checked(reply: Reply) -> Decoded:
    if reply.decoded is None:
        raise MediaFault(reply.message, reply.code, reply.status)
    return reply.decoded


def _part(decoded: Decoded, output: int) -> Part:
    """The part that lies in the file *output*, which may be closed afterwards."""
    try:
        audio = None
        if decoded.samples is not None:
            audio = Audio(map_array(output, decoded.samples), decoded.rate)
        if decoded.frames is None:
            assert audio is not None
            return audio
        frames = map_array(output, decoded.frames)
        return (
            Image(frames) if decoded.fps is None else Video(frames, decoded.fps, audio, decoded.times, decoded.resized)
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise MediaFault(f"the file cannot be decoded: its decoder answered {error}", "invalid_media", 422) from None


async def _maybe_in_thread(function: Any, text: str, param: str) -> Any:
    if len(text) < _LARGE_CHARS:
        return function(text, param)
    return await asyncio.to_thread(function, text, param)


def _request_error(fault: MediaFault, param: str) -> RequestError:
    return RequestError(f"{param!r}: {fault.message}", param=param, code=fault.code, status=fault.status)


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
