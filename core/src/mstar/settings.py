"""The settings of a process: read once, at the edge, into one frozen object that is passed down.

Nothing else in M* reads the environment. What belongs to one model stands in its deployment file
(:mod:`mstar.spec.deployment`) instead.

=========================== ========================================================================================
variable                    meaning
=========================== ========================================================================================
``MSTAR_CACHE``             Folder for weights and what was compiled. Default ``~/.cache/mstar``.
``MSTAR_CONFIG``            Folder for accepted licences and API keys. Default ``~/.config/mstar``.
``MSTAR_PLUGINS``           Use only these installed plugins (names, with commas); set but empty means none.
``MSTAR_BLOCK_PLUGINS``     Do not import these plugins.
``MSTAR_EXTRA_PLUGINS``     Modules to load as plugins beside the installed ones.
``MSTAR_TRACE_PLUGINS``     1 prints every hook call on standard error. Default 0.
``MSTAR_ACCEPT_LICENCES``   Keys of models whose non-permissive terms the operator accepts.
``MSTAR_API_KEY``           Clients of the server must send this key.
``MSTAR_MAX_VIDEO_PIXELS``  Pixels of a video's decoded frames, unless ``--max-video-pixels`` says. Default 2^30.
``MSTAR_LOG_LEVEL``         ``debug``, ``info``, ``warning`` or ``error``. Default ``info``.
``MSTAR_LOG_FORMAT``        ``text``, or ``json``: an object a line, for programs. Default ``text``.
``HF_TOKEN``                Token for the Hugging Face Hub.
``HF_ENDPOINT``             Address of the Hub or of a mirror.
``HF_HUB_OFFLINE``          Use what is on this machine and never the network.
``HF_HUB_CACHE``            Folder of the Hub's snapshots. Default ``$HF_HOME/hub``.
``HF_HOME``                 Folder of the Hub's library. Default ``~/.cache/huggingface``.
=========================== ========================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mstar.log_format import LOG_FORMATS, LogFormat
from mstar.spec.errors import SetupError, nearest

__all__ = ["LIBRARIES", "Settings"]

Choice = TypeVar("Choice", bound=str)

LIBRARIES = {"PYDANTIC_DISABLE_PLUGINS": "__all__", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""What M*'s processes set before they import these libraries, unless the operator has: no plugins of theirs. M* needs
none, and to find them both libraries read the entry points of every distribution: one damaged file would end every
command, before ``mstar plugins`` could name it."""

LOG_LEVELS = ("debug", "info", "warning", "error")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def _default_cache() -> Path:
    return Path.home() / ".cache" / "mstar"


def _default_config() -> Path:
    return Path.home() / ".config" / "mstar"


def _default_hub_cache() -> Path:
    return Path.home() / ".cache" / "huggingface" / "hub"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See the module's table. Secrets are kept out of ``repr``.

    :param plugins: names of the installed plugins to use; ``None`` uses all of them.
    """

    cache: Path = field(default_factory=_default_cache)
    config: Path = field(default_factory=_default_config)
    hub_cache: Path = field(default_factory=_default_hub_cache)
    plugins: tuple[str, ...] | None = None
    block_plugins: tuple[str, ...] = ()
    extra_plugins: tuple[str, ...] = ()
    trace_plugins: bool = False
    accept_licences: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    max_video_pixels: int | None = None
    log_level: str = "info"
    log_format: LogFormat = "text"
    hub_token: str | None = field(default=None, repr=False)
    hub_endpoint: str | None = None
    offline: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from *environ* (default: the process's environment).

        :raises SetupError: a value does not parse; names the variable and what it may be.
        """
        env = os.environ if environ is None else environ
        return cls(
            cache=_folder(env, "MSTAR_CACHE", _default_cache),
            config=_folder(env, "MSTAR_CONFIG", _default_config),
            hub_cache=_hub_cache(env),
            plugins=_names(env, "MSTAR_PLUGINS") if "MSTAR_PLUGINS" in env else None,
            block_plugins=_names(env, "MSTAR_BLOCK_PLUGINS"),
            extra_plugins=_modules(env, "MSTAR_EXTRA_PLUGINS"),
            trace_plugins=_flag(env, "MSTAR_TRACE_PLUGINS"),
            accept_licences=_names(env, "MSTAR_ACCEPT_LICENCES"),
            api_key=env.get("MSTAR_API_KEY") or None,
            max_video_pixels=_count(env, "MSTAR_MAX_VIDEO_PIXELS"),
            log_level=_choice(env, "MSTAR_LOG_LEVEL", LOG_LEVELS, "info"),
            log_format=_choice(env, "MSTAR_LOG_FORMAT", LOG_FORMATS, "text"),
            hub_token=env.get("HF_TOKEN") or None,
            hub_endpoint=_url(env, "HF_ENDPOINT"),
            offline=_flag(env, "HF_HUB_OFFLINE"),
        )


def _names(env: Mapping[str, str], variable: str) -> tuple[str, ...]:
    return tuple(name for part in env.get(variable, "").split(",") if (name := part.strip()))


def _modules(env: Mapping[str, str], variable: str) -> tuple[str, ...]:
    names = _names(env, variable)
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise SetupError(f"{variable}: {name!r} is not the name of a Python module (as in 'package.module')")
    return names


def _folder(env: Mapping[str, str], variable: str, default: Callable[[], Path]) -> Path:
    if not (value := env.get(variable)):
        return default()
    try:
        folder = Path(value).expanduser().absolute()
    except RuntimeError as error:
        raise SetupError(f"{variable}: {value!r} has no home folder: {error}") from None
    if folder.exists() and not folder.is_dir():
        raise SetupError(f"{variable}: {value!r} is not a folder")
    return folder


def _hub_cache(env: Mapping[str, str]) -> Path:
    """As the Hub's library finds it."""

    def below_home() -> Path:
        return _folder(env, "HF_HOME", lambda: _default_hub_cache().parent) / "hub"

    return _folder(env, "HF_HUB_CACHE", below_home)


def _choice(env: Mapping[str, str], variable: str, choices: tuple[Choice, ...], default: Choice) -> Choice:
    value = env.get(variable, "").strip().lower() or default
    for choice in choices:
        if value == choice:
            return choice
    raise SetupError(f"{variable}: {value!r} is not a valid value{nearest(value, choices)}")


def _count(env: Mapping[str, str], variable: str) -> int | None:
    value = env.get(variable, "").strip()
    if value and not (value.isascii() and value.isdigit() and int(value) > 0):
        raise SetupError(f"{variable}: {value!r} is not a whole number of at least 1")
    return int(value) if value else None


def _url(env: Mapping[str, str], variable: str) -> str | None:
    value = env.get(variable, "").strip().rstrip("/")
    if value and not value.startswith(("http://", "https://")):
        raise SetupError(f"{variable}: {value!r} must begin with http:// or https://")
    return value or None


def _flag(env: Mapping[str, str], variable: str) -> bool:
    value = env.get(variable, "").strip().lower()
    if value not in _TRUE + _FALSE:
        raise SetupError(f"{variable}: {value!r} is neither yes nor no; use 1 or 0")
    return value in _TRUE
