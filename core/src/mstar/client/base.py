"""What both clients share: where the server is, who asks, and whether to ask again."""

from __future__ import annotations

from typing import Any

import httpx

from mstar.client.answers import broken_off, unreachable
from mstar.spec.errors import RequestError

__all__ = ["Base"]

LONGEST_WAIT_S = 30.0


class Base:
    """Where a server is and how it is asked.

    :param base_url: of the server (``http://host:port``). :param api_key: the server's, if it wants one.
    :param model: the default of every call. :param timeout: seconds of silence after which a call fails.
    :param retries: how often to ask again when the server is busy, not ready or not there; it is waited for as long as
        the server says, at most 30 s each time. Nothing is asked again once any of its answer has come.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        *,
        model: str | None = None,
        timeout: float = 600.0,
        retries: int = 0,
    ):
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must begin with http:// or https://, got {base_url!r}")
        self.url, self.model, self.retries = base_url.rstrip("/"), model, retries
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout = httpx.Timeout(timeout, connect=10.0)
        self._begin()

    def _begin(self) -> None:
        """Make what sends requests."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"  # without the key

    @property
    def _socket_url(self) -> str:
        return "ws" + self.url.removeprefix("http") + "/generate/ws"

    @property
    def _socket_options(self) -> dict[str, Any]:
        return {"additional_headers": self._headers, "max_size": None, "compression": None, "open_timeout": 10.0}

    def _fault(self, error: httpx.TransportError) -> RequestError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return unreachable(self.url, error)
        if isinstance(error, httpx.TimeoutException):
            return broken_off(self.url, f"nothing came for {self._timeout.read:g} s")
        return broken_off(self.url, str(error) or type(error).__name__)

    def _wait(self, error: RequestError, attempt: int) -> float | None:
        """Seconds to wait before attempt *attempt* + 1; ``None`` to give up."""
        again = error.status in (429, 503) and error.code != "connection_lost"
        if attempt >= self.retries or not again:
            return None
        told: float | None = getattr(error, "retry_after", None)
        return min(0.5 * 2**attempt if told is None else told, LONGEST_WAIT_S)
