"""What M* knows of Qwen3-TTS without weights, torch or a device."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mstar.spec.knobs import Finite, Knobs
from mstar.spec.model import Licence, ModelSpec, WeightsRef
from mstar_tts.watermark.options import WatermarkOptions

__all__ = [
    "MODELS",
    "CloneKnobs",
    "CloneOptions",
    "CustomVoiceKnobs",
    "CustomVoiceOptions",
    "DesignKnobs",
    "Qwen3TTSKnobs",
    "Qwen3TTSOptions",
    "Variant",
]

_TEXT = 32_768
_Temperature = Annotated[float, Field(ge=0, le=100)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Penalty = Annotated[float, Field(ge=0.01, le=10)]


class Qwen3TTSKnobs(Knobs):
    """What all four take. ``None`` is what the checkpoint's ``generation_config.json`` says."""

    language: str | None = Field(
        None,
        max_length=40,
        description="A language of the checkpoint: `German`, `de`; default: `auto`, the model finds out.",
    )
    do_sample: bool | None = Field(None, description="false: always the likeliest code of group 0.", strict=True)
    temperature: _Temperature | None = Field(None, description="Of group 0's codes; 0 is greedy.")
    top_k: int | None = Field(
        None, ge=0, description="Keep this many of the likeliest codes; 0 keeps all.", strict=True
    )
    top_p: _Share | None = Field(None, description="Keep the likeliest codes that sum to this probability.")
    repetition_penalty: _Penalty | None = Field(
        None, description="Above 1: codes of group 0 that this answer has had get less likely."
    )
    subtalker_dosample: bool | None = Field(
        None, description="`do_sample` of the code predictor, which chooses the other groups.", strict=True
    )
    subtalker_temperature: _Temperature | None = Field(None, description="`temperature` of the code predictor.")
    subtalker_top_k: int | None = Field(None, ge=0, description="`top_k` of the code predictor.", strict=True)
    subtalker_top_p: _Share | None = Field(None, description="`top_p` of the code predictor.")
    max_new_tokens: int | None = Field(
        None,
        ge=2,
        le=32_768,
        description="The most codes of group 0, the end included: one more than the most frames (80 ms each).",
        strict=True,
    )
    non_streaming_mode: bool | None = Field(
        None,
        description="true: the whole text is read before the first frame; false: a token with each frame. Default: "
        "false for cloned voices, else true.",
        strict=True,
    )
    ignore_eos: bool = Field(False, description="Go on to `max_new_tokens`; for measurements.", strict=True)
    seed: int | None = Field(
        None, ge=-(2**63), lt=2**63, description="The same seed gives the same sound.", strict=True
    )


class CustomVoiceKnobs(Qwen3TTSKnobs):
    voice: str | None = Field(
        None, max_length=80, description="A speaker, where the request has no field of this name of its own."
    )
    instruct: str | None = Field(
        None,
        max_length=_TEXT,
        description="How to speak; `instructions` on `/v1/audio/speech`. The 0.6B model pays no heed to it.",
    )


class DesignKnobs(Qwen3TTSKnobs):
    instruct: str | None = Field(
        None, max_length=_TEXT, description="The voice in words; `instructions` on `/v1/audio/speech`. Required."
    )


class CloneKnobs(Qwen3TTSKnobs):
    x_vector_only_mode: bool = Field(
        False, description="Take the speaker's timbre alone from the clip; no transcript is needed.", strict=True
    )
    ref_text: str | None = Field(
        None, max_length=_TEXT, description="What is said in the clip, where the request has no field of this name."
    )


Variant = Literal["custom_voice", "voice_design", "base"]
"""``tts_model_type`` of a checkpoint."""


class Qwen3TTSOptions(WatermarkOptions):
    """:cvar variant: of the checkpoints that a model with these options serves."""

    variant: ClassVar[Variant] = "voice_design"

    max_tokens: int | None = Field(
        None,
        ge=64,
        le=1 << 20,
        description="Longest prompt and answer together; default: what the model allows.",
        strict=True,
    )
    max_streamed_text: int = Field(
        2048, ge=16, le=32_768, description="Longest text, in tokens, that is read while it is spoken.", strict=True
    )
    chunk_from_chars: int = Field(
        600, ge=1, le=_TEXT, description="Texts of so many characters are spoken in pieces.", strict=True
    )
    chunk_chars: int = Field(400, ge=20, le=_TEXT, description="How long such pieces are at most.", strict=True)
    max_frames_per_token: Finite = Field(
        25.0,
        ge=1,
        le=1000,
        description="An answer of more frames (80 ms) a token of the text, and 50, is cut, unless the request says "
        "`max_new_tokens`.",
    )
    codec_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Of the codec's decoder.")


class CustomVoiceOptions(Qwen3TTSOptions):
    variant: ClassVar[Variant] = "custom_voice"

    default_voice: str = Field("vivian", max_length=80, description="The speaker of requests that name none.")


class CloneOptions(Qwen3TTSOptions):
    variant: ClassVar[Variant] = "base"

    max_clip_s: Finite = Field(60.0, ge=1, le=600, description="Longest clip of a voice.")
    cached_clips: int = Field(
        256,
        ge=0,
        le=65_536,
        description="What is heard in clips is kept, so many voices and so many clips' frames; 0 keeps nothing.",
        strict=True,
    )


_HUB = "https://huggingface.co/Qwen/"


def _spec(
    key: str,
    name: str,
    revision: str,
    summary: str,
    knobs: type[Knobs],
    options: type[Knobs],
    size: int,
    inputs: tuple[str, ...] = ("text",),
) -> ModelSpec:
    repository = f"Qwen3-TTS-12Hz-{name}"
    allow = ["*.json", "*.txt", "*.safetensors", "speech_tokenizer/*.json", "speech_tokenizer/*.safetensors"]
    return ModelSpec(
        key=key,
        family="qwen3_tts",
        summary=summary,
        weights=(WeightsRef("hub", f"Qwen/{repository}", revision, options={"allow": allow}),),
        licence=Licence("Apache-2.0", _HUB + repository),
        model="mstar_tts.qwen3_tts.model:Qwen3TTS",
        processor="mstar_tts.qwen3_tts.processor:Qwen3TTSProcessor",
        knobs=knobs,
        options=options,
        abilities=("speech", "generate"),
        inputs=inputs,
        outputs=("audio",),
        # With prompts of their own, no step that listeners wait for is of a size that was not captured at start.
        deployment={"max_concurrent_requests": 64, "scheduler": {"max_mixed_rows": 12}},
        layouts={"codec_apart": "mstar_tts.qwen3_tts:deployments/codec_apart.yaml"},
        size=size,
        tiny=f"mstar_tts.qwen3_tts.tiny:write_{key}",
        examples="mstar_tts.qwen3_tts.tiny:draw",
    )


QWEN3_TTS = _spec(
    "qwen3_tts",
    "0.6B-CustomVoice",
    "85e237c12c027371202489a0ec509ded67b5e4b5",
    "Qwen3-TTS 0.6B: ten languages with nine speakers, streamed from the first frame.",
    CustomVoiceKnobs,
    CustomVoiceOptions,
    2_500_000_000,
)
QWEN3_TTS_1P7B = _spec(
    "qwen3_tts_1p7b",
    "1.7B-CustomVoice",
    "0c0e3051f131929182e2c023b9537f8b1c68adfe",
    "Qwen3-TTS 1.7B: ten languages with nine speakers, who can be told how to speak.",
    CustomVoiceKnobs,
    CustomVoiceOptions,
    4_500_000_000,
)
QWEN3_TTS_VOICEDESIGN = _spec(
    "qwen3_tts_voicedesign",
    "1.7B-VoiceDesign",
    "5ecdb67327fd37bb2e042aab12ff7391903235d3",
    "Qwen3-TTS 1.7B: ten languages, in a voice that the request describes.",
    DesignKnobs,
    Qwen3TTSOptions,
    4_500_000_000,
)
QWEN3_TTS_BASE = _spec(
    "qwen3_tts_base",
    "1.7B-Base",
    "fd4b254389122332181a7c3db7f27e918eec64e3",
    "Qwen3-TTS 1.7B: ten languages, in the voice of a clip.",
    CloneKnobs,
    CloneOptions,
    4_500_000_000,
    ("text", "audio"),
)
MODELS = (QWEN3_TTS, QWEN3_TTS_1P7B, QWEN3_TTS_VOICEDESIGN, QWEN3_TTS_BASE)
