"""What M* knows of Kokoro without weights, torch or a device."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mstar.spec.knobs import Finite, Knobs
from mstar.spec.model import Licence, ModelSpec, WeightsRef
from mstar_tts.kokoro.languages import LangCode
from mstar_tts.kokoro.packages import PACKAGES
from mstar_tts.watermark.options import WatermarkOptions

__all__ = ["KOKORO", "KokoroKnobs", "KokoroOptions"]


class KokoroKnobs(Knobs):
    voice: str | None = Field(
        None,
        max_length=400,
        description="A voice (`af_heart`) or a blend (`af_bella+af_sky`, `af_bella(2)+af_sky(1)`), where the request "
        "has no field of this name of its own.",
    )
    speed: Finite = Field(1.0, ge=0.25, le=4, description="2 speaks twice as fast.")
    lang_code: LangCode | None = Field(
        None, description="The language of the text; default: the voice's, which its name begins with."
    )
    phonemes: str | None = Field(
        None, min_length=1, max_length=32_768, description="What to say, in phonemes; the text is not read then."
    )
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="The same seed gives the same sound.", strict=True
    )


_Buckets = Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 20)], ...], Field(min_length=1, max_length=64)]


class KokoroOptions(WatermarkOptions):
    lang_code: LangCode | None = Field(
        None, description="The language of requests that name none, instead of their voice's."
    )
    default_voice: str = Field(
        "af_heart", max_length=80, description="The voice of requests that name none, or a blend."
    )
    espeak_fallback: bool = Field(
        True, description="Let espeak-ng pronounce the English words that misaki does not know.", strict=True
    )
    chunk_target_phonemes: int = Field(
        200, ge=10, le=510, description="Sentences are joined to pieces of about so many phonemes.", strict=True
    )
    first_chunk_target_phonemes: int = Field(
        60, ge=10, le=510, description="The same for a text's first piece, for which the listener waits.", strict=True
    )
    max_frames_per_phoneme: Finite = Field(
        10.0,
        ge=1,
        le=50,
        description="A piece that lasts longer than so many frames (25 ms) a phoneme, and 40, is cut.",
    )
    text_buckets: _Buckets = Field(
        (32, 64, 96, 128, 192, 256, 384, 512), description="Numbers of phonemes that texts are padded to."
    )
    frame_buckets: _Buckets = Field(
        (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048),
        description="Numbers of frames that speech is padded to; rows of one number share a step.",
    )
    frame_grouping: Literal["bucket", "single"] = Field(
        "bucket", description="`single` pads texts that were read together to the longest one's frames."
    )
    max_batch_rows: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Most rows of the frame half's steps; default: 32, and 1 on a CPU.",
        strict=True,
    )
    max_batch_frames: int = Field(
        4096, ge=1, le=1 << 20, description="Most frames, padding included, computed at once.", strict=True
    )
    decoder_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of the vocoder's convolutions; source and transforms are float32 always."
    )
    compile_decoder: bool = Field(
        True, description="Whether `engine.compile` compiles the frame half's blocks.", strict=True
    )

    @field_validator("text_buckets", "frame_buckets", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        """YAML has lists."""
        return tuple(value) if isinstance(value, list) else value

    @field_validator("text_buckets", "frame_buckets")
    @classmethod
    def _rising(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)):
            raise ValueError("must rise")
        return value


KOKORO = ModelSpec(
    key="kokoro",
    family="kokoro",
    summary="Kokoro-82M: speech in nine languages with 54 voices and their blends, sentence by sentence.",
    weights=(
        PACKAGES,
        WeightsRef(
            "hub",
            "hexgrad/Kokoro-82M",
            "f3ff3571791e39611d31c381e3a41a3af07b4987",
            options={"allow": ["config.json", "kokoro-v1_0.pth", "voices/*.pt"]},
        ),
    ),
    licence=Licence("Apache-2.0", "https://huggingface.co/hexgrad/Kokoro-82M"),
    model="mstar_tts.kokoro.model:Kokoro",
    processor="mstar_tts.kokoro.processor:KokoroProcessor",
    knobs=KokoroKnobs,
    options=KokoroOptions,
    abilities=("speech", "generate"),
    outputs=("audio",),
    deployment={"max_concurrent_requests": 64},
    size=327_212_226,
    tiny="mstar_tts.kokoro.tiny:write_kokoro",
)
