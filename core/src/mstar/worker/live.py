"""A request between submission and end, and the events that it ends with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from mstar.graph.run import RequestRun
from mstar.spec.errors import RequestError
from mstar.spec.request import Amount, Done, EngineRequest, Failed, Usage
from mstar.worker.admission import Holding
from mstar.worker.profile import RequestProfile

__all__ = ["Live", "failure"]


@dataclass(slots=True, eq=False)
class Live:
    """A request between submission and end. Times are monotonic seconds."""

    request: EngineRequest
    run: RequestRun
    holding: Holding
    arrival: float
    deadline: float | None = None
    started: float | None = None
    cached: int = 0
    cuts: Sequence[int] = ()  # where steps of its prompt should end, if another rank reads it
    skipped: int | None = None  # tokens of its prompt, if that was settled before the prompt's call was ready
    fresh: bool = True  # no call with a prefix has run whole yet: siblings still wait
    profile: RequestProfile | None = None  # for requests that ask for it
    siblings: list[Live] = field(default_factory=list)

    @property
    def answering(self) -> bool:
        """Whether it has a first token or other output."""
        outputs = (out for out in self.run.out.values() if out.spec.modality != "progress")
        return bool(self.run.generated) or any(out.items for out in outputs)

    def done(self, reason: str | None = None) -> Done:
        """Its end as it should be; *reason* is found from how its loops ended, unless given."""
        reasons = self.run.reasons
        reason = _overall(reasons) if reason is None else reason
        return Done(id=self.request.id, reason=reason, reasons=reasons, usage=self._usage())

    def _usage(self) -> Usage:
        now = time.monotonic()
        started = self.started if self.started is not None else now
        output: dict[str, Amount] = {}
        for stream in self.run.out.values():
            modality = stream.spec.modality
            if modality == "progress":
                continue  # says something about the output and is none
            output[modality] = output.get(modality, 0) + stream.items
        # What language models made, also for a codec; a transducer's tokens are in its stream only.
        if generated := self.run.drafted + sum(self.run.generated.values()):
            output["tokens"] = max(generated, output.get("tokens", 0))
        return Usage(output=output, cached=self.cached, queued_s=started - self.arrival, run_s=now - started)


def _overall(reasons: dict[str, str]) -> str:
    """One word for the whole request: ``length`` and ``stop`` say more than ``done`` and the ends of inner streams."""
    for word in ("length", "stop"):
        if word in reasons.values():
            return word
    return next((r for r in reasons.values() if r != "done"), "done")


def failure(request: str, error: Exception) -> Failed:
    """The event that ends *request* because of *error*."""
    if isinstance(error, RequestError):
        return Failed(
            id=request,
            message=error.message,
            code=error.code,
            status=error.status,
            type=error.type,
            param=error.param,
            retry_after=getattr(error, "retry_after", None),
        )
    return Failed(id=request, message=f"the model failed on this request: {type(error).__name__}: {error}")
