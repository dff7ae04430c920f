"""What M* knows of Qwen3-ASR without weights, torch or a device."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from mstar.spec.knobs import Finite, Knobs, TextOptions
from mstar.spec.model import Licence, LiveInput, ModelSpec, WeightsRef

__all__ = ["LANGUAGES", "QWEN3_ASR", "QWEN3_ASR_REALTIME", "Qwen3ASRKnobs", "Qwen3ASROptions"]

LANGUAGES = (
    "Arabic", "Cantonese", "Chinese", "Czech", "Danish", "Dutch", "English", "Filipino", "Finnish", "French", "German",
    "Greek", "Hindi", "Hungarian", "Indonesian", "Italian", "Japanese", "Korean", "Macedonian", "Malay", "Persian",
    "Polish", "Portuguese", "Romanian", "Russian", "Spanish", "Swedish", "Thai", "Turkish", "Vietnamese",
)  # fmt: skip
"""As the model writes them."""


class Qwen3ASRKnobs(Knobs):
    """A transcription's parameters."""

    may_change_nothing: ClassVar[tuple[str, ...]] = ("seed",)

    language: str | None = Field(
        None, max_length=64, description="Code or name of the spoken language; by default it is detected."
    )
    temperature: Finite = Field(0.0, ge=0, le=2, description="0 is greedy; higher is more varied.")
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="The same seed gives the same answer.", strict=True
    )
    max_tokens: int | None = Field(
        None, ge=1, description="The most tokens of one window, or of a live round.", strict=True
    )


class Qwen3ASROptions(TextOptions):
    """What the operator sets for all requests."""

    max_tokens: int | None = Field(
        32768, ge=2, description="Most tokens of one request: 13 for each second of sound, and its text.", strict=True
    )
    default_max_tokens: int = Field(
        512, ge=1, description="Longest answer where a request names none; 10 a second for longer clips.", strict=True
    )
    live_seconds: int = Field(
        300,
        ge=1,
        le=1200,
        description="Longest live speech of one request or turn, which reserves room for it.",
        strict=True,
    )
    live_step_s: Literal[1, 2, 4, 8] = Field(2, description="How often live speech is heard, in seconds.")
    live_max_tokens: int = Field(32, ge=8, le=512, description="The most tokens of one live round.", strict=True)

    def live_tokens(self, each: int) -> int:
        """The most tokens of text that a live request holds. *each*: of one round."""
        return each * (self.live_seconds // self.live_step_s + 2)


def _spec(key: str, size: str, revision: str, bytes_: int) -> ModelSpec:
    return ModelSpec(
        key=key,
        family="qwen3_asr",
        summary=f"Qwen3-ASR {size}: 30 languages, whole clips and live speech.",
        weights=(WeightsRef("hub", f"Qwen/Qwen3-ASR-{size}", revision),),
        licence=Licence("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0"),
        model="mstar_asr.qwen3_asr.model:Qwen3ASR",
        processor="mstar_asr.qwen3_asr.processor:Qwen3ASRProcessor",
        knobs=Qwen3ASRKnobs,
        options=Qwen3ASROptions,
        inputs=("audio",),
        outputs=("text",),
        abilities=("transcription", "generate"),
        deployment=f"mstar_asr.qwen3_asr:deployments/{key}.yaml",
        live=(LiveInput("audio", "audio", rate=16_000, description="Speech, written down while it goes on."),),
        size=bytes_,
        tiny="mstar_asr.qwen3_asr.tiny:write",
        examples="mstar_asr.qwen3_asr.tiny:draw",
    )


QWEN3_ASR = _spec("qwen3_asr", "1.7B", "7278e1e70fe206f11671096ffdd38061171dd6e5", 4_703_000_000)
QWEN3_ASR_REALTIME = _spec("qwen3_asr_realtime", "0.6B", "5eb144179a02acc5e5ba31e748d22b0cf3e303b0", 1_880_000_000)
