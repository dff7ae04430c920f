"""The file that says what one replica can do: what steps cost it, how much it holds, how it is deployed. No torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mstar.simulate.cost import LONGEST_S, StepCost
from mstar.spec.deployment import SchedulerOptions
from mstar.spec.errors import SetupError

__all__ = ["Profile", "read_profile", "write_profile"]


class Profile(BaseModel):
    """One replica of a model, whatever number of devices it takes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str = Field(description="The model's key.")
    device: str = Field("", description="Where its steps were measured.")
    ranks: int = Field(1, ge=1, description="Devices that a replica takes.")
    costs: dict[str, dict[str, float]] = Field(
        description="Seconds of the parts of a step, by the step's group: `llm` for the loop, others for what comes "
        "before it."
    )
    request_s: float = Field(0.0, ge=0, le=LONGEST_S, description="What a request takes beside its steps, in seconds.")
    max_step_tokens: int = Field(ge=1)
    max_step_rows: int = Field(256, ge=1)
    max_mixed_rows: int | None = Field(None, ge=0, description="As `scheduler.max_mixed_rows`; none: no limit.")
    max_concurrent_requests: int = Field(32, ge=1)
    max_queue: int = Field(1024, ge=0)
    kv_tokens: int | None = Field(None, ge=1, description="Tokens that the KV cache holds; none: never short of it.")
    page: int = Field(64, ge=1, description="Tokens of a page of it.")
    max_context: int | None = Field(None, ge=1, description="Most tokens of a request, prompt and answer.")
    error: dict[str, float] = Field(default_factory=dict, description="How far off the measurements the costs are.")

    @property
    def step_costs(self) -> dict[str, StepCost]:
        """:raises SetupError: a part of a cost is unknown or negative."""
        return {group: StepCost(parts) for group, parts in self.costs.items()}

    @property
    def scheduler(self) -> SchedulerOptions:
        return SchedulerOptions(
            max_step_tokens=self.max_step_tokens,
            max_step_rows=self.max_step_rows,
            max_mixed_rows=self.max_mixed_rows,
            max_queue=self.max_queue,
        )


def read_profile(path: Path) -> Profile:
    """The profile in *path*. Raises :class:`SetupError` with all that is wrong with it."""
    try:
        profile = Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, f['loc'])) or 'the file'}: {f['msg']}" for f in error.errors())
        raise SetupError(
            f"{path} is no profile of a replica, as `mstar simulate measure KEY --out FILE` writes it: {faults}"
        ) from None
    if "llm" not in profile.costs:
        raise SetupError(f"{path}: costs: the group 'llm' is missing")
    _ = profile.step_costs
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    """Write *profile* to *path*."""
    try:
        path.write_text(profile.model_dump_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}") from None
