"""The playground's files: what is served, with which headers, and what is not."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import httpx
import pytest

from mstar_server.app import create_app
from mstar_server.options import ServerOptions

FOLDER = Path(str(files("mstar_server").joinpath("playground")))
NAMES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())


@pytest.fixture
def ask(kit):
    def client(**options):
        app = create_app({"tiny": kit.Service(kit.HELLO)}, kit.Hooks(), ServerOptions(**options))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")

    return client


async def test_every_file_is_served_and_asked_about_again(ask):
    async with ask() as client:
        for name in NAMES:
            answer = await client.get(f"/playground/{name}")
            assert (answer.status_code, answer.content) == (200, (FOLDER / name).read_bytes()), name
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await client.get(
                f"/playground/{name}", headers={"If-None-Match": f'"x", W/{answer.headers["etag"]}'}
            )
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == answer.headers["etag"]
        kinds = {name.rpartition(".")[2] for name in NAMES}
        assert kinds == {"html", "css", "js", "svg"}


async def test_the_page_may_load_its_own_files_only(ask):
    async with ask() as client:
        page = await client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    text = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in NAMES)
    assert re.findall(r"""<[^>]+\s(?:on\w+|style)=""", page.text) == [], "the policy would refuse them"
    assert "innerHTML" not in text
    assert "eval(" not in text
    elsewhere = set(re.findall(r"https?://[\w.-]+", text)) - {"http://www.w3.org"}
    assert elsewhere == set()


async def test_modules_import_what_there_is():
    for name in NAMES:
        if name.endswith(".js"):
            source = (FOLDER / name).read_text(encoding="utf-8")
            for target in re.findall(r'from "(\.[^"]+)"', source):
                assert ((FOLDER / name).parent / target).is_file(), (name, target)


@pytest.mark.parametrize(
    "path",
    ["/playground/x.js", "/playground/", "/playground/../routes/chat.py", "/playground/%2e%2e/app.py",
     "/playground/..%2f..%2fapp.py", "/playground//etc/passwd", "/playground/%00", "/playground/views",
     "/playground/a\\b"],
)  # fmt: skip
async def test_nothing_else_is_served(ask, path):
    async with ask() as client:
        answer = await client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


async def test_it_can_be_left_out(ask):
    async with ask(playground=False, api_key="k") as client:
        assert (await client.get("/")).status_code == 401, "nothing but health is open then"
        for path in ("/", "/playground", "/playground/app.js"):
            assert (await client.get(path, headers={"Authorization": "Bearer k"})).status_code == 404


async def test_the_files_need_no_key_and_what_they_ask_does(ask):
    async with ask(api_key="k") as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/playground/app.js")).status_code == 200
        assert (await client.get("/playground")).headers["location"] == "/"
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/playgroundx")).status_code == 401
