"""The one place that fetches what a client names by URL. Off unless the operator allows it.

A host is resolved here, every address it has is judged, and the connection goes to a judged address: a name that
resolves to something else a moment later gains nothing. Each redirect is judged anew. Proxies of the environment are
not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Sequence

import httpx

from mstar.spec.errors import RequestError
from mstar_server.media.addresses import is_public
from mstar_server.media.source import Source
from mstar_server.options import ServerOptions

__all__ = ["Fetcher"]

_AT_ONCE = 32
_REDIRECTS = (301, 302, 303, 307, 308)
_MEMORY_BYTES = 1 << 20


class Fetcher:
    """Fetches files over http and https.

    :param allowed: says of an address, as text, whether it may be connected to.
    """

    def __init__(self, options: ServerOptions, allowed: Callable[[str], bool] = is_public):
        self.options, self._allowed = options, allowed
        self._client: httpx.AsyncClient | None = None
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def fetch(self, url: str, param: str) -> Source:
        """The file at *url*. Raises :class:`RequestError` (400, or 413 when it is too large) that names *param*."""
        if not url:
            raise _refused("it is empty", param)
        if not self.options.allow_remote_media:
            message = "this server does not fetch URLs; send the content as 'data:MEDIA/TYPE;base64,…'"
            raise _refused(message, param, "url_not_allowed")
        client = await self._connector()
        seconds = self.options.fetch_timeout_s
        try:
            async with asyncio.timeout(seconds), self._slots:
                return await self._follow(client, url, param)
        except TimeoutError:
            raise _refused(f"fetching it took longer than the limit of {seconds:g} s", param) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise _refused(f"it could not be fetched ({type(error).__name__})", param) from None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def _follow(self, client: httpx.AsyncClient, text: str, param: str) -> Source:
        url = httpx.URL(text)
        for _ in range(self.options.max_fetch_redirects + 1):
            async with _request(client, url, await self._address(url, param)) as reply:
                if reply.status_code in _REDIRECTS and "location" in reply.headers:
                    url = url.join(reply.headers["location"])
                    continue
                return await self._receive(reply, param)
        raise _refused(f"it redirects more than {self.options.max_fetch_redirects} times", param)

    async def _connector(self) -> httpx.AsyncClient:
        if self._client is None:
            tls = await asyncio.to_thread(httpx.create_ssl_context)  # reads the trusted certificates: takes its time
            if self._client is None:
                limits = httpx.Limits(max_keepalive_connections=0)
                seconds = self.options.fetch_timeout_s
                self._client = httpx.AsyncClient(verify=tls, trust_env=False, limits=limits, timeout=seconds)
        return self._client

    async def _address(self, url: httpx.URL, param: str) -> str:
        """An address of *url*'s host to connect to. Refuses a host that has any address that is not allowed."""
        if url.scheme not in ("http", "https") or not url.host:
            message = "a URL must begin with 'https://', 'http://' or 'data:'"
            raise _refused(message, param, "url_not_allowed")
        if url.userinfo:
            raise _refused("a URL must not carry a user or a password", param, "url_not_allowed")
        hosts = self.options.media_hosts
        if hosts and not any(_matches(url.host, host) for host in hosts):
            message = f"the host {url.host!r} is none of those that this server fetches from"
            raise _refused(message, param, "url_not_allowed")
        addresses = await _resolve(url, param)
        if not all(map(self._allowed, addresses)):
            raise _refused(f"the host {url.host!r} is not on the public internet", param, "url_not_allowed")
        return addresses[0]

    async def _receive(self, reply: httpx.Response, param: str) -> Source:
        if reply.status_code != 200:
            raise _refused(f"its server answered {reply.status_code}", param)
        media_type = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type in ("text/html", "application/xhtml+xml"):
            raise _refused(f"it is a web page ({media_type}), not a media file", param)
        if reply.headers.get("content-encoding", "identity").lower() != "identity":
            raise _refused("its server sends it compressed, although that was not asked for", param)
        limit = self.options.max_file_bytes
        declared = reply.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise _too_large(limit, param)
        with tempfile.SpooledTemporaryFile(_MEMORY_BYTES) as file:
            size = 0
            async for piece in reply.aiter_raw():
                size += len(piece)
                if size > limit:
                    raise _too_large(limit, param)
                file.write(piece)
            if size > _MEMORY_BYTES:
                file.flush()
                return Source(os.dup(file.fileno()))
            file.seek(0)
            return await Source.of_bytes(file.read())


def _request(
    client: httpx.AsyncClient, url: httpx.URL, address: str
) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
    """Ask *address* for *url*, under the name and with the certificate of *url*'s host."""
    headers = {"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity", "User-Agent": "mstar-server"}
    extensions = {"sni_hostname": url.host}
    return client.stream(
        "GET", url.copy_with(host=address), headers=headers, extensions=extensions, follow_redirects=False
    )


async def _resolve(url: httpx.URL, param: str) -> Sequence[str]:
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise _refused(f"the host {url.host!r} has no known address", param) from None
    return [str(entry[4][0]) for entry in found]


def _matches(host: str, pattern: str) -> bool:
    host, pattern = host.lower().rstrip("."), pattern.lower()
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _refused(message: str, param: str, code: str = "fetch_failed") -> RequestError:
    return RequestError(f"{param!r}: {message}", param=param, code=code)


def _too_large(limit: int, param: str) -> RequestError:
    message = f"{param!r}: the file is larger than the limit of {limit} bytes"
    return RequestError(message, param=param, code="file_too_large", status=413)
