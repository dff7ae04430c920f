"""The deployment's option for watermarks. No torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from mstar.spec.knobs import Finite, Knobs

__all__ = ["BITS", "AudioWatermark", "WatermarkOptions", "message_bits"]

BITS = 16
"""Of a message."""


def message_bits(message: int | str) -> tuple[int, ...]:
    """The bits of *message* in the order in which AudioSeal has them: a text's from its first character on, a number's
    as its sixteen binary digits are written.

    :raises ValueError: it is neither a number of sixteen bits nor sixteen characters 0 and 1.
    """
    if isinstance(message, int):
        if not 0 <= message < 1 << BITS:
            raise ValueError(f"must be a number from 0 to {(1 << BITS) - 1}, or {BITS} characters 0 and 1")
        message = format(message, f"0{BITS}b")
    if len(message) != BITS or set(message) - {"0", "1"}:
        raise ValueError(f"must be {BITS} characters 0 and 1, or a number from 0 to {(1 << BITS) - 1}")
    return tuple(map(int, message))


class AudioWatermark(Knobs):
    """A mark on everything that a deployment says."""

    enabled: bool = Field(False, description="Mark all sound.", strict=True)
    method: Literal["audioseal", "perth"] = Field(
        "audioseal", description="`perth`: Resemble's, without a message, for models that send whole sounds."
    )
    message: int | str = Field(
        0, description="Sixteen bits that the mark carries: 0 to 65535 (`0xBEEF`), or 16 characters 0 and 1."
    )
    alpha: Finite = Field(1.0, gt=0, le=4, description="How strong the mark is.")
    generator: str | None = Field(
        None,
        min_length=1,
        description="The network's file: AudioSeal's `generator_streaming.pth` of facebook/audioseal, or a folder that "
        "holds it; PerTh's, if not that of the package resemble-perth.",
    )

    @field_validator("message", mode="before")
    @classmethod
    def _sixteen_bits(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError("must be a number or a text")
        message_bits(value)
        return value


class WatermarkOptions(Knobs):
    """What the options of a family that can mark its sound have in common."""

    audio_watermark: AudioWatermark = Field(
        AudioWatermark(),
        description="A mark on all sound: `{enabled: true, message: 0xBEEF, alpha: 1.0, generator: FILE}`.",
    )
