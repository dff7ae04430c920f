"""Writes the generated parts of the documentation: ``python docs/generate.py``; ``--check`` only says what is stale.

A page marks a generated part with ``<!-- generated: NAME -->`` and ``<!-- end -->``. What is between them is made from
the code: hooks from the docstrings in ``mstar.hookspecs``, tables of knobs and of the deployment file from their
pydantic models, the settings from the table in ``mstar.settings``, the routes from the server's routers and their
errors from ``mstar_server.openapi``. All the rest of a page is written by hand.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from mstar import hookspecs, settings
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.runtime.deployment_files import packaged_deployment
from mstar.spec.deployment import Deployment, EngineOptions, RayOptions, SchedulerOptions
from mstar.spec.fields import describe_fields
from mstar.spec.model import ModelSpec
from mstar_server.observe.catalog import CATALOG, REASONS
from mstar_server.openapi import ERRORS
from mstar_server.plugin import mstar_api

ROOT = Path(__file__).parent.parent
PAGES = (
    "docs/hooks.md",
    "docs/knobs.md",
    "docs/deployment.md",
    "docs/observability.md",
    "docs/http/README.md",
    "README.md",
)
_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main(words: Sequence[str]) -> int:
    """Exit status 1 when ``--check`` finds a stale page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a page is stale")
    check = parser.parse_args(words).check
    stale = []
    for page in PAGES:
        path = ROOT / page
        old = path.read_text(encoding="utf-8")
        new = render(old)
        if old == new:
            continue
        stale.append(page)
        if check:
            sys.stdout.writelines(
                difflib.unified_diff(old.splitlines(True), new.splitlines(True), page, "as generated")
            )
        else:
            path.write_text(new, encoding="utf-8")
    if check and stale:
        print(f"\nstale: {', '.join(stale)}; run `python docs/generate.py`", file=sys.stderr)
        return 1
    return 0


def render(page: str) -> str:
    """*page* with every generated part made anew."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]().strip()}\n\n{found[4]}", page)


# --- hooks --------------------------------------------------------------------------------------------------------


def hooks() -> str:
    """Every hook in the order of the specification: a heading with its exact arguments, its types, its docstring."""
    return "\n\n".join(_hook(name, hook) for name, hook in vars(hookspecs).items() if name.startswith("mstar_"))


def heading(name: str, hook: Callable[..., Any]) -> str:
    """``### mstar_openai(spec)``."""
    return f"### {name}({', '.join(inspect.signature(hook).parameters)})"


def _hook(name: str, hook: Callable[..., Any]) -> str:
    signature = inspect.signature(hook)
    typed = ", ".join(f"{p.name}: {p.annotation}" for p in signature.parameters.values())
    code = f"```python\n@mstar.hookimpl\ndef {name}({typed}) -> {signature.return_annotation}: ...\n```"
    return f"{heading(name, hook)}\n\n{code}\n\n{markdown(inspect.getdoc(hook) or '')}"


def markdown(docstring: str) -> str:
    """The few roles and marks of our docstrings, in Markdown."""
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", docstring)
    text = text.replace("``", "`")
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


# --- tables of fields ---------------------------------------------------------------------------------------------


def knobs() -> str:
    """One table for each model of the plugins in this repository."""
    ours = {_distribution(file) for file in ROOT.glob("plugins/*/pyproject.toml")}
    registry = Registry(load_plugins(settings.Settings()))
    found = [m for _, m in sorted(registry.models.items()) if m.plugin.distribution in ours]
    missing = ours - {plugin.distribution for plugin in registry.plugins.loaded}
    if missing:
        raise SystemExit(f"install {', '.join(sorted(map(str, missing)))}: the tables of knobs need it")
    return "\n\n".join(
        f"## {m.spec.key}\n\n{m.spec.summary} From `{m.plugin.distribution}`.\n\n"
        f"{fields(m.spec.knobs, True)}{_options(m.spec)}"
        for m in found
    )


def _options(spec: ModelSpec) -> str:
    """The table of what the deployment may set of a model, for those that have such options."""
    if not spec.options.model_fields:
        return ""
    shipped = packaged_deployment(spec).get("model_kwargs") or {}
    head = "\n\nOptions of its deployment (`model_kwargs` in the deployment file):\n\n"
    return head + fields(spec.options, True, shipped)


def deployment() -> str:
    """The deployment file, and its sections."""
    sections = ((Deployment, ""), (EngineOptions, "engine"), (SchedulerOptions, "scheduler"), (RayOptions, "ray"))
    return "\n\n".join(
        f"## {f'`{name}`' if name else 'Keys'}\n\n{markdown(inspect.getdoc(model) or '')}\n\n{fields(model)}"
        for model, name in sections
    )


def fields(model: type[BaseModel], inside: bool = False, defaults: Mapping[str, Any] | None = None) -> str:
    """A table of *model*'s fields: name, what it may be, default, meaning. *inside*: and of those in its sections.
    *defaults*: what stands instead of the model's own."""
    rows = describe_fields(model, inside, defaults)
    for row in rows:
        if not row.meaning:
            raise SystemExit(f"{row.name} has no description")
    return table(("name", "value", "default", "meaning"), [(*row[:3], markdown(row.meaning)) for row in rows])


# --- routes -------------------------------------------------------------------------------------------------------


def routes() -> str:
    """Every route of the server, router by router."""
    return table(("route", "what it does"), [_route(route) for router in mstar_api() for route in router.routes])


def _route(route: Any) -> tuple[str, str]:
    methods = getattr(route, "methods", None)
    if methods is None:
        module = inspect.getdoc(sys.modules[route.endpoint.__module__]) or ""
        meaning = inspect.getdoc(route.endpoint) or module.partition(": ")[2]
        return f"`{route.path}` (websocket)", meaning.splitlines()[0]
    path = re.sub(r":\w+}", "}", route.path)
    return f"`{' '.join(sorted(methods))} {path}`", route.summary or ""


def statuses() -> str:
    """The errors that every route may give."""
    rows = [(str(status), answer["description"]) for status, answer in ERRORS.items()]
    return table(("status", "meaning"), rows)


# --- settings -----------------------------------------------------------------------------------------------------


def variables() -> list[tuple[str, str]]:
    """The settings' environment variables with their meanings."""
    return re.findall(r"^``(\w+)`` +(.+)$", settings.__doc__ or "", re.MULTILINE)


def settings_table() -> str:
    return table(("variable", "meaning"), [(f"`{name}`", markdown(meaning)) for name, meaning in variables()])


def metrics() -> str:
    """Every metric of ``/metrics``."""
    rows = [
        (f"`{m.name}`", m.kind, ", ".join(f"`{label}`" for label in m.labels) or "none", m.source, markdown(m.meaning))
        for m in CATALOG.values()
    ]
    reasons = ", ".join(f"`{reason}`" for reason in REASONS)
    return (
        f"{table(('name', 'kind', 'labels', 'source', 'meaning'), rows)}\n\n"
        f"Values of `reason`: {reasons}. `other` is a model's own word; `left`: nobody read to the end; "
        "`refused`: a 4xx; `timeout`: a 504; `failed`: any other 5xx."
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _distribution(file: Path) -> str:
    name: str = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"]
    return name


PARTS: dict[str, Callable[[], str]] = {
    "hooks": hooks,
    "knobs": knobs,
    "deployment": deployment,
    "settings": settings_table,
    "metrics": metrics,
    "routes": routes,
    "statuses": statuses,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
