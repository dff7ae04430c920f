"""Small files of every kind, made when a test asks for them, and decoding without a process."""

from __future__ import annotations

import functools
import io
import os
import struct
import zlib
from typing import Any

import numpy as np
import soundfile
from PIL import Image as Pillow

from mstar.spec.tasks import Audio
from mstar_server.media.decoder import Item
from mstar_server.media.decoders import DECODERS, Job
from mstar_server.media.encode.audio import encode_audio
from mstar_server.media.encode.video import mp4
from mstar_server.media.limits import DEFAULT_SAMPLING, MediaLimits, Sampling
from mstar_server.media.output import Decoded, Output, anonymous_file, map_array
from mstar_server.options import ServerOptions

__all__ = [
    "PIXELS", "av_file", "frames", "here", "image_file", "item", "png_that_claims", "samples", "sound_file", "tone",
    "video_file",
]  # fmt: skip

PIXELS = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)


def image_file(kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    Pillow.fromarray(PIXELS).save(out, kind, **options)
    return out.getvalue()


def sound_file(data: Any, rate: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, data, rate, format=kind, subtype=subtype)
    return out.getvalue()


def png_that_claims(width: int, height: int) -> bytes:
    """A small, valid PNG header of a huge image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


def tone(seconds: float, rate: int) -> np.ndarray[Any, Any]:
    return (0.5 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def frames(count: int, width: int = 32, height: int = 16) -> np.ndarray[Any, Any]:
    """Grey frames, each lighter than the one before; the top left quarter is white."""
    made = np.empty((count, height, width, 3), np.uint8)
    made[:] = np.linspace(20, 180, count, dtype=np.uint8)[:, None, None, None]
    made[:, : height // 2, : width // 2] = 255
    return made


@functools.cache
def video_file(count: int = 20, fps: float = 10, sound: bool = True) -> bytes:
    return mp4(frames(count), fps, Audio(tone(count / fps, 16_000), 16_000) if sound else None, quality=10)


@functools.cache
def av_file(container: str, seconds: float = 1.0, rate: int = 16_000) -> bytes:
    """Sound alone in a container that FFmpeg writes: M4A, WebM, or a format of ours."""
    names = {
        "m4a": ("mp4", "aac"),
        "webm": ("webm", "libopus"),
        "mov": ("mov", "pcm_s16le"),
        "mka": ("matroska", "flac"),
    }
    if container not in names:
        return encode_audio(tone(seconds, rate), rate, container)
    import av

    out = io.BytesIO()
    kind, codec = names[container]
    with av.open(out, "w", format=kind) as media:
        stream: Any = media.add_stream(codec, rate=rate)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(tone(seconds, rate)[None], format="flt", layout="mono")
        frame.sample_rate, frame.pts = rate, 0
        media.mux(stream.encode(frame))
        media.mux(stream.encode(None))
    return out.getvalue()


def here(
    decoder: str, data: bytes, sampling: Sampling = DEFAULT_SAMPLING, parts: tuple[int, ...] = (), **options: Any
) -> tuple[Decoded, int]:
    """*data* decoded in this process, and the descriptor of the output."""
    source, output = anonymous_file(), anonymous_file()
    os.write(source, data)
    limits = MediaLimits.of(ServerOptions(**options))
    takes = ("image", "audio", "video")
    job = Job(decoder=decoder, limits=limits, sampling=sampling, takes=takes, parts=parts)
    try:
        return DECODERS[decoder](source, job, Output(output, limits.max_decoded_bytes)), output
    except BaseException:
        os.close(output)
        raise
    finally:
        os.close(source)


def samples(data: bytes, **options: Any) -> tuple[np.ndarray[Any, Any], int]:
    decoded, output = here("audio", data, **options)
    assert decoded.samples is not None
    return map_array(output, decoded.samples), decoded.rate


def item(kind: Any, content: Any, param: str = "f", **facts: Any) -> Item:
    return Item(kind, content, param, **facts)
