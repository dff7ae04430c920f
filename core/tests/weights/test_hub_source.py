"""The Hub source against a small Hub on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mstar.spec.errors import WeightsError
from mstar.spec.knobs import Knobs
from mstar.spec.model import Licence, ModelSpec, WeightsRef
from mstar.weights.hub import HubSource
from mstar.weights.parts import assembled
from mstar.weights.sources import SourceContext, resolve_weights

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"\x02\0\0\0\0\0\0\0{}" + bytes(3000),
    "tokenizer.json": b'{"model": {}}',
    "pytorch_model.bin": b"the same weights once more",
    "README.md": b"# readme",
}


class FakeHub(ThreadingHTTPServer):
    """Serves repository ``o/tiny`` at one commit; ``o/gated`` is gated, anything else is missing."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requested: list[str] = []
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Be quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.requested.append(f"{self.command} {path}")
        self.server.tokens.add(self.headers.get("Authorization"))
        if "o/gated" in path:
            self._fail(403, "GatedRepo")
        elif "o/tiny" not in path:
            self._fail(401, "RepoNotFound")
        elif path in (
            f"/api/models/o/tiny/revision/{COMMIT}",
            "/api/models/o/tiny/revision/main",
            "/api/models/o/tiny",
        ):
            self._json({"id": "o/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]})
        elif path == f"/api/models/o/tiny/tree/{COMMIT}":
            self._json(
                [
                    {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                    for n, c in FILES.items()
                ]
            )
        elif path.startswith(f"/o/tiny/resolve/{COMMIT}/"):
            self._file(path.rpartition("/")[2])
        else:
            self._fail(404, "RevisionNotFound")

    def _json(self, content: object) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str) -> None:
        etag = f'"{hashlib.sha256(FILES[name]).hexdigest()}"'
        self._answer(200, FILES[name], {"ETag": etag, "X-Repo-Commit": COMMIT})

    def _fail(self, status: int, code: str) -> None:
        self._answer(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def context(hub: FakeHub, tmp_path: Path, *, offline: bool = False, token: str | None = None) -> SourceContext:
    return SourceContext(cache=tmp_path, hub_cache=tmp_path / "hub", endpoint=hub.url, offline=offline, token=token)


def test_takes_weights_config_and_tokenizer_only(hub: FakeHub, tmp_path: Path) -> None:
    folder = HubSource().resolve(WeightsRef("hub", "o/tiny", COMMIT), context(hub, tmp_path))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        name: FILES[name] for name in ("config.json", "model.safetensors", "tokenizer.json")
    }


def test_a_branch_is_resolved_to_its_commit(hub: FakeHub, tmp_path: Path) -> None:
    assert HubSource().resolve(WeightsRef("hub", "o/tiny"), context(hub, tmp_path)).name == COMMIT


def test_patterns_of_the_reference(hub: FakeHub, tmp_path: Path) -> None:
    ref = WeightsRef("hub", "o/tiny", COMMIT, {"allow": ["*"], "ignore": ["*.md", "*.json"]})
    folder = HubSource().resolve(ref, context(hub, tmp_path))
    assert {file.name for file in folder.iterdir()} == {"model.safetensors", "pytorch_model.bin"}


PARTS = {"parts": {"codec": {"id": "o/tiny", "revision": COMMIT, "allow": ["*.bin", "*.md"]}}}


def test_parts_become_folders(hub: FakeHub, tmp_path: Path) -> None:
    ref = WeightsRef("hub", "o/tiny", COMMIT, PARTS)
    assert HubSource().present(ref, context(hub, tmp_path)) is None
    folder = HubSource().resolve(ref, context(hub, tmp_path))
    assert {file.name for file in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json", "codec"}
    assert (folder / "codec" / "pytorch_model.bin").read_bytes() == FILES["pytorch_model.bin"]
    hub.requested.clear()
    assert HubSource().resolve(ref, context(hub, tmp_path, offline=True)) == folder
    assert HubSource().present(ref, context(hub, tmp_path)) == folder
    assert hub.requested == []


def test_a_folder_of_links_that_lead_nowhere_is_made_again(tmp_path: Path) -> None:
    main, part = tmp_path / "main", tmp_path / "part"
    for made in (main, part):
        made.mkdir()
        (made / "file").write_text(made.name)
    folder = assembled(tmp_path / "cache", main, {"codec": part})
    (folder / "file").unlink()
    (folder / "file").symlink_to(tmp_path / "gone")
    assert assembled(tmp_path / "cache", main, {"codec": part}) == folder
    assert (folder / "file").read_text() == "main"
    assert (folder / "codec" / "file").read_text() == "part"


def test_a_part_that_the_repository_has_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "main" / "codec").mkdir(parents=True)
    assert assembled(tmp_path / "cache", tmp_path / "main", {"codec": tmp_path}) == tmp_path / "main"


@pytest.mark.parametrize("part", [{"revision": COMMIT}, {"id": "o/tiny", "alow": ["*"]}])
def test_a_part_that_cannot_be_read_is_named(hub: FakeHub, tmp_path: Path, part: dict[str, object]) -> None:
    with pytest.raises(WeightsError, match="a part 'codec' that cannot be read"):
        HubSource().resolve(WeightsRef("hub", "o/tiny", COMMIT, {"parts": {"codec": part}}), context(hub, tmp_path))


def test_another_copy_has_the_parts_of_the_published_one(hub: FakeHub, tmp_path: Path) -> None:
    """A fine-tune of the language model needs the same codec."""
    spec = ModelSpec(
        key="speaks",
        family="tests",
        summary="",
        weights=(WeightsRef("hub", "o/published", COMMIT, PARTS),),
        licence=Licence("Apache-2.0"),
        model="",
        processor="",
        knobs=Knobs,
    )
    folder = resolve_weights(spec, f"o/tiny@{COMMIT}", lambda name: HubSource, context(hub, tmp_path))
    assert folder is not None
    assert (folder / "codec" / "pytorch_model.bin").is_file()


def test_a_cached_snapshot_serves_offline(hub: FakeHub, tmp_path: Path) -> None:
    ref = WeightsRef("hub", "o/tiny", COMMIT)
    first = HubSource().resolve(ref, context(hub, tmp_path))
    hub.requested.clear()
    assert HubSource().resolve(ref, context(hub, tmp_path, offline=True)) == first
    assert hub.requested == []


def test_the_token_is_sent(hub: FakeHub, tmp_path: Path) -> None:
    HubSource().resolve(WeightsRef("hub", "o/tiny", COMMIT), context(hub, tmp_path, token="hf_secret"))
    assert "Bearer hf_secret" in hub.tokens


@pytest.mark.parametrize(
    ("ref", "sentence"),
    [
        (WeightsRef("hub", "o/gated", COMMIT), "is gated: accept its terms"),
        (WeightsRef("hub", "o/missing", COMMIT), "no model 'o/missing'"),
        (WeightsRef("hub", "o/tiny", "no-such-branch"), "no revision 'no-such-branch'"),
        (WeightsRef("hub", "o/ti..ny", COMMIT), "not a Hub id"),
        (WeightsRef("hub", "o/tiny", COMMIT, {"allow": ["*.json"]}), "no weight file"),
        (WeightsRef("hub", "o/tiny", COMMIT, {"allows": []}), "unknown options"),
    ],
)
def test_errors_are_sentences(hub: FakeHub, tmp_path: Path, ref: WeightsRef, sentence: str) -> None:
    with pytest.raises(WeightsError, match=sentence):
        HubSource().resolve(ref, context(hub, tmp_path))


def test_offline_without_a_snapshot(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="offline mode"):
        HubSource().resolve(WeightsRef("hub", "o/tiny", COMMIT), context(hub, tmp_path, offline=True))
    assert hub.requested == []


def test_a_hub_that_is_not_there(tmp_path: Path) -> None:
    nowhere = SourceContext(cache=tmp_path, hub_cache=tmp_path / "hub", endpoint="http://127.0.0.1:9")
    with pytest.raises(WeightsError, match="does not answer"):
        # a branch: for a pinned commit the library retries for twenty seconds first
        HubSource().resolve(WeightsRef("hub", "o/tiny"), nowhere)


def test_what_the_library_logs_is_printed_once(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, own = logging.getLogger("huggingface_hub"), logging.StreamHandler()
    monkeypatch.setattr(library, "handlers", [own])
    with monkeypatch.context() as unset:
        unset.setattr(logging.getLogger(), "handlers", [])
        HubSource().resolve(WeightsRef("hub", "o/tiny"), context(hub, tmp_path))
    assert library.handlers == [own], "nobody else prints it"
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    HubSource().resolve(WeightsRef("hub", "o/tiny"), context(hub, tmp_path))
    assert library.handlers == []
    assert library.propagate


def test_a_part_whose_shards_are_missing_is_not_there(tmp_path: Path) -> None:
    """Of repositories with a folder for each part, too."""
    source, ref = HubSource(), WeightsRef("hub", "o/parts", COMMIT)
    context = SourceContext(cache=tmp_path, hub_cache=tmp_path)
    part = tmp_path / "models--o--parts" / "snapshots" / COMMIT / "transformer"
    part.mkdir(parents=True)
    (part / "one.safetensors").write_bytes(b"")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (part / "model.safetensors.index.json").write_text(json.dumps(index))
    assert source.present(ref, context) is None
    (part / "two.safetensors").write_bytes(b"")
    assert source.present(ref, context) == part.parent
