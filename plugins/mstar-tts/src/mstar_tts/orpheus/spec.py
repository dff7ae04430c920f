"""What M* knows of Orpheus without weights, torch or a device."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mstar.spec.knobs import Finite, SamplingKnobs, TextOptions
from mstar.spec.model import Licence, ModelSpec, WeightsRef
from mstar_tts.watermark.options import WatermarkOptions

__all__ = ["ORPHEUS", "VOICES", "OrpheusKnobs", "OrpheusOptions"]

VOICES = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")
"""The published ones, the most natural first, as the authors say."""


class OrpheusKnobs(SamplingKnobs):
    voice: str | None = Field(
        None, max_length=80, description="A voice, where the request has no field of this name of its own."
    )
    temperature: Finite = Field(0.6, ge=0, le=100, description="0 is greedy; higher is more varied.")
    top_p: Finite = Field(0.8, gt=0, le=1, description="Keep the most likely tokens that sum to this probability.")
    repetition_penalty: Finite = Field(
        1.3,
        ge=1.1,
        le=10,
        description="Tokens of the prompt and of the sound so far get less likely. Below 1.1 the model does not end.",
    )
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="The same seed gives the same sound.", strict=True
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="The most tokens to generate, 7 for 85 ms; default: as many as a text of this length may take.",
        strict=True,
    )
    ignore_eos: bool = Field(False, description="Go on after the end of speech, up to `max_tokens`.", strict=True)


_Sizes = Annotated[tuple[Annotated[int, Field(ge=1, le=256)], ...], Field(min_length=1, max_length=64)]
_Voice = Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[^:\s]+$")]


class OrpheusOptions(WatermarkOptions, TextOptions):
    default_max_tokens: int = 4096
    voices: Annotated[tuple[_Voice, ...], Field(min_length=1, max_length=256)] = Field(
        VOICES, description="The voices that the checkpoint was trained with, the default one first."
    )
    longest_piece: int = Field(
        200, ge=20, le=10_000, description="Long texts are spoken in pieces of at most so many characters.", strict=True
    )
    tokens_per_character: Finite = Field(
        12.0, ge=1, le=100, description="A piece that takes more tokens a character, and 336, is cut. Digits count six."
    )
    left_frames: int = Field(
        1, ge=0, le=64, description="Frames (85 ms) before the new ones that the codec hears again.", strict=True
    )
    ahead_frames: int = Field(
        2, ge=0, le=64, description="Frames behind the new ones that the codec waits for.", strict=True
    )
    chunk_frames: _Sizes = Field(
        (1,) * 12 + (2,) * 12 + (4,), description="New frames of each call of the codec; the last one stays."
    )
    overlap_ms: Finite = Field(0.0, ge=0, le=85, description="Sound that is cross-faded where two windows meet.")
    codec_rows: _Sizes = Field(
        (1, 2, 4, 8, 12, 16, 24, 32, 48, 64),
        description="Windows that share a step: to how many captured ones are filled up.",
    )
    codec_dtype: Literal["float32", "bfloat16"] = Field("float32", description="What the codec computes in.")

    @field_validator("voices", "chunk_frames", "codec_rows", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        """YAML has lists."""
        return tuple(value) if isinstance(value, list) else value


ORPHEUS = ModelSpec(
    key="orpheus",
    family="orpheus",
    summary="Orpheus 3B: English speech with laughs and sighs, eight voices; a Llama that writes SNAC's codes.",
    weights=(
        WeightsRef(
            "hub",
            "canopylabs/orpheus-3b-0.1-ft",
            "4206a56e5a68cf6cf96900a8a78acd3370c02eb6",
            options={
                "parts": {
                    "snac": {
                        "id": "hubertsiuzdak/snac_24khz",
                        "revision": "d73ad176a12188fcf4f360ba3bf2c2fbbe8f58ec",
                        "allow": ["config.json", "pytorch_model.bin"],
                    }
                }
            },
        ),
    ),
    # The card says Apache-2.0; the model is a derivative of Llama 3.2, whose terms bind those of derivatives.
    licence=Licence(
        "Llama 3.2 Community License",
        "https://huggingface.co/meta-llama/Llama-3.2-3B/blob/main/LICENSE.txt",
        gated=True,
        permissive=False,
    ),
    model="mstar_tts.orpheus.model:Orpheus",
    processor="mstar_tts.orpheus.processor:OrpheusProcessor",
    knobs=OrpheusKnobs,
    options=OrpheusOptions,
    abilities=("speech", "generate"),
    outputs=("audio",),
    deployment="mstar_tts.orpheus:deployments/orpheus.yaml",
    size=6_681_000_000,
    tiny="mstar_tts.orpheus.tiny:write_orpheus",
    examples="mstar_tts.orpheus.tiny:draw",
)
