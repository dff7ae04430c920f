from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from media_files import PIXELS, image_file, item

from mstar.spec.errors import RequestError
from mstar_server.media.addresses import is_public
from mstar_server.media.decoder import Media
from mstar_server.media.fetch import Fetcher
from mstar_server.options import ServerOptions

PNG = image_file("PNG")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "192.0.0.8", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0",
        "fc00::1", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::127.0.0.1",
        "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2002:a00:1::", "2001:0:a00:1::", "2001:db8::1", "", "x",
    ],
)  # fmt: skip
def test_addresses_that_are_near_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::1.1.1.1"])
def test_addresses_of_the_internet_are_public(address):
    assert is_public(address)


class Remote:
    """A web server on loopback. What it is asked is in *asked*, as pairs (path, host)."""

    def __init__(self):
        self.asked: list[tuple[str, str]] = []
        self.port = 0
        self._serving = {}

    async def _serve(self, reader, writer):
        self._serving[asyncio.current_task()] = writer
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            host = next(line[6:] for line in head.split("\r\n") if line.lower().startswith("host: "))
            self.asked.append((path, host))
            await self._answer(path, reader, writer)
            writer.close()
            await writer.wait_closed()

    async def end(self):
        """A connection that nobody closes outlives its loop: its socket is then some later test's garbage."""
        for task, writer in self._serving.items():
            task.cancel()
            writer.transport.abort()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _answer(self, path, reader, writer):
        def reply(status, body=b"", *headers):
            lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
            writer.write("\r\n".join(lines).encode() + body)

        match path.split("?")[0]:
            case "/a.png":
                reply("200 OK", PNG, "Content-Type: application/octet-stream")
            case "/page":
                reply("200 OK", b"<html>", "Content-Type: text/html; charset=utf-8")
            case "/page-as-png":
                reply("200 OK", b"<html>", "Content-Type: image/png")
            case "/gzip":
                reply("200 OK", PNG, "Content-Encoding: gzip")
            case "/here":
                reply("302 Found", b"", "Location: /a.png")
            case "/loop":
                reply("302 Found", b"", "Location: /loop")
            case "/inside":
                reply("302 Found", b"", f"Location: http://inside.test:{self.port}/a.png")
            case "/scheme":
                reply("302 Found", b"", "Location: file:///etc/passwd")
            case "/huge":
                reply("200 OK", PNG + b"\0" * 5000)
            case "/endless":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    writer.write(b"\0" * 1000)
                    await writer.drain()
            case "/slow":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n1")
                await reader.read()  # until the client gives up
            case "/cut":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n1")
            case "/junk":
                writer.write(b"junk\r\n\r\n")
            case _:
                reply("404 Not Found")


@pytest.fixture
async def remote():
    server = Remote()
    listener = await asyncio.start_server(server._serve, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    yield server
    listener.close()
    await server.end()


@pytest.fixture
def names(monkeypatch):
    """Names that resolve to loopback addresses, and how often each was looked up."""
    table = {"outside.test": ["127.0.0.1"], "inside.test": ["127.0.0.2"], "both.test": ["127.0.0.1", "127.0.0.2"]}
    asked: list[str] = []

    async def resolve(self, host, port, **_):
        asked.append(host)
        if host not in table:
            raise socket.gaierror(-2, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in table[host]]

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", resolve)
    return asked


def fetcher(**options):
    settings = {"allow_remote_media": True, "fetch_timeout_s": 10.0, "max_file_bytes": 4000, "max_fetch_redirects": 2}
    return Fetcher(ServerOptions(**(settings | options)), allowed=lambda address: address == "127.0.0.1")


async def test_a_file_is_fetched_from_the_address_that_was_judged(remote, names):
    fetch = fetcher()
    for path in ("/a.png", "/here"):
        assert (await fetch.fetch(f"http://outside.test:{remote.port}{path}", "p")).read() == PNG
    assert names == ["outside.test"] * 3  # once for each request: never again when connecting
    assert remote.asked[0] == ("/a.png", f"outside.test:{remote.port}")
    await fetch.close()


@pytest.mark.parametrize(
    ("url", "said", "code"),
    [
        ("http://inside.test:PORT/a.png", "not on the public internet", "url_not_allowed"),
        ("http://both.test:PORT/a.png", "not on the public internet", "url_not_allowed"),
        ("http://outside.test:PORT/inside", "'inside.test' is not on", "url_not_allowed"),
        ("http://outside.test:PORT/scheme", "must begin with", "url_not_allowed"),
        ("file:///etc/passwd", "must begin with", "url_not_allowed"),
        ("/etc/passwd", "must begin with", "url_not_allowed"),
        ("ftp://outside.test/x", "must begin with", "url_not_allowed"),
        ("http://me:secret@outside.test/", "user or a password", "url_not_allowed"),
        ("http://unknown.test/", "no known address", "fetch_failed"),
        ("http://outside.test:PORT/loop", "redirects more than 2 times", "fetch_failed"),
        ("http://outside.test:PORT/none", "answered 404", "fetch_failed"),
        ("http://outside.test:PORT/page", "web page", "fetch_failed"),
        ("http://outside.test:PORT/gzip", "compressed", "fetch_failed"),
        ("http://outside.test:PORT/huge", "limit of 4000 bytes", "file_too_large"),
        ("http://outside.test:PORT/endless", "limit of 4000 bytes", "file_too_large"),
        ("http://outside.test:PORT/slow", "longer than the limit of 1 s", "fetch_failed"),
        ("http://outside.test:PORT/cut", "could not be fetched", "fetch_failed"),
        ("http://outside.test:PORT/junk", "could not be fetched", "fetch_failed"),
        ("http://outside.test:1/", "could not be fetched", "fetch_failed"),
        ("http://[::1/", "could not be fetched", "fetch_failed"),
        ("http://\ud800/", "could not be fetched", "fetch_failed"),
    ],
)
async def test_what_cannot_or_must_not_be_fetched_is_a_4xx(remote, names, url, said, code):
    fetch = fetcher(fetch_timeout_s=1.0 if "/slow" in url else 10.0)
    with pytest.raises(RequestError, match=said) as caught:
        await fetch.fetch(url.replace("PORT", str(remote.port)), "messages[0].content[1].image_url")
    assert caught.value.code == code
    assert caught.value.status == (413 if code == "file_too_large" else 400)
    assert caught.value.param == "messages[0].content[1].image_url"
    await fetch.close()
    assert ("/a.png", f"inside.test:{remote.port}") not in remote.asked


async def test_only_named_hosts_if_there_are_any(remote, names):
    for hosts, allowed in ((("outside.test",), True), (("*.test",), True), (("other.test", "*.outside.test"), False)):
        fetch = fetcher(media_hosts=hosts)
        url = f"http://outside.test:{remote.port}/a.png"
        if allowed:
            await fetch.fetch(url, "p")
        else:
            with pytest.raises(RequestError, match="none of those"):
                await fetch.fetch(url, "p")
        await fetch.close()


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:PORT/a.png", "http://localhost:PORT/a.png", "http://[::1]:PORT/", "http://2130706433:PORT/",
     "http://0x7f.1:PORT/", "http://169.254.169.254/latest/meta-data/", "http://10.0.0.1/"],
)  # fmt: skip
async def test_private_addresses_are_refused_by_default(remote, url):
    fetch = Fetcher(ServerOptions(allow_remote_media=True))
    with pytest.raises(RequestError) as caught:
        await fetch.fetch(url.replace("PORT", str(remote.port)), "p")
    assert caught.value.status == 400
    assert remote.asked == []
    await fetch.close()


async def test_nothing_is_fetched_unless_allowed(remote):
    media = Media(ServerOptions())
    with pytest.raises(RequestError, match="does not fetch URLs") as caught:
        await media.decode([item("image", f"http://outside.test:{remote.port}/a.png")])
    assert caught.value.code == "url_not_allowed"
    await media.close()


async def test_an_empty_address_is_called_so():
    media = Media(ServerOptions())
    with pytest.raises(RequestError, match="it is empty") as caught:
        await media.decode([item("image", "")])
    assert caught.value.status == 400
    await media.close()


async def test_a_fetched_file_is_decoded_like_any_other(remote, names):
    media = Media(ServerOptions(media_processes=1), fetcher=fetcher())
    (image,) = await media.decode([item("image", f"http://outside.test:{remote.port}/a.png")])
    assert image.pixels.tolist() == PIXELS.tolist()
    with pytest.raises(RequestError, match="HTML") as caught:
        await media.decode([item("image", f"http://outside.test:{remote.port}/page-as-png", "image")])
    assert (caught.value.status, caught.value.param) == (400, "image")
    await media.close()
