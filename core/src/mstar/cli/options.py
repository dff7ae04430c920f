"""Arguments that several commands share, and the checks of their values."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from mstar.cli.commands import Context, Parser, one_of
from mstar.cli.output import note
from mstar.licences import unknown_keys
from mstar.settings import Settings

__all__ = [
    "accepting",
    "count",
    "device",
    "engine_options",
    "model_options",
    "note_unknown_licences",
    "port",
    "positive",
    "positive_seconds",
    "seconds",
    "with_json",
    "with_key",
    "with_layout",
    "with_weights",
]


def with_json(parser: Parser) -> None:
    """``--json``: the answer for programs. The shape of each command's answer stands in ``docs/cli.md``."""
    parser.add_argument("--json", action="store_true", help="answer in JSON, for programs")


def with_key(parser: Parser, *, or_config: bool = False) -> None:
    """The model, as the first word. *or_config*: it may be left out where the file of ``--config`` names it."""
    text = "the model; `mstar models` lists them"
    if or_config:
        parser.add_argument("key", nargs="?", metavar="KEY", help=f"{text}; not needed where --config FILE names it")
    else:
        parser.add_argument("key", metavar="KEY", help=text)


def with_weights(parser: Parser) -> None:
    """``--weights``, as in a deployment file."""
    parser.add_argument("--weights", metavar="DIR|HUB_ID[@REVISION]", help="where the weights are")


def with_layout(parser: Parser) -> None:
    """``--layout``, as in a deployment file."""
    parser.add_argument(
        "--layout", metavar="NAME", help="one of the layouts that ship with the model (`mstar models KEY` lists them)"
    )


def model_options(parser: Parser, *, several: bool = False) -> None:
    """How a model is opened: what ``serve`` (which takes *several*) and ``run`` take."""
    with_weights(parser)
    text = "deployment file (YAML); options given here win over it"
    if several:
        parser.add_argument(
            "--config", type=Path, metavar="FILE", action="append", default=[], help=f"{text}; once for each model"
        )
    else:
        parser.add_argument("--config", type=Path, metavar="FILE", help=text)
    with_layout(parser)
    parser.add_argument("--device", type=device, metavar="cpu|cuda|cuda:N", help="default: cuda when there is one")
    parser.add_argument(
        "--dtype",
        type=one_of("float32", "bfloat16", "float16"),
        metavar="float32|bfloat16|float16",
        help="default: bfloat16 on a GPU, float32 on the CPU",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a timeline of the worker, which ui.perfetto.dev shows"
    )
    parser.add_argument(
        "--accept-licence",
        action="store_true",
        help="accept the terms of the model's weights for this run (for good: `mstar license accept KEY`)",
    )


def accepting(arguments: argparse.Namespace, context: Context, *keys: str) -> Settings:
    """The settings, with the consent that ``--accept-licence`` gives for models *keys* (default: the one argument).
    Names in ``MSTAR_ACCEPT_LICENCES`` that are no model's are told."""
    note_unknown_licences(context)
    settings = context.settings
    if not arguments.accept_licence:
        return settings
    accepted = (*settings.accept_licences, *(keys or (arguments.key,)))
    return dataclasses.replace(settings, accept_licences=accepted)


def note_unknown_licences(context: Context) -> None:
    """Say on stderr which names in ``MSTAR_ACCEPT_LICENCES`` are no model's: consent to none is given with them."""
    if context.settings.accept_licences:
        for sentence in unknown_keys(context.settings, context.registry.models):
            note(sentence)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The deployment's section ``engine``, as far as options set it."""
    return {} if arguments.trace is None else {"engine": {"trace": str(arguments.trace)}}


def port(value: str) -> int:
    """A TCP port; 0 asks for any free one."""
    if not value.isdecimal() or int(value) > 65535:
        raise argparse.ArgumentTypeError(f"{value!r} is not a port (0 to 65535)")
    return int(value)


def count(value: str) -> int:
    """A whole number of at least 0."""
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of at least 0")
    return int(value)


def positive(value: str) -> int:
    """A whole number of at least 1."""
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of at least 1")
    return int(value)


def seconds(value: str) -> float:
    """A number of seconds, 0 or more."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of seconds, 0 or more")
    return number


def positive_seconds(value: str) -> float:
    """A number of seconds above 0."""
    number = seconds(value)
    if number == 0:
        raise argparse.ArgumentTypeError("0 seconds are none: leave the option out for its default")
    return number


def device(value: str) -> str:
    """``cpu``, ``cuda`` or ``cuda:N``."""
    name, colon, index = value.partition(":")
    if value in ("cpu", "cuda") or (name == "cuda" and colon and index.isdecimal()):
        return value
    raise argparse.ArgumentTypeError(f"{value!r} is not a device: cpu, cuda or cuda:N")
