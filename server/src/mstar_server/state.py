"""What the routes share: the served models, the options, the adapters. Found at ``request.app.state.mstar``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.requests import HTTPConnection

from mstar.spec.errors import NotReady, RequestError, SetupError, nearest
from mstar.spec.processor import Processor
from mstar_server.exchange import Exchanges, current
from mstar_server.hooks import adapters
from mstar_server.media.decoder import Media
from mstar_server.media.limits import Sampling, sampling_of
from mstar_server.observe.metrics import Metrics
from mstar_server.observe.tracing import Tracing
from mstar_server.observe.watching import Observer
from mstar_server.on_demand import OnDemand, not_ready
from mstar_server.openai.responses.store import ResponseStore
from mstar_server.options import ServerOptions
from mstar_server.protocols import Registry, Service
from mstar_server.videos.jobs import VideoJobs
from mstar_server.videos.store import Room, VideoStore
from mstar_server.voices import VoiceStore
from mstar_server.worker_status import WorkerStatuses

__all__ = ["ROUTES", "ServerState"]

ROUTES: Mapping[str, str] = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "embedding": "/v1/embeddings",
    "speech": "/v1/audio/speech",
    "transcription": "/v1/audio/transcriptions",
    "translation": "/v1/audio/translations",
    "image": "/v1/images/generations",
    "image_edit": "/v1/images/edits",
    "video": "/v1/videos",
    "realtime": "/v1/realtime",
    "generate": "/generate",
}
"""Ability of a model → the route that it is reached by."""


class ServerState:
    """The running models by key, and everything else that a route may need.

    :ivar aliases: other names of models, with the key of each.
    :ivar draining: the server is about to stop: requests that run go on, new ones are refused.
    :ivar created: when the server started, in Unix seconds: what OpenAI's listing calls a model's creation.
    :ivar responses: those that clients asked to be kept.
    :ivar voices: those that clients uploaded.
    :ivar mounted: paths of the routes that this server has.
    :ivar media: what decodes a request's files: see :mod:`mstar_server.media.decoder`. :meth:`close` ends it.
    :ivar exchanges: the requests that go on. :ivar observer: what watches them.
    :ivar workers: what the models' workers say of themselves.
    """

    def __init__(
        self,
        services: Mapping[str, Service],
        registry: Registry,
        options: ServerOptions,
        tracing: Tracing | None = None,
    ):
        self.services, self.registry, self.options = dict(services), registry, options
        self.aliases = _aliases(options.aliases, self.services)
        self.draining = False
        self.exchanges = Exchanges(options.max_key_requests, options.key_requests_per_minute)
        self.workers = WorkerStatuses()
        self.observer = Observer(Metrics(tuple(services)), tracing, options.log_stats)
        for service in self.services.values():
            service.watcher = self.observer
        self.created = int(time.time())
        self.mounted: frozenset[str] = frozenset()
        self.media = Media(options)
        folder = options.state_dir
        self._videos = None if folder is None else self._open_videos(folder / "videos")
        responses_file = options.responses_file or (None if folder is None else folder / "responses.sqlite")
        self.responses = ResponseStore(
            responses_file, options.max_stored_responses, options.stored_responses_days * 86400.0
        )
        self.voices = VoiceStore(None if folder is None else folder / "voices", options.max_voices)
        self._adapters = {key: adapters(registry, s.spec, options) for key, s in self.services.items()}
        self._canvases = {key: s.spec.canvas for key, s in self.services.items()}

    async def close(self) -> None:
        """Let go of what is open, once no request runs."""
        if self._videos is not None:
            await self._videos.close()
        await self.media.close()
        self.responses.close()
        await asyncio.to_thread(self.observer.close)

    @property
    def videos(self) -> VideoJobs:
        """The video jobs: those that run and those that are kept. A temporary folder is made when it is needed."""
        if self._videos is None:
            self._videos = self._open_videos(None)
        return self._videos

    def _open_videos(self, folder: Path | None) -> VideoJobs:
        options = self.options
        age_s = options.videos_days * 86400.0
        room = Room(options.max_videos, options.max_videos_bytes)
        each = Room(options.max_key_videos, options.max_key_videos_bytes)
        store = VideoStore(folder, room, each, age_s)
        return VideoJobs(store, options.max_running_videos, options.video_timeout_s)

    def tenant(self, request: HTTPConnection) -> str:
        """Who asks: the id of the key that the request came with; empty where the server wants none."""
        del request
        exchange = current()
        return "" if exchange is None else exchange.tenant

    async def processor(self, service: Service) -> Processor:
        """*service*'s processor, for which a model on demand is loaded."""
        return (await service.load() if isinstance(service, OnDemand) else service).processor

    async def sampling(self, service: Service) -> Sampling:
        """Which frames of a video *service*'s model wants, and how large."""
        patcher = None if service.spec.frames is None else (await self.processor(service)).frames
        return sampling_of(service.spec, patcher)

    def find(self, model: str | None) -> Service:
        """The service called *model*; ``None`` means the only one. Raises 404 with the nearest name."""
        if model is None and len(self.services) == 1:
            return next(iter(self.services.values()))
        if model is None:
            names = ", ".join(sorted(self.services))
            raise RequestError(
                f"'model' is required: this server has {names or 'no model'}",
                param="model",
                code="missing_required_parameter",
            )
        service = self.services.get(self.aliases.get(model, model))
        if service is None:
            message = f"the model {model!r} does not exist{nearest(model, [*self.services, *self.aliases])}"
            raise RequestError(message, param="model", code="model_not_found", status=404)
        return service

    def ready(self, model: str | None, ability: str | None) -> Service:
        """The service called *model*, able to do *ability* (``None``: what any can) now, or when it has been loaded
        (which starting a request waits for). Raises 404, 400 (wrong route), 503 (not ready) or 429 (the caller has too
        many requests)."""
        service = self.find(model)
        spec = service.spec
        if ability is not None and ability not in spec.abilities:
            routes = [ROUTES[a] for a in spec.abilities if ROUTES[a] in self.mounted]
            there = f"; use {' or '.join(routes)}" if routes else ""
            message = f"the model {spec.key!r} cannot be used on {ROUTES[ability]}{there}"
            raise RequestError(message, param="model", code="unsupported_route")
        if self.draining:
            raise NotReady("the server is shutting down")
        if isinstance(service, OnDemand) and not service.loaded:
            service.check_loadable()
        elif service.phase.name != "ready":
            raise not_ready(spec.key, service.phase)
        exchange = current()
        if exchange is not None:
            exchange.enter()
        return service

    @property
    def resident(self) -> dict[str, Service]:
        """The models that are there from the start: whether the server is ready depends on them."""
        return {key: service for key, service in self.services.items() if not isinstance(service, OnDemand)}

    def adapter(self, ability: str, service: Service) -> Any:
        """The adapter from an OpenAI route to *service*'s tasks: the family's own, or the server's.

        Its spec's canvas is what this deployment makes, which may be less than the model could, and is known once the
        service is loaded: else a size would be named that is refused as well.
        """
        key, canvas = service.spec.key, service.canvas
        if self._canvases[key] != canvas:
            self._adapters[key] = adapters(self.registry, replace(service.spec, canvas=canvas), self.options)
            self._canvases[key] = canvas
        return self._adapters[key][ability]


def _aliases(aliases: Mapping[str, str], services: Mapping[str, Service]) -> dict[str, str]:
    """*aliases*, checked. Raises :class:`SetupError`."""
    for alias, key in aliases.items():
        if key not in services:
            raise SetupError(f"{alias!r} cannot stand for {key!r}, which is not served{nearest(key, services)}")
        if alias in services:
            raise SetupError(f"{alias!r} cannot stand for {key!r}: it is a model itself")
    return dict(aliases)
