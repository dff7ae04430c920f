"""Writes ``docs/cli.md`` from the command line's own parsers: ``python scripts/cli_docs.py [--check]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from mstar.cli.app import collect
from mstar.cli.commands import Command
from mstar.plugins import load_plugins
from mstar.settings import Settings

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"

HEAD = """\
# The command line

This page is generated from the commands themselves: `python scripts/cli_docs.py` writes it, and a test checks it.

Every command answers `--help`. Answers go to standard output, everything else to standard error, what the code of
plugins and models prints too. A character that the terminal's encoding lacks comes out as `?`, in JSON as an escape. An
unknown command, option, model, parameter or key of a file is answered with the nearest one that exists. Of names in
`MSTAR_PLUGINS`, `MSTAR_BLOCK_PLUGINS` and `MSTAR_ACCEPT_LICENCES` that are not there each command warns that would use
them. What a family's own code raises is one sentence with its file and line; `MSTAR_LOG_LEVEL=debug` shows the
traceback.

| exit status | meaning |
|---|---|
| 0 | all is well |
| 1 | a fault was found in a model, its code or the contents of a deployment file, by whichever command reads it |
| 1 | `doctor` found something essential at fault; a request failed in the engine; the output cannot be written |
| 2 | the command cannot be carried out as it was typed: a word, a value, a setting, terms to accept |
| 2 | a file or folder that was named is not there or cannot be read |
| 130 | Ctrl-C |
| 141 | whoever read the output has left |

`eval "$(mstar completion bash)"` (or zsh, fish) completes commands, models, options, their values, the parameters of
the chosen model for `--set`, and files.

Plugins add commands of their own; `mstar --help` lists all that are installed.
"""

SHAPES = {
    "models": (
        "A list of objects: `key`, `family`, `summary`, `plugin`, `plugin_version`, `weights` (a list of "
        "`source`, `id`, `revision`), `weights_present`, `weights_folder` (or null), `size` (bytes, or null),"
        " `licence` (`name`, `url`, `commercial`, `gated`, `permissive`), `abilities`, `inputs`, `outputs`. With "
        "`KEY`: that one object, with `knobs` and `options` (lists of `name`, `value`, `default`, `meaning`) and "
        "`layouts` (name → the package's file)."
    ),
    "plugins": (
        "A list of objects: `name`, `version`, `state` (`loaded`, `broken`, `blocked`), `reason`, `remedy`, "
        "`hooks`, `source`; with `--traceback` also `traceback`."
    ),
    "graph": (
        "An object: `key`, `replicas` (copies of the layout), `nodes` (`name`, `ranks`, `seats`: the groups of ranks "
        "that each run it, `places`: those of prompts and of decoding where these are apart, `split`: what the seats "
        "share out, `requests` or `contexts`, `max_rows`, `entries`), `partitions` (`name`, `walks`), `walks` (name → "
        "tree whose parts have `kind` `call`, `seq`, `par`, `loop` or `draft`), `streams`, `inputs`, `sessions`, "
        "`resources`."
    ),
    "check": (
        "An object: `key`, `ok`, `complete` (false: more may show once the faults are mended), `faults` (a list of "
        "`file`, `key`, `message`, `line` or null), `remarks` (what could not be tried), `weights_folder`, `device`, "
        "`dtype`, `between_ranks` (`way`, `why`; null with one rank), `max_concurrent_requests`, `nodes` (`name`, "
        "`module`, `parameters`, `bytes`, `step_bytes`: what its largest step needs beside), "
        "`pools` (`name`, `kind`, `units`, `bytes`, `owners`, `full_requests`)."
    ),
    "license": (
        "`list` answers a list, `show` and `accept` one object: `key`, `terms`, `url`, `commercial`, `gated`,"
        " `permissive`, `accepted` (`permissive`, `settings`, `record`, or null), `accepted_at`, "
        "`accepted_version`."
    ),
    "download": ("An object: `key`, `folder` (null for a model without weights), `size` (bytes)."),
    "run": (
        "An object: `key`, `text`, `finish_reason`, `usage` (`input`, `output`), `files` (a list of `stream`,"
        " `path`, `media_type`), `first_s` (seconds to the first output), `seconds`."
    ),
    "key": (
        "`add` answers an object with `id`, `name`, `key` (what clients send, shown this once), `expires` (or null), "
        "`file`; `list` a list of `id`, `name`, `created`, `expires`, `max_requests`, `requests_per_minute`, "
        "`expired`; `remove` an object with `id` and `name`."
    ),
    "simulate": (
        "`run` answers an object: `model`, `replicas`, `devices`, `completed`, `refused`, `seconds`, `requests_per_s`, "
        "`output_tokens_per_s`, `prompt_tokens_per_s`; `first_token`, `between_tokens`, `queued`, `whole` (seconds: "
        "`p50`, `p95`, `p99`, `mean`), `busy_share` (`mean`, `least`, `most`), `kv_pages_most`, `kv_share_most`, "
        "`queue_most`, `steps` (of all replicas); null for what there was none of. "
        "`measure` and `fit` answer the profile that they write."
    ),
    "doctor": (
        "An object: `ok`, `findings` (a list of `subject`, `state`: `ok`, `missing` or `bad`, `detail`, `advice`)."
    ),
}
"""What ``--json`` answers: fields may be added, none changes its meaning."""


def page() -> str:
    """The page, for the core's own commands."""
    commands = collect(load_plugins(Settings(plugins=())))
    return HEAD + "".join("\n" + "\n".join(section(command)) + "\n" for command in commands.by_name.values())


def section(command: Command) -> Iterator[str]:
    parser = command.parser()
    names = [str(action.metavar or action.dest) for action in parser._actions if shown(action) and not flags(action)]
    optional = " …" if any(flags(action) for action in parser._actions if action.dest != "help") else ""
    yield f"## mstar {command.name}\n"
    yield f"{command.help}\n"
    yield f"```text\nmstar {' '.join([command.name, *names])}{optional}\n```\n"
    rows = [row(action) for action in parser._actions if shown(action) and action.dest != "help"]
    if rows:
        yield "| argument | meaning |\n|---|---|"
        yield from rows
    if command.name in SHAPES:
        yield f"\nWith `--json`: {SHAPES[command.name]}"


def shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS


def flags(action: argparse.Action) -> str:
    return ", ".join(action.option_strings)


def row(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else str(action.metavar or action.dest.upper())
    name = " ".join(filter(None, (flags(action), value))) if flags(action) else value
    text = (action.help or "") % {"default": action.default} if action.help else ""
    return f"| `{cell(name)}` | {cell(text)} |"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print("docs/cli.md is current" if current else "docs/cli.md is out of date: run python scripts/cli_docs.py")
        return int(not current)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
