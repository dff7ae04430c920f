"""``mstar run KEY "text"``: one request from the terminal, with the model loaded into this process, or into the
processes of its layout.

Files are decoded and encoded by the server's own code, which is looked up by name: the core does not import it.
"""

from __future__ import annotations

import argparse
import mimetypes
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mstar.cli.commands import Commands, Context, Parser, one_of
from mstar.cli.options import accepting, engine_options, model_options, with_json, with_key
from mstar.cli.output import fault, note, print_json
from mstar.plugin_code import quiet
from mstar.registry import load_object
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.knobs import validate_knobs
from mstar.spec.model import ModelSpec, check_wanted

if TYPE_CHECKING:
    from mstar.runtime.local import Stream
    from mstar.runtime.result import Result
    from mstar.spec.processor import Delta
    from mstar.spec.tasks import Part, Task

__all__ = ["register"]

_TASKS = ("chat", "generate", "completion")
_SERVER = "mstar_server"


def register(commands: Commands) -> None:
    """Add the command."""
    commands.add("run", _run, help="Run one request from the terminal.", arguments=_arguments)


def _arguments(parser: Parser) -> None:
    with_key(parser)
    parser.add_argument("text", nargs="?", default="", metavar="TEXT", help="what to say; - reads standard input")
    parser.add_argument("--file", type=Path, action="append", default=[], metavar="FILE", help="a file to send along")
    parser.add_argument("--system", metavar="TEXT", help="the system message of a chat")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KNOB=VALUE", help="a request parameter, as in max_tokens=20"
    )
    parser.add_argument("--want", metavar="MODALITY,…", help="what to answer with, for models that can do several")
    parser.add_argument(
        "--task", type=one_of(*_TASKS), metavar="|".join(_TASKS), help="default: the first of these that the model has"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="where files go (default: the current folder)"
    )
    parser.add_argument("--no-stream", action="store_true", help="print the text when it is complete")
    model_options(parser)
    with_json(parser)


def _run(arguments: argparse.Namespace, context: Context) -> int:
    spec, out = context.registry.model(arguments.key), sys.stdout
    try:
        with quiet():
            task = _task(arguments, spec)  # before anything is loaded: a wrong knob is found at once
            if arguments.out != Path() or "text" not in spec.outputs:  # else perhaps nothing is written
                _check_folder(arguments.out)
            result, clock = _request(arguments, context, task, out)
    except RequestError as error:
        fault(_as_given(str(error), arguments.file))
        return 2 if error.status < 500 else 1
    files = _write_files(result, arguments.key, arguments.out)
    if arguments.json:
        print_json(_facts(arguments.key, result, files, clock))
        return 0
    if result.text and arguments.no_stream:
        print(result.text)
    for file in files:
        note(f"wrote {file['path']}")
    if _only_thought(result):
        note(
            "The model was still thinking when its tokens ran out, and had not begun its answer: let it have more with "
            "--set max_tokens=N."
        )
    note(_speed(result, clock))
    return 0


def _as_given(message: str, files: Sequence[str]) -> str:
    """A processor calls what a task brings its ``parts``; they were given as ``--file``."""
    for number, file in enumerate(files):
        message = message.replace(f"parts[{number}]", f"--file {file}")
    return message


def _request(arguments: argparse.Namespace, context: Context, task: Task, out: TextIO) -> tuple[Result, _Clock]:
    """Load the model and run *task*; its text goes to *out* as it comes, unless it is asked for whole."""
    from mstar.runtime.local import load  # imports numpy, zmq and, to run the model, torch

    with load(
        arguments.key,
        weights=arguments.weights,
        config=arguments.config,
        layout=arguments.layout,
        device=arguments.device,
        dtype=arguments.dtype,
        settings=accepting(arguments, context),
        registry=context.registry,
        **engine_options(arguments),
    ) as model:
        clock = _Clock()
        with model.start(task) as stream:
            deltas = _read(stream, clock, None if arguments.json or arguments.no_stream else out)
            return stream.result(deltas), clock


# --- the request -------------------------------------------------------------------------------------------------


def _task(arguments: argparse.Namespace, spec: ModelSpec) -> Task:
    from mstar.spec.tasks import ChatTask, CompletionTask, GenerateTask, Message, Text

    kind = _kind(arguments, spec)
    text = _standard_input() if arguments.text == "-" else arguments.text
    if not text and not arguments.file and kind != "generate":
        raise SetupError(f'mstar run {spec.key}: nothing to say; write it as in: mstar run {spec.key} "Hello"')
    knobs = validate_knobs(spec.knobs, _knobs(arguments.set))
    want = tuple(word.strip() for word in (arguments.want or "").split(",") if word.strip())
    check_wanted(spec, want)
    parts = tuple(_part(file, spec) for file in arguments.file)
    if kind == "chat":
        said = (*parts, Text(text)) if text else parts
        system = [] if arguments.system is None else [Message("system", (Text(arguments.system),))]
        return ChatTask(messages=(*system, Message("user", said)), knobs=knobs, want=want)
    if arguments.system is not None:
        raise SetupError(f"--system belongs to a chat, but this is a {kind} request")
    if kind == "generate":
        return GenerateTask(text=text, parts=parts, knobs=knobs, want=want)
    if parts:
        raise SetupError("a completion request takes no files")
    return CompletionTask(prompt=text, knobs=knobs, want=want)


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise SetupError(f"standard input is no {error.encoding} text: byte {error.start}: {error.reason}") from None


def _kind(arguments: argparse.Namespace, spec: ModelSpec) -> str:
    able = [task for task in _TASKS if task in spec.abilities]
    if arguments.task is None and able:
        return able[0]
    if arguments.task in able:
        return str(arguments.task)
    listed = ", ".join(spec.abilities)
    if able:
        raise SetupError(f"the model {spec.key!r} has no task {arguments.task!r}; it can do: {listed}")
    raise SetupError(f"`mstar run` cannot do what the model {spec.key!r} can ({listed}); use `mstar serve {spec.key}`")


def _knobs(words: Sequence[str]) -> dict[str, Any]:
    """Values are written as in YAML: numbers, true and false, lists in brackets; anything else is a text."""
    import yaml

    knobs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise SetupError(f"--set {word}: write it as KNOB=VALUE, as in --set max_tokens=20")
        try:
            knobs[name] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError:
            knobs[name] = value
    return knobs


def _part(file: Path, spec: ModelSpec) -> Part:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise SetupError(f"--file {file}: {error.strerror or error}") from None
    media_type = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    decode, options = _of_server("media.decoder:decode_file"), _of_server("options:ServerOptions")
    takes = tuple(kind for kind in spec.inputs if kind != "text")
    part: Part = decode(data, file.name, media_type, f"--file {file}", options(), takes)
    return part


def _of_server(name: str) -> Any:
    try:
        return load_object(f"{_SERVER}.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != _SERVER:
            raise
        raise SetupError("files need the server's media code; run `pip install mstar-server`") from None


# --- the answer --------------------------------------------------------------------------------------------------


@dataclass
class _Clock:
    """Seconds from the request's start: to its first output, and to its end."""

    began: float = field(default_factory=time.perf_counter)
    first: float | None = None
    end: float = 0.0

    def now(self) -> float:
        return time.perf_counter() - self.began


def _read(stream: Stream, clock: _Clock, out: TextIO | None) -> list[Delta]:
    """All deltas of *stream*. *out*: where their text is shown."""
    from mstar.spec.processor import TextDelta

    deltas, open_line = [], False
    try:
        for delta in stream:
            clock.first = clock.now() if clock.first is None else clock.first
            deltas.append(delta)
            if out is not None and isinstance(delta, TextDelta) and delta.text:
                out.write(delta.text)
                out.flush()
                open_line = not delta.text.endswith("\n")
    finally:
        if out is not None and open_line:  # an interrupt too leaves the prompt on a line of its own
            print(file=out)
    clock.end = clock.now()
    return deltas


def _check_folder(folder: Path) -> None:
    """:raises SetupError: no file can be written to *folder*, which need not be there yet."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise SetupError(f"--out {folder}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise SetupError(f"--out {folder}: {there} cannot be written to")


def _write_files(result: Result, key: str, folder: Path) -> list[dict[str, str]]:
    """Everything but text: audio as WAV, images and frames as PNG, numbers as NumPy files."""
    files = []
    for stream, deltas in result.outputs.items():
        for delta in deltas:
            for suffix, media_type, data in _encoded(delta):
                path = _free_name(folder, f"{key}-{stream}", suffix)
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
                except OSError as error:
                    raise SetupError(f"--out {folder}: {error}") from None
                files.append({"stream": stream, "path": str(path), "media_type": media_type})
    return files


def _encoded(delta: Delta) -> Iterable[tuple[str, str, bytes]]:
    from mstar.spec.processor import ArrayDelta, AudioDelta, FramesDelta

    if isinstance(delta, AudioDelta):
        yield ".wav", "audio/wav", _of_server("media.encode.audio:wav")(delta.samples, delta.rate)
    elif isinstance(delta, FramesDelta):
        encode = _of_server("media.encode.images:png")
        yield from ((".png", "image/png", encode(frame)) for frame in delta.frames)
    elif isinstance(delta, ArrayDelta):
        import io

        import numpy as np

        out = io.BytesIO()
        np.save(out, np.asarray(delta.data))
        yield ".npy", "application/x-npy", out.getvalue()


def _free_name(folder: Path, stem: str, suffix: str) -> Path:
    """``stem.suffix``, or with the first number that is not taken: nothing of the user's is overwritten."""
    path, number = folder / f"{stem}{suffix}", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}{suffix}"
    return path


def _facts(key: str, result: Result, files: list[dict[str, str]], clock: _Clock) -> dict[str, Any]:
    return {
        "key": key,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "usage": {"input": dict(result.usage.input), "output": dict(result.usage.output)},
        "files": files,
        "first_s": clock.first,
        "seconds": clock.end,
    }


def _speed(result: Result, clock: _Clock) -> str:
    tokens = int(result.usage.output.get("tokens", 0))
    counts = ", ".join([*([_count(tokens, "token")] if tokens else []), *_amounts(result)]) or "done"
    rate = f" ({tokens / clock.end:.1f} tokens/s)" if tokens and clock.end else ""
    first = "" if clock.first is None else f", the first after {clock.first:.2f} s"
    return f"{counts} in {clock.end:.2f} s{rate}{first}; finish reason: {result.finish_reason}"


def _only_thought(result: Result) -> bool:
    """Whether all that there was room for are thoughts, which are not shown."""
    from mstar.spec.processor import ReasoningDelta

    deltas = [delta for stream in result.outputs.values() for delta in stream]
    return result.finish_reason == "length" and bool(deltas) and all(isinstance(d, ReasoningDelta) for d in deltas)


def _amounts(result: Result) -> Iterable[str]:
    """How much there is of everything but text, stream by stream, with its unit."""
    from mstar.spec.processor import ArrayDelta, AudioDelta, FramesDelta

    for stream, deltas in result.outputs.items():
        audio = [delta for delta in deltas if isinstance(delta, AudioDelta)]
        frames = [delta for delta in deltas if isinstance(delta, FramesDelta)]
        arrays = [delta for delta in deltas if isinstance(delta, ArrayDelta)]
        if audio:
            yield f"{sum(len(delta.samples) / delta.rate for delta in audio):.2f} s of {stream}"
        if frames:
            yield _count(sum(len(d.frames) for d in frames), "image" if frames[0].fps is None else "frame")
        if arrays:
            yield _count(len(arrays), f"{stream} array")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
