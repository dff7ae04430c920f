"""The media of a chat request, decoded before its adapter sees it.

What an adapter may rely on says :mod:`mstar_server.openai.adapters`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from mstar.spec.errors import RequestError, nearest
from mstar.spec.model import ModelSpec
from mstar.spec.tasks import File, Part, Task
from mstar_server.media.decoder import MODALITIES, Item, Media
from mstar_server.media.kinds import AUDIO_FORMATS, IMAGE_FORMATS, VIDEO_FORMATS
from mstar_server.media.limits import Sampling, sampling_of
from mstar_server.media.values import decode_base64
from mstar_server.openai.chat_request import ChatMessage, ChatRequest, ContentPart
from mstar_server.options import ServerOptions

__all__ = ["MEDIA_PARTS", "chat_media", "chat_tasks"]

MEDIA_PARTS: Mapping[str, str] = {
    "image_url": "image", "input_audio": "audio", "audio_url": "audio", "video_url": "video", "file": "file",
}  # fmt: skip
"""Type of a content part that is a file → what it holds; ``file``: what its bytes say."""

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "image_url": ("url", "detail"),
    "audio_url": ("url",),
    "video_url": ("url", "fps", "max_frames", "detail"),
    "input_audio": ("data", "format"),
    "file": ("file_data", "file_id", "filename"),
}
"""What a part's object may say. ``detail`` and ``format`` have no effect: bytes say what a file is."""

_MAX_FPS = 240.0


async def chat_tasks(
    adapter: Any, body: ChatRequest, spec: ModelSpec, media: Media, sampling: Sampling | None = None
) -> Sequence[Task]:
    """What *adapter* makes of *body*, once the files of it are decoded. Raises :class:`RequestError`.

    :param sampling: which frames of a video are wanted, unless the adapter says.
    """
    found: dict[str, Part] = {}
    if any(isinstance(message.content, list) for message in body.messages):
        found = await chat_media(body.messages, spec, media, getattr(adapter, "sampling", None) or sampling)
    tasks: Sequence[Task] = adapter.tasks(body, found)
    return tasks


async def chat_media(
    messages: Sequence[ChatMessage], spec: ModelSpec, media: Media, sampling: Sampling | None = None
) -> dict[str, Part]:
    """The decoded files of *messages* by place.

    Raises :class:`RequestError` that names the part: before anything is decoded for a part of a wrong shape, of a kind
    that the model does not take, or one too many.
    """
    items = dict(_items(messages, spec, media.options, sampling or sampling_of(spec)))
    if len(items) > media.options.max_files:
        message = f"{len(items)} media parts are more than the limit of {media.options.max_files}"
        raise RequestError(message, param="messages", code="too_many_files")
    found = dict(zip(items, await media.decode(list(items.values())), strict=True))
    for place, part in found.items():
        if isinstance(part, File):
            raise _unknown_file(part, f"{place}.file")
    return found


def _items(
    messages: Sequence[ChatMessage], spec: ModelSpec, options: ServerOptions, sampling: Sampling
) -> Iterator[tuple[str, Item]]:
    for number, message in enumerate(messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type in MEDIA_PARTS:
                place = f"messages[{number}].content[{index}]"
                yield place, _item(part, place, spec, options, sampling)


def _item(part: ContentPart, place: str, spec: ModelSpec, options: ServerOptions, sampling: Sampling) -> Item:
    param, value = f"{place}.{part.type}", getattr(part, part.type)
    if value is None:
        raise RequestError(f"'{param}' is required", param=param)
    _check_fields(value, part.type, param)
    modality = MEDIA_PARTS[part.type]
    takes = tuple(kind for kind in MODALITIES if kind in spec.inputs)
    if modality not in spec.inputs and not (modality == "file" and takes):
        message = f"'{place}': the model {spec.key!r} does not take {modality}; it takes {', '.join(spec.inputs)}"
        raise RequestError(message, param=place, code="unsupported_modality")
    sampling = msgspec.structs.replace(sampling, audio="audio" in takes)
    fields = {kind: f"{kind}_url" for kind in takes}
    match part.type:
        case "image_url":
            return Item("image", _url(value, param), param, fields=fields)
        case "audio_url":
            return Item("audio", _url(value, param), param, fields=fields)
        case "video_url":
            sampling = _sampling(value, param, options, sampling)
            return Item("video", _url(value, param), param, sampling=sampling, fields=fields)
        case "input_audio":
            return Item("audio", _data(value, "data", param), f"{param}.data", fields=fields)
        case _:
            return _file(value, param, takes, sampling)


def _check_fields(value: Any, kind: str, param: str) -> None:
    """Refuse what a part of type *kind* does not know: a ``max_frame`` that went unnoticed would cost 768 frames."""
    unknown = set(value) - set(_FIELDS[kind]) if isinstance(value, dict) else ()
    for name in sorted(name for name in unknown if value[name] is not None):
        message = f"unknown parameter '{param}.{name[:80]}'{nearest(name, _FIELDS[kind])}"
        raise RequestError(message, param=f"{param}.{name}", code="unknown_parameter")


def _url(value: Any, param: str) -> str:
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        raise RequestError(f"'{param}' must be {{'url': '…'}} or the URL itself", param=param)
    return url


def _data(value: Mapping[str, Any], name: str, param: str) -> bytes | str:
    """Base64, decoded, or a data URL as it is."""
    data = value.get(name)
    if not isinstance(data, str):
        raise RequestError(f"'{param}.{name}' must be base64", param=f"{param}.{name}")
    return data if data.startswith("data:") else decode_base64(data, f"{param}.{name}")


def _file(value: Mapping[str, Any], param: str, takes: tuple[str, ...], sampling: Sampling) -> Item:
    if value.get("file_id") is not None:
        message = f"'{param}.file_id': this server stores no files; send the content as 'file_data'"
        raise RequestError(message, param=f"{param}.file_id", code="unsupported_parameter")
    content, name = _data(value, "file_data", param), value.get("filename") or ""
    if not isinstance(name, str):
        raise RequestError(f"'{param}.filename' must be a string", param=f"{param}.filename")
    media_type = content[len("data:") :].partition(";")[0] if isinstance(content, str) else ""
    return Item("any", content, f"{param}.file_data", takes, sampling, name, media_type[:256])


def _unknown_file(part: File, param: str) -> RequestError:
    if part.data.startswith(b"%PDF-"):
        message = f"'{param}': PDF files are not read; send their text, or their pages as images"
    else:
        known = ", ".join(dict.fromkeys((*IMAGE_FORMATS, *AUDIO_FORMATS, *VIDEO_FORMATS)))
        message = f"'{param}': the file is of an unknown format; known: {known}"
    return RequestError(message, param=param, code="unsupported_file")


def _sampling(value: Any, param: str, options: ServerOptions, sampling: Sampling) -> Sampling:
    """*sampling* with what the part itself asks for: ``fps`` and ``max_frames`` beside its ``url``."""
    if not isinstance(value, dict):
        return sampling
    fps, frames = value.get("fps"), value.get("max_frames")
    if fps is not None and not (type(fps) in (int, float) and 0 < fps <= _MAX_FPS):
        message = f"'{param}.fps' must be a number above 0, at most {_MAX_FPS:g}, got {str(fps)[:80]!r}"
        raise RequestError(message, param=f"{param}.fps")
    if frames is not None and not (type(frames) is int and 1 <= frames <= options.max_video_frames):
        most = options.max_video_frames
        message = f"'{param}.max_frames' must be a whole number in 1…{most}, got {str(frames)[:80]!r}"
        raise RequestError(message, param=f"{param}.max_frames")
    most = frames or sampling.max_frames
    least = min(sampling.min_frames, most)
    return msgspec.structs.replace(sampling, fps=fps or sampling.fps, max_frames=most, min_frames=least)
