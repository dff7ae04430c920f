"""Replicas of M* behind Ray Serve, as many as the load asks for. Each is a whole server: all routes, streams, sockets.

    pip install 'mstar-core[ray]' mstar-demo
    serve run --app-dir examples --working-dir examples ray_serve:build model=smollm2
    curl http://127.0.0.1:8000/v1/models

Words after ``build`` are fields of :class:`Arguments`. deploy/kuberay has the same for Kubernetes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from ray import serve


class Arguments(BaseModel):
    """What is served, and by how many replicas."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field("smollm2", description="Key of the model; `mstar models` lists them.")
    config: str | None = Field(None, description="Deployment file, on the replicas' nodes.")
    weights: str | None = Field(None, description="Folder on the replicas' nodes, or HUB_ID[@REVISION].")
    min_replicas: int = Field(1, ge=0, description="0: none while nobody asks.")
    max_replicas: int = Field(4, ge=1)
    target_requests: float = Field(
        16.0, gt=0, description="Requests at once that a replica is to have: those that it can run together, or fewer."
    )
    max_requests: int = Field(64, ge=1, description="Requests that a replica takes at once; more wait in Serve.")
    cpus: float = Field(1.0, gt=0, description="CPUs of a replica.")
    gpus: float = Field(0.0, ge=0, description="GPUs of a replica: one for each rank of the deployment's layout.")
    drain_s: float = Field(60.0, gt=0, description="Seconds that requests may go on when a replica is ended.")


class Replica:
    """One replica, beside its application. Serve asks it how it is."""

    app: FastAPI  # Serve's

    def check_health(self) -> None:
        """Raises while a model has no worker. Serve ends a replica that says so three times in a row."""
        for key, service in self.app.state.mstar.services.items():
            if service.phase.name == "failed":
                raise RuntimeError(f"{key}: {service.phase.detail}")


def build(words: Mapping[str, Any]) -> serve.Application:
    """The application that `serve run` and RayService start. *words*: what makes :class:`Arguments`."""
    arguments = Arguments.model_validate(words)

    def make() -> FastAPI:
        """Runs in each replica, which then waits for the model."""
        from mstar.plugins import load_plugins
        from mstar.registry import Registry
        from mstar.runtime.service import open_service
        from mstar.settings import Settings
        from mstar_server.asgi import application
        from mstar_server.options import ServerOptions

        settings = Settings.from_env(os.environ)
        registry = Registry(load_plugins(settings))
        service: Any = open_service(
            arguments.model, settings, {"weights": arguments.weights}, registry, config=arguments.config
        )
        options = ServerOptions(api_key=settings.api_key, drain_s=arguments.drain_s)
        return application({arguments.model: service}, registry, options)

    deployment = serve.deployment(
        serve.ingress(make)(Replica),
        name=arguments.model,
        max_ongoing_requests=arguments.max_requests,
        autoscaling_config={
            "min_replicas": arguments.min_replicas,
            "max_replicas": arguments.max_replicas,
            "target_ongoing_requests": arguments.target_requests,
        },
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        graceful_shutdown_timeout_s=arguments.drain_s + 15,
        health_check_period_s=10,
        health_check_timeout_s=30,
    )
    return deployment.bind()
