"""Round trips over HTTP of models that make pictures and videos."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import numpy as np

from mstar.spec.model import ModelSpec
from mstar.spec.tasks import Image
from mstar.testing.conformance.subject import fail
from mstar.testing.conformance.uploads import chat_content
from mstar.testing.examples import Example

__all__ = ["edit", "image", "picture_body", "video"]

_SHADOWED = frozenset({"size", "seconds", "n", "stream", "image", "images", "mask"})
"""Fields of the routes: a knob of the same name cannot be set there."""
_WAIT_S = 120.0


def picture_body(spec: ModelSpec, example: Example) -> dict[str, Any]:
    """The JSON body for *example* on a route for pictures or videos, without what it refers to."""
    knobs = {name: value for name, value in example.knobs.items() if name not in _SHADOWED}
    return {"model": spec.key, "prompt": example.text, **knobs}


def image(server: Any, route: str, example: Example) -> None:
    _pictures(server, route, picture_body(server.spec, example))


def edit(server: Any, route: str, example: Example) -> None:
    """With the example's images, or one that the suite makes."""
    found = [part for part in example.parts if isinstance(part, Image)] or [_painted(server.spec)]
    urls = [{"image_url": part["image_url"]["url"]} for part in chat_content("", found)[:-1]]
    _pictures(server, route, {**picture_body(server.spec, example), "images": urls})


def video(server: Any, route: str, example: Example) -> None:
    """A job from its beginning to its end, and after."""
    key = server.spec.key
    begun = server.post(route, picture_body(server.spec, example)).json()
    path, deadline = f"{route}/{begun['id']}", time.monotonic() + _WAIT_S
    while (job := server.client.get(path).json())["status"] in ("queued", "in_progress"):
        if time.monotonic() > deadline:
            fail(f"{key!r}: a video was still {job['status']} at {job['progress']} % after {_WAIT_S:.0f} s")
        time.sleep(0.02)
    if job["status"] != "completed":
        fail(f"{key!r}: the video of POST {route} failed: {job['error']}")
    data = server.client.get(f"{path}/content").content
    if data[4:8] != b"ftyp":
        fail(f"{key!r}: GET {path}/content is no MP4 file: it begins with {data[:12]!r}")
    server.client.delete(path)
    if (status := server.client.get(path).status_code) != 404:
        fail(f"{key!r}: GET {path} was answered {status} after the video was deleted; it should be 404")


def _pictures(server: Any, route: str, body: dict[str, Any]) -> None:
    key = server.spec.key
    (whole,) = server.post(route, body).json()["data"]
    if not base64.b64decode(whole["b64_json"]).startswith(b"\x89PNG"):
        fail(f"{key!r}: POST {route} gave no PNG file")
    text = server.post(route, {**body, "stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    last = events[-1]
    if not str(last.get("type")).endswith(".completed"):
        fail(f"{key!r}: the stream of POST {route} ended with {str(last)[:200]}")
    if "seed" in server.spec.knobs.model_fields and last["b64_json"] != whole["b64_json"]:
        fail(f"{key!r}: POST {route} makes another picture when it is streamed, from the same seed")


def _painted(spec: ModelSpec) -> Image:
    width, height = (64, 64) if spec.canvas is None else spec.canvas.sizes.nearest((64, 64))
    rows, columns = np.mgrid[:height, :width]
    return Image(np.stack([rows * 3 % 256, columns * 5 % 256, (rows + columns) % 256], 2).astype(np.uint8))
