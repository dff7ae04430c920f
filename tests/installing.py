"""Fresh environments for tests of installations: wheels, and virtual environments that share this one's libraries.

No index is needed. A fresh environment gets the libraries that its distributions require, as links to those of the
running environment, and nothing else: what a distribution forgot to require is not there.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["Environment", "build_wheel", "write_wheel"]

ROOT = Path(__file__).parent.parent
OURS = {"mstar-core": "core", "mstar-server": "server"}
OURS |= {file.parent.name: f"plugins/{file.parent.name}" for file in ROOT.glob("plugins/*/pyproject.toml")}


def build_wheel(name: str, folder: Path) -> Path:
    """Build our distribution *name* into *folder*, with the build backend of the running environment."""
    source = folder / f"{name}-source"
    shutil.copytree(ROOT / OURS[name], source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    build = f"from setuptools.build_meta import build_wheel; print(build_wheel({str(folder)!r}))"
    said = _run([sys.executable, "-c", build], cwd=source)
    return folder / said.splitlines()[-1]


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    modules: Mapping[str, str],
    *,
    requires: Iterable[str] = (),
    extras: Mapping[str, str] | None = None,
    plugin: str | None = None,
) -> Path:
    """Write the wheel of a small distribution.

    :param modules: file name → source. :param requires: requirements. :param extras: extra → its one requirement.
    :param plugin: ``"entry = module"`` in group ``mstar.plugins``.
    """
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {line}" for line in requires]
    for extra, line in (extras or {}).items():
        metadata += [f"Provides-Extra: {extra}", f'Requires-Dist: {line}; extra == "{extra}"']
    files = {
        **modules,
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if plugin is not None:
        files[f"{info}/entry_points.txt"] = f"[mstar.plugins]\n{plugin}\n"
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.writerow((path, f"sha256={digest}", len(text.encode())))
    rows.writerow((f"{info}/RECORD", "", ""))
    wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record.getvalue()}.items():
            archive.writestr(path, text)
    return wheel


class Environment:
    """A virtual environment in *folder* with the libraries that *distributions* (ours) require, and without us.

    :param wheels: the folder from which :meth:`install` takes wheels.
    """

    def __init__(self, folder: Path, wheels: Path, *distributions: str):
        self.folder, self.wheels = folder, wheels
        venv.create(folder / "venv", with_pip=False)
        self.bin = folder / "venv" / "bin"
        self.libraries = folder / "libraries"
        self.libraries.mkdir()
        for name in _closure(distributions):
            self._share(name)
        (site,) = (folder / "venv").glob("lib/python*/site-packages")
        (site / "libraries.pth").write_text(f"{self.libraries}\n")

    def _share(self, name: str) -> None:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link = self.libraries / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))).resolve())

    def install(self, *requirements: str, deps: bool = True) -> None:
        """``pip install`` from the folder of wheels alone."""
        words = ["install", "--no-index", "--find-links", str(self.wheels), *([] if deps else ["--no-deps"])]
        self._pip(*words, *requirements)

    def uninstall(self, *names: str) -> None:
        """``pip uninstall``."""
        self._pip("uninstall", "--yes", *names)

    def version(self, name: str) -> str:
        """The installed version of *name*."""
        (info,) = (self.folder / "venv").glob(f"lib/python*/site-packages/{name.replace('-', '_')}-*.dist-info")
        return info.name.removesuffix(".dist-info").rpartition("-")[2]

    def _pip(self, *words: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "--disable-pip-version-check"]
        _run([*pip, *words], self.environ())

    def mstar(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run ``mstar`` as it was installed."""
        command = [str(self.bin / "mstar"), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=self.environ(**environ), cwd=self.folder
        )

    def environ(self, **more: str) -> dict[str, str]:
        """The variables of a person who activated nothing: no Python path, no settings of ours, a cache of its own."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("MSTAR_", "PYTHON"))}
        return {**kept, "MSTAR_CACHE": str(self.folder / "cache"), "OMP_NUM_THREADS": "1", **more}


def _closure(distributions: Iterable[str]) -> Iterator[str]:
    """All that *distributions* require, directly or not, except our own distributions."""
    seen: set[tuple[str, str]] = set()  # a distribution and one of its extras, "" for the plain one
    left = [(name, "") for name in distributions]
    while left:
        name, extra = left.pop()
        name = canonicalize_name(name)
        if (name, extra) in seen:
            continue
        if name not in OURS and not any(name == other for other, _ in seen):
            yield name
        seen.add((name, extra))
        for requirement in map(Requirement, _requires(name, extra)):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                left += [(requirement.name, wanted) for wanted in ("", *requirement.extras)]


def _requires(name: str, extra: str) -> list[str]:
    """Requirements of *name*; of ours what the checkout says, which an editable installation may not know yet."""
    if name not in OURS:
        return importlib.metadata.requires(name) or []
    project = tomllib.loads((ROOT / OURS[name] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["optional-dependencies"][extra] if extra else project["dependencies"])


def _run(command: list[str], environ: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=cwd)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
