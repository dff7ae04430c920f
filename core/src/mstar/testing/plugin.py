"""The pytest plugin of M*: ``pytest --mstar-plugin NAME`` runs the conformance suite on a plugin.

Every pytest run of an environment with mstar-core imports this module: keep it light. What the suite checks, and how a
family uses it in its own tests: ``docs/conformance.md``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mstar.registry import Registry
    from mstar.testing.conformance.subject import Subject

__all__ = ["mstar_checkpoint", "mstar_key", "mstar_model", "mstar_plugin", "mstar_registry"]

pytest.register_assert_rewrite("mstar.testing.conformance")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mstar", "M* conformance")
    group.addoption(
        "--mstar-plugin",
        metavar="NAME",
        help="run the conformance suite on this plugin: the name of its entry point or distribution, or a module",
    )
    group.addoption(
        "--mstar-model", metavar="KEY", action="append", default=[], help="only on this model; may be repeated"
    )
    group.addoption(
        "--mstar-weights",
        metavar="KEY=DIR",
        action="append",
        default=[],
        help="use this checkpoint for a model instead of its tiny one; may be repeated",
    )


def pytest_configure(config: pytest.Config) -> None:
    for option in config.getoption("mstar_weights"):
        key, equals, folder = option.partition("=")
        if not (key and equals and Path(folder).is_dir()):
            raise pytest.UsageError(f"--mstar-weights {option!r}: write KEY=DIR with the folder of a checkpoint")
    if config.getoption("mstar_plugin") is None:
        return
    suite = str(Path(__file__).parent / "conformance" / "suite.py")
    asked = config.args_source == pytest.Config.ArgsSource.ARGS  # paths on the command line run as well
    config.args = [*config.args, suite] if asked else [suite]


@pytest.fixture(scope="class")
def mstar_plugin(request: pytest.FixtureRequest) -> str | None:
    """The plugin under test; ``None``: whichever provides the key."""
    named: str | None = getattr(request.cls, "plugin", None) or request.config.getoption("mstar_plugin")
    return named


@pytest.fixture(scope="class")
def mstar_registry(mstar_plugin: str | None) -> Registry:
    """A registry with the plugin under test in it."""
    from mstar.testing.conformance.subject import open_registry

    return open_registry(mstar_plugin)


@pytest.fixture(scope="class")
def mstar_key(request: pytest.FixtureRequest) -> str:
    """The model under test: the test class's ``key``."""
    key: str = request.cls.key
    return key


@pytest.fixture(scope="class")
def mstar_checkpoint(
    request: pytest.FixtureRequest, mstar_key: str, mstar_registry: Registry, tmp_path_factory: pytest.TempPathFactory
) -> Path | None:
    """The folder that the model is loaded from: of ``--mstar-weights``, else what ``ModelSpec.tiny`` writes. A family
    may override this fixture. ``None``: the model has no weights, or no tiny checkpoint."""
    from mstar.registry import load_object

    folders = dict(option.split("=", 1) for option in request.config.getoption("mstar_weights"))
    if mstar_key in folders:
        return Path(folders[mstar_key]).absolute()
    tiny = mstar_registry.model(mstar_key).tiny
    if tiny is None:
        return None
    folder = tmp_path_factory.mktemp("tiny")
    write: Any = load_object(tiny)
    write(folder)
    return folder


@pytest.fixture(scope="class")
def mstar_model(mstar_key: str, mstar_registry: Registry, mstar_checkpoint: Path | None) -> Subject:
    """The model under test, with its checkpoint and sample requests."""
    from mstar.testing.conformance.subject import Subject

    return Subject(mstar_registry, mstar_key, mstar_checkpoint)
