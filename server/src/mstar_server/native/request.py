"""The native request: from a form, a JSON body or a socket's opening message to a :class:`GenerateTask`."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, WithJsonSchema
from starlette.datastructures import FormData, UploadFile

from mstar.spec.errors import RequestError, nearest
from mstar.spec.knobs import Knobs, validate_knobs
from mstar.spec.model import ModelSpec, check_wanted
from mstar.spec.tasks import GenerateTask
from mstar_server.errors import validation_fault
from mstar_server.media.decoder import MODALITIES, Item, Media
from mstar_server.media.limits import Sampling
from mstar_server.media.source import Source
from mstar_server.media.uploads import upload_source
from mstar_server.media.values import decode_base64, split_data_url
from mstar_server.options import ServerOptions

__all__ = [
    "GenerateBody",
    "NativeRequest",
    "Upload",
    "as_sent",
    "from_form",
    "from_json",
    "is_name",
    "make_task",
    "unknown_field",
    "with_files",
]


_FILE_DATA = "Base64, or a data URL; in msgpack also the bytes."


class FileBody(BaseModel):
    """A file inside JSON or msgpack."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: Annotated[str | bytes, WithJsonSchema({"type": "string", "description": _FILE_DATA})]
    name: str = ""
    media_type: str = "application/octet-stream"


class GenerateBody(BaseModel):
    """A native request. *model* may be left out when the server has one model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(None, description="May be left out when the server has one model.")
    text: str = ""
    files: list[FileBody] = Field(default_factory=list)
    output_modalities: list[str] = Field(default_factory=list, description="Default: the model's choice.")
    streaming: StrictBool = Field(False, description="Answer in JSON lines as the parts are made.")
    model_kwargs: dict[str, Any] = Field(default_factory=dict, description="The model's knobs; its listing names them.")
    session: str | None = Field(None, description="Keep state under this name after the request.")
    stop: str | list[str] | None = Field(None, description="Strings that end a text.")


@dataclass(frozen=True)
class Upload:
    """A file as it came. *param* is its name in errors."""

    content: bytes | Source
    name: str
    media_type: str
    param: str


@dataclass(frozen=True)
class NativeRequest:
    """A checked native request whose files are not decoded yet."""

    model: str | None = None
    text: str = ""
    uploads: tuple[Upload, ...] = ()
    output_modalities: tuple[str, ...] = ()
    streaming: bool = False
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    session: str | None = None
    stop: tuple[str, ...] = ()
    stray: RequestError | None = None
    """About the first field that no request has. It may be one of the model's knobs, which :func:`make_task` knows."""


def from_json(value: Any, options: ServerOptions) -> NativeRequest:
    """A request from a decoded JSON or msgpack object. Raises :class:`RequestError` that names the field at fault."""
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    stray = next((unknown_field(name) for name in value if name not in GenerateBody.model_fields), None)
    known = {k: v for k, v in value.items() if k in GenerateBody.model_fields and v is not None}
    try:
        body = GenerateBody.model_validate(known)
    except ValidationError as error:
        raise validation_fault(error.errors(include_url=False), value) from None
    _check_kwargs_size(len(_as_json(body.model_kwargs)), options)
    uploads = tuple(_json_upload(file, f"files[{i}]") for i, file in enumerate(body.files))
    return _checked(
        NativeRequest(
            body.model, body.text, uploads, tuple(body.output_modalities), body.streaming, body.model_kwargs,
            body.session, _strings(body.stop), stray,
        ),
        options,
    )  # fmt: skip


def _as_json(model_kwargs: Mapping[str, Any]) -> str:
    try:
        return json.dumps(model_kwargs)
    except (TypeError, RecursionError):  # msgpack can say more than JSON
        message = "'model_kwargs' must hold numbers, strings, booleans, lists and objects only"
        raise RequestError(message, param="model_kwargs") from None


def _json_upload(file: FileBody, param: str) -> Upload:
    if isinstance(file.data, bytes):
        return Upload(file.data, file.name, file.media_type, param)
    if file.data.startswith("data:"):
        media_type, data = split_data_url(file.data, f"{param}.data")
        return Upload(data, file.name, media_type or file.media_type, param)
    return Upload(decode_base64(file.data, f"{param}.data"), file.name, file.media_type, param)


async def from_form(form: FormData, options: ServerOptions) -> NativeRequest:
    """A request from a multipart or URL-encoded form."""
    uploads: list[Upload] = []
    fields: dict[str, list[str]] = {}
    stray: RequestError | None = None
    for name, value in form.multi_items():
        if name not in GenerateBody.model_fields:
            stray = stray or unknown_field(name)
            continue
        if isinstance(value, UploadFile) != (name == "files"):
            want = "a file" if name == "files" else "a text, not a file"
            raise RequestError(f"{name!r} must be {want}", param=name)
        if isinstance(value, UploadFile):
            media_type = value.content_type or "application/octet-stream"
            param = f"files[{len(uploads)}]"
            uploads.append(Upload(await upload_source(value, param), value.filename or "", media_type, param))
        else:
            fields.setdefault(name, []).append(value)
    modalities = [word.strip() for value in fields.get("output_modalities", ()) for word in value.split(",")]
    return _checked(
        NativeRequest(
            _single(fields, "model"), _single(fields, "text") or "", tuple(uploads), tuple(filter(None, modalities)),
            _boolean(_single(fields, "streaming")), _json_object(_single(fields, "model_kwargs"), options),
            _single(fields, "session"), tuple(fields.get("stop", ())), stray,
        ),
        options,
    )  # fmt: skip


def unknown_field(name: str, fields: Iterable[str] = GenerateBody.model_fields, where: str = "") -> RequestError:
    """The error for a field *name* that is none of *fields*."""
    message = f"unknown parameter {where + name!r}{nearest(name, fields)}"
    return RequestError(message, param=where + name, code="unknown_parameter")


def _single(fields: Mapping[str, Sequence[str]], name: str) -> str | None:
    values = fields.get(name, ())
    if len(values) > 1:
        raise RequestError(f"{name!r} was sent {len(values)} times", param=name)
    return values[0] if values else None


def _boolean(value: str | None) -> bool:
    if value is None or value.lower() in ("false", "0", ""):
        return False
    if value.lower() in ("true", "1"):
        return True
    raise RequestError(f"'streaming' must be true or false, got {value[:40]!r}", param="streaming")


def _json_object(text: str | None, options: ServerOptions) -> dict[str, Any]:
    if not text:
        return {}
    _check_kwargs_size(len(text.encode()), options)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"'model_kwargs' is not valid JSON: {error}"
        raise RequestError(message, param="model_kwargs", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("'model_kwargs' must be a JSON object", param="model_kwargs")
    return value


def _check_kwargs_size(size: int, options: ServerOptions) -> None:
    if size > options.max_kwargs_bytes:
        message = f"'model_kwargs' of {size} bytes is larger than the limit of {options.max_kwargs_bytes}"
        raise RequestError(message, param="model_kwargs", code="too_large", status=413)


def _strings(value: str | list[str] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def is_name(value: Any) -> bool:
    """Whether *value* can name something of the client's: a string of at most 256 characters of valid Unicode."""
    return isinstance(value, str) and len(value) <= 256 and not any("\ud800" <= c <= "\udfff" for c in value)


def _checked(request: NativeRequest, options: ServerOptions) -> NativeRequest:
    if request.session is not None and not (request.session and is_name(request.session)):
        raise RequestError("'session' must be a string of 1 to 256 characters", param="session")
    if len(request.text) > options.max_text_chars:
        message = f"'text' of {len(request.text)} characters is longer than the limit of {options.max_text_chars}"
        raise RequestError(message, param="text", code="text_too_long")
    if len(request.uploads) > options.max_files:
        message = f"{len(request.uploads)} files are more than the limit of {options.max_files}"
        raise RequestError(message, param="files", code="too_many_files")
    return request


def make_task(request: NativeRequest, spec: ModelSpec, live: Sequence[str] = ()) -> GenerateTask:
    """The task for *spec*'s model, without its files: :func:`with_files` adds them when all else is right."""
    if request.stray is not None:
        raise _misplaced(request.stray, spec)
    check_wanted(spec, request.output_modalities, "output_modalities")
    knobs = validate_knobs(spec.knobs, dict(request.model_kwargs), where="model_kwargs.")
    return GenerateTask(
        knobs=knobs,
        want=request.output_modalities,
        stop=request.stop,
        session=request.session,
        text=request.text,
        live=tuple(live),
    )


def _misplaced(stray: RequestError, spec: ModelSpec) -> RequestError:
    """*stray*, or where its field belongs if that is, or nearly is, one of the model's knobs."""
    name, knobs = stray.param or "", spec.knobs.model_fields
    if name in knobs:
        message = f'{name!r} is a knob of {spec.key!r}: put it in model_kwargs, as {{"{name}": …}}'
    elif "did you mean" not in stray.message and "did you mean" in (near := nearest(name, knobs)):
        message = f"unknown parameter {name!r}{near} That is a knob: put it in model_kwargs"
    else:
        return stray
    return RequestError(message, param=name, code=stray.code)


async def with_files(
    task: GenerateTask, request: NativeRequest, spec: ModelSpec, media: Media, sampling: Sampling
) -> GenerateTask:
    """*task* with the files of *request*, decoded. Raises :class:`RequestError` that names the file at fault.

    :param sampling: which frames of a video are wanted.
    """
    if not request.uploads:
        return task
    takes = tuple(kind for kind in MODALITIES if kind in spec.inputs)
    sampling = msgspec.structs.replace(sampling, audio="audio" in takes)
    items = [Item("any", u.content, u.param, takes, sampling, u.name, u.media_type) for u in request.uploads]
    return replace(task, parts=tuple(await media.decode(items)))


@contextlib.contextmanager
def as_sent(knobs: type[Knobs]) -> Iterator[None]:
    """A processor calls what a task brings its ``parts``, and *knobs* by their names; they came as ``files`` and in
    ``model_kwargs``, and errors name those."""
    try:
        yield
    except RequestError as error:
        if error.param is not None and re.match(r"parts\b", error.param):
            error.param = "files" + error.param.removeprefix("parts")
            error.message = re.sub(r"\bparts(?=\[|')", "files", error.message)
        elif error.param in knobs.model_fields and error.param not in GenerateBody.model_fields:
            error.param = f"model_kwargs.{error.param}"
        raise
