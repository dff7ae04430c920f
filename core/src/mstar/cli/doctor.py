"""``mstar doctor``: what of this machine works, what is missing, and what to type."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from mstar.cli.commands import Commands, Context, Parser
from mstar.cli.options import with_json
from mstar.cli.output import bytes_in_words, print_json
from mstar.cli.plugins import remedy
from mstar.plugin_code import quiet
from mstar.spec.errors import PluginError
from mstar.spec.finding import STATES, Finding

__all__ = ["register"]

_PORT = 8000
_LITTLE_DISK = 5_000_000_000
_WIDTH = len("attention batch_invariant")
"""Of the column of subjects: lines are written before the later ones are known."""
_CODECS = {"PIL": ("pillow", "images"), "soundfile": ("soundfile", "audio files"), "av": ("av", "video")}


Check = Callable[[Context], Iterator[Finding]]


def register(commands: Commands) -> None:
    """Add the command."""
    commands.add("doctor", _run, help="Say what works here, what is missing and what to type.", arguments=_arguments)


def _arguments(parser: Parser) -> None:
    parser.add_argument("--online", action="store_true", help="also ask whether the Hub can be reached")
    with_json(parser)


def _run(arguments: argparse.Namespace, context: Context) -> int:
    checks: dict[str, Check] = {
        "Python": _python, "PyTorch": _torch, "devices": _devices, "attention": _attention, "decoders": _codecs,
        "the server": _server, "plugins": _plugins, "what plugins need": _needs, "disks": _disk, "memory": _memory,
        "the port": _port,
    }  # fmt: skip
    if arguments.online:
        checks["the Hub"] = _hub
    if arguments.json:
        findings = list(_found(checks, context))
        bad = any(finding.state == "bad" for finding in findings)
        print_json({"ok": not bad, "findings": [asdict(finding) for finding in findings]})
        return int(bad)
    width = max(_WIDTH, *(len(f"plugin {plugin.name}") for plugin in context.plugins.loaded))
    bad = False
    with _waiting() as waiting:
        for finding in _found(checks, context, waiting.on):
            bad = bad or finding.state == "bad"
            with waiting.aside():
                _show(finding, width)
    return int(bad)


def _found(
    checks: Mapping[str, Check], context: Context, on_check: Callable[[str], None] = lambda what: None
) -> Iterator[Finding]:
    """What *checks* find, each as soon as it is known. *on_check*: told what is looked at next."""
    for what, check in checks.items():
        on_check(what)
        findings = check(context)
        while True:
            with quiet():  # plugins' backends are asked
                finding = next(findings, None)
            if finding is None:
                break
            yield finding


def _show(finding: Finding, width: int) -> None:
    print(f"{finding.state:7}  {finding.subject:{width}}  {finding.detail}")
    if finding.advice:
        print(f"{'':7}  {'':{width}}  → {finding.advice}")
    sys.stdout.flush()  # who reads it through a pipe waits as well


class _Waiting:
    """A line that says what is looked at, while that takes its time; *status* is rich's, or ``None`` for no line."""

    def __init__(self, status: Any = None):
        self._status = status

    def on(self, what: str) -> None:
        if self._status is not None:
            self._status.update(f"looking at {what}")

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The line makes room for what is printed inside."""
        if self._status is None:
            yield
            return
        self._status.stop()
        yield
        self._status.start()


@contextmanager
def _waiting() -> Iterator[_Waiting]:
    """On standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield _Waiting()
        return
    from rich.console import Console

    with Console(file=sys.stderr).status("") as status:
        yield _Waiting(status)


def _python(context: Context) -> Iterator[Finding]:
    del context
    yield Finding("Python", "ok", f"{sys.version.split()[0]} at {sys.executable}")


def _torch(context: Context) -> Iterator[Finding]:
    del context
    try:
        import torch
    except Exception as error:  # a broken install raises what it likes
        yield Finding("PyTorch", "bad", f"cannot be imported: {error}", "pip install 'torch>=2.9'")
        return
    yield Finding("PyTorch", "ok", f"{torch.__version__}, {torch.get_num_threads()} of {os.cpu_count()} CPU threads")


def _devices(context: Context) -> Iterator[Finding]:
    del context
    if "torch" not in sys.modules:
        return  # said before
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"PyTorch is built for CUDA {built}, but no device answers" if built else "this PyTorch has no CUDA"
        seen = shutil.which("nvidia-smi")
        advice = "install a CUDA build of PyTorch (https://pytorch.org)" if seen and not built else ""
        yield Finding("GPU", "missing", f"none: {why}; models run on the CPU", advice)
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        detail = f"{name}, {bytes_in_words(free)} of {bytes_in_words(total)} free, CUDA {torch.version.cuda}"
        yield Finding(f"GPU {index}", "ok", detail)


def _attention(context: Context) -> Iterator[Finding]:
    """Each backend is asked for a need that is common on the best device here."""
    if "torch" not in sys.modules:
        return
    import torch

    from mstar.resources.attention import AttentionNeed

    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    need = AttentionNeed("kv", device, dtype, query_heads=32, kv_heads=8, head_dim=128, page_size=16)
    log = logging.getLogger("mstar.registry")
    level = log.level
    log.setLevel(logging.ERROR)  # what cannot be imported is said here, as a finding
    try:
        backends = context.registry.attention_backends()
    finally:
        log.setLevel(level)
    working = 0
    for name, backend in backends.items():
        made = backend()
        reason = made.supports(need)
        working += reason is None
        if reason is None:
            yield Finding(f"attention {name}", "ok", f"usable on {device}")
        elif made.supports(replace(need, deterministic=True)) is None:  # it serves such engines alone
            yield Finding(f"attention {name}", "ok", f"usable on {device}, with engine.deterministic")
        else:
            yield Finding(f"attention {name}", "missing", reason)
    for name, why in context.registry.unusable_attention_backends().items():
        yield Finding(f"attention {name}", "missing", why)
    if not working:
        yield Finding("attention", "bad", "no backend works here", "pip install --force-reinstall mstar-core")


def _codecs(context: Context) -> Iterator[Finding]:
    del context
    for module, (package, what) in _CODECS.items():
        if importlib.util.find_spec(module) is None:
            yield Finding(what, "missing", f"{module} is not installed", f"pip install {package}")
        else:
            yield Finding(what, "ok", f"{package} {importlib.metadata.version(package)}")


def _server(context: Context) -> Iterator[Finding]:
    del context
    if importlib.util.find_spec("mstar_server") is None:
        yield Finding("HTTP server", "missing", "mstar-server is not installed", "pip install mstar-server")
    else:
        yield Finding("HTTP server", "ok", "mstar-server is installed")


def _plugins(context: Context) -> Iterator[Finding]:
    models = context.registry.models
    for plugin in context.plugins.loaded:
        keys = sorted(key for key, model in models.items() if model.plugin is plugin)
        yield Finding(f"plugin {plugin.name}", "ok", f"{plugin.version}" + (f": {', '.join(keys)}" if keys else ""))
    for broken in context.plugins.broken:
        yield Finding(f"plugin {broken.name}", "missing", broken.reason, remedy(broken))
    if not models:
        yield Finding("models", "missing", "no plugin provides a model", "pip install mstar-demo")


def _needs(context: Context) -> Iterator[Finding]:
    """What plugins say of this machine."""
    for plugin in context.plugins.loaded:
        try:
            for found in context.plugins.call(plugin, "mstar_doctor"):
                yield from _checked(found)
        except PluginError as error:
            yield Finding(f"plugin {plugin.name}", "missing", str(error), error.remedy)


def _checked(found: Any) -> list[Finding]:
    if not isinstance(found, list | tuple) or not all(isinstance(f, Finding) and f.state in STATES for f in found):
        raise PluginError(f"mstar_doctor must return a list of Finding, not {found!r:.80}")
    return list(found)


def _disk(context: Context) -> Iterator[Finding]:
    for what, folder in (("cache", context.settings.cache), ("Hub's cache", context.settings.hub_cache)):
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(there).free
        variable = "MSTAR_CACHE" if what == "cache" else "HF_HUB_CACHE"
        if not os.access(there, os.W_OK):
            advice = f"make it writable, or set {variable} to another folder"
            yield Finding(what, "bad", f"{folder} cannot be written", advice)
        elif free < _LITTLE_DISK:
            advice = f"free some, or set {variable} to a larger disk"
            yield Finding(what, "missing", f"{folder}: only {bytes_in_words(free)} free", advice)
        else:
            yield Finding(what, "ok", f"{folder}: {bytes_in_words(free)} free")


def _memory(context: Context) -> Iterator[Finding]:
    del context
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        free, total = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
        yield Finding("memory", "ok", f"{bytes_in_words(free)} of {bytes_in_words(total)} free")


def _port(context: Context) -> Iterator[Finding]:
    del context
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", _PORT))
        except OSError as error:
            advice = f"mstar serve KEY --port {_PORT + 1}"
            yield Finding(f"port {_PORT}", "missing", f"not free: {error.strerror}", advice)
        else:
            yield Finding(f"port {_PORT}", "ok", "free")


def _hub(context: Context) -> Iterator[Finding]:
    settings: Any = context.settings
    if settings.offline:
        yield Finding("Hub", "missing", "offline mode is on", "unset HF_HUB_OFFLINE")
        return
    import urllib.error
    import urllib.request

    address = settings.hub_endpoint or "https://huggingface.co"
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=10).close()
    except urllib.error.HTTPError as error:
        yield Finding("Hub", "ok", f"{address} answers ({error.code})")
    except OSError as error:
        advice = "check network and proxy, or set HF_ENDPOINT to a mirror"
        yield Finding("Hub", "missing", f"{address} does not answer: {error}", advice)
    else:
        yield Finding("Hub", "ok", f"{address} answers")
