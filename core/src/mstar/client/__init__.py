"""The Python client of an M* server, for programs without a loop of their own and for asynchronous ones.

::

    with Client("http://127.0.0.1:8000") as client:
        print(client.chat("What is the capital of France?", max_tokens=20))
        client.tts("Hello!", model="mini_tts").save("hello.wav")

Importing it needs neither torch nor the server.
"""

from __future__ import annotations

from mstar.client.aio import AsyncClient
from mstar.client.aio_streams import AsyncLive, AsyncStream
from mstar.client.live import Heard
from mstar.client.streams import Live, Stream
from mstar.client.sync import Client
from mstar.runtime.result import Result

__all__ = ["AsyncClient", "AsyncLive", "AsyncStream", "Client", "Heard", "Live", "Result", "Stream"]
