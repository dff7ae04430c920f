"""The examples of the pages about HTTP, followed against a real server, and no route is without one.

A page is followed from top to bottom in a folder of its own: its Python blocks are one program, its commands run in a
shell. The `text` block after one is what it prints; a `json` block has the shape of its (first) answer. A block after
``<!-- test: skip -->`` is not followed.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from mstar.testing.miniatures import MINIATURES
from mstar.testing.miniatures.catalog import spoken
from mstar_server.plugin import mstar_api

from .serving import Server, serving
from .test_docs import ROOT
from .tiny_models import publish

pytestmark = [
    # OpenAI's client: of its sockets, and that its own service for videos ends
    pytest.mark.filterwarnings("ignore:connect\\(\\) must be used:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:openai"),
]
PAGES = ("README", "text", "speech", "transcriptions", "images", "videos", "realtime", "playground")
FOLLOWED = [*(f"docs/http/{page}.md" for page in PAGES), "docs/native.md", "docs/operations.md"]
BLOCK = re.compile(r"(<!-- test: skip -->\n)?```(\w+)\n(.*?)```\n(?:\n```(text|json)\n(.*?)```\n)?", re.DOTALL)
SLOW = "docs/operations.md"
"""Its model must still run when it is cancelled."""
ON_DEMAND = "mini_seq2seq"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One with models of every ability, and one whose model has a tokenizer; both at the documentation's address."""
    folder = tmp_path_factory.mktemp("weights")
    publish("tiny-llama", folder)
    keys = [mini.key for mini in MINIATURES if mini.key != ON_DEMAND]
    plugins = ("mstar.testing.miniatures", "tests.thinking")
    with (
        serving(*keys, "thinker", on_demand=(ON_DEMAND,), extra_plugins=plugins, executor="inline") as minis,
        serving("tiny-llama", weights=str(folder), extra_plugins=("tests.tiny_models",), executor="inline") as tiny,
    ):
        yield {"minis": minis, "tiny": tiny}


def supplies(folder: Path) -> None:
    """The files that examples send."""
    soundfile.write(folder / "talk.wav", spoken("hello there\ngoodbye"), 8000, subtype="PCM_16")
    pcm = np.rint(spoken("hello there", 24_000) * 32768).astype("<i2")
    (folder / "talk.pcm").write_bytes(pcm.tobytes())
    Image.new("RGB", (32, 32), "red").save(folder / "cat.jpg")


class Page:
    """One page's program, as far as it was followed."""

    def __init__(self, name: str, servers: dict[str, Server], folder: Path):
        self.name, self.servers, self.folder = name, servers, folder
        self.names: dict[str, Any] = {"__name__": "example"}

    def server(self, source: str) -> Server:
        return self.servers["tiny" if "smollm2" in source and self.name != SLOW else "minis"]

    def here(self, source: str) -> str:
        """*source* with the address and the models of the test's servers."""
        server = self.server(source)
        model = "thinker" if self.name == SLOW else "tiny-llama"
        return source.replace("127.0.0.1:8000", server.url.removeprefix("http://")).replace("smollm2", model)

    def follow(self) -> int:
        """How many blocks there were."""
        count = 0
        for skipped, language, source, kind, want in BLOCK.findall((ROOT / self.name).read_text(encoding="utf-8")):
            if skipped or language not in ("python", "sh"):
                continue
            count += 1
            said = self.python(source) if language == "python" else self.shell(source)
            if kind == "text":
                assert said == want
            elif kind == "json":
                got, _ = json.JSONDecoder().raw_decode(said[said.index("{") :])
                assert missing(json.loads(want), got) == []
        return count

    def python(self, source: str) -> str:
        if "client" in self.names:  # an earlier block's; here there are two servers
            self.names["client"] = self.names["client"].with_options(base_url=f"{self.server(source).url}/v1")
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.chdir(self.folder):
            exec(compile(self.here(source), self.name, "exec"), self.names)
        return out.getvalue()

    def shell(self, source: str) -> str:
        quiet = self.here(source).replace("curl ", "curl -sS --fail-with-body ")
        done = subprocess.run(["bash", "-ec", quiet], cwd=self.folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def missing(want: Any, got: Any, where: str = "") -> list[str]:
    """What of *want*'s shape *got* does not have."""
    if isinstance(want, dict) and isinstance(got, dict):
        lacking = [f"{where}.{key}" for key in want if key not in got]
        return lacking + [
            fault for key in want if key in got for fault in missing(want[key], got[key], f"{where}.{key}")
        ]
    if isinstance(want, list) and isinstance(got, list):
        return [] if not want else missing(want[0], got[0], f"{where}[0]") if got else [f"{where}[0]"]
    same = type(want) is type(got) or (isinstance(want, int | float) and isinstance(got, int | float))
    return [] if same else [f"{where}: {type(got).__name__}"]


def follow(page: str, servers: dict[str, Server], folder: Path) -> None:
    supplies(folder)
    followed.add(page)
    assert Page(page, servers, folder).follow() > 0
    source = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(r"(?:-o |write_to_file\(\")([\w.]+)", source):
        assert (folder / name).stat().st_size > 100


followed: set[str] = set()


@pytest.mark.parametrize("page", FOLLOWED)
def test_page(page: str, servers: dict[str, Server], tmp_path: Path) -> None:
    follow(page, servers, tmp_path)


def test_every_route_has_an_example(servers: dict[str, Server], tmp_path: Path) -> None:
    """As the servers counted them."""
    for number, page in enumerate(set(FOLLOWED) - followed):
        folder = tmp_path / str(number)
        folder.mkdir()
        follow(page, servers, folder)
    routes = set()
    for route in (route for router in mstar_api() for route in router.routes):
        if getattr(route, "summary", None) != "Not supported":
            routes |= {(method, route.path) for method in getattr(route, "methods", ["WEBSOCKET"])}
    assert len(routes) > 30
    counted = "".join(server.http.get("/metrics").text for server in servers.values())
    line = r'^mstar_http_requests_total\{method="(.*?)",route="(.*?)",status="[123]..?"\}'
    assert sorted(routes - set(re.findall(line, counted, re.MULTILINE))) == []
