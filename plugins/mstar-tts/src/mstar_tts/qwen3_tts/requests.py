"""What a request for speech says, whichever route it came by, and what its knobs mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mstar.spec.errors import RequestError, nearest
from mstar.spec.request import SamplingParams
from mstar.spec.tasks import Audio, GenerateTask, SpeechTask, Task
from mstar_tts.qwen3_tts.config import SamplingDefaults, TTSConfig

__all__ = ["Asked", "max_tokens_of", "samplings"]

_LEAST_S = 0.5
_SPARE_FRAMES = 50
_LEAST_TOKENS = 2
"""Before these the end may not come."""


@dataclass(frozen=True)
class Asked:
    """A task's contents with the names of the fields that they came from, for errors.

    :param said: what is said in *clip*.
    """

    text: str
    text_field: str
    instruct: str
    instruct_field: str
    voice: str | None
    clip: Audio | None
    clip_field: str
    said: str

    @classmethod
    def of(cls, task: Task, config: TTSConfig) -> Asked:
        """Raises :class:`RequestError` for a task of another kind, and for what the checkpoint has no use for."""
        if not isinstance(task, SpeechTask | GenerateTask):
            raise RequestError(f"this model takes no {type(task).__name__}", param="model")
        if task.stop:
            raise RequestError("'stop' means nothing to a model that makes no text", param="stop")
        asked = cls._of_speech(task) if isinstance(task, SpeechTask) else cls._of_generate(task, config)
        asked._check(config, bool(getattr(task.knobs, "x_vector_only_mode", False)))
        return asked

    @classmethod
    def _of_speech(cls, task: SpeechTask) -> Asked:
        knob = getattr(task.knobs, "instruct", None)
        if task.instructions and knob and task.instructions != knob:
            raise RequestError("'instructions' and 'instruct' are the same: send one of them", param="instruct")
        sample = task.sample
        return cls(
            text=task.text.strip(),
            text_field="input",
            instruct=(task.instructions or knob or "").strip(),
            instruct_field="instructions",
            voice=task.voice or getattr(task.knobs, "voice", None),
            clip=None if sample is None else sample.audio,
            clip_field="ref_audio" if sample is None else sample.param,
            said=(sample.text if sample is not None else "").strip(),
        )

    @classmethod
    def _of_generate(cls, task: GenerateTask, config: TTSConfig) -> Asked:
        taken = 1 if config.variant == "base" else 0
        for number, part in enumerate(task.parts):
            if number >= taken or not isinstance(part, Audio):
                message = "this model takes one clip and a text" if taken else "this model takes text and no files"
                raise RequestError(message, param=f"parts[{number}]", code="unsupported_modality")
        clip = task.parts[0] if task.parts else None
        assert clip is None or isinstance(clip, Audio)
        return cls(
            text=task.text.strip(),
            text_field="text",
            instruct=(getattr(task.knobs, "instruct", None) or "").strip(),
            instruct_field="instruct",
            voice=getattr(task.knobs, "voice", None),
            clip=clip,
            clip_field="parts[0]",
            said=(getattr(task.knobs, "ref_text", None) or "").strip(),
        )

    def _check(self, config: TTSConfig, timbre_only: bool) -> None:
        if not any(character.isalnum() for character in self.text):
            message = f"{self.text_field!r} has nothing in it that this model can speak"
            raise RequestError(message, param=self.text_field, code="nothing_to_speak")
        if config.variant == "base":
            self._check_clone(timbre_only)
        elif self.clip is not None:
            message = f"{self.clip_field!r}: this model cannot speak with the voice of a clip; qwen3_tts_base can"
            raise RequestError(message, param=self.clip_field, code="unsupported_modality")
        if config.variant == "voice_design" and not self.instruct:
            message = f"{self.instruct_field!r} is missing: this model speaks in the voice that it describes"
            raise RequestError(message, param=self.instruct_field, code="missing_input")

    def _check_clone(self, timbre_only: bool) -> None:
        if self.instruct:
            message = f"{self.instruct_field!r} is not supported by this model; leave it out"
            raise RequestError(message, param=self.instruct_field, code="unsupported_parameter")
        if self.clip is None:
            message = f"{self.clip_field!r} is missing: this model speaks in the voice of a clip"
            raise RequestError(message, param=self.clip_field, code="missing_input")
        if not self.said and not timbre_only:
            message = (
                "'ref_text' is missing: say what is said in the clip, or set 'x_vector_only_mode' to true to take its "
                "timbre alone"
            )
            raise RequestError(message, param="ref_text", code="missing_input")

    def check_clip(self, longest_s: float) -> None:
        """Refuse a clip that is too short to tell a voice, or too long."""
        assert self.clip is not None
        seconds = len(self.clip.samples) / self.clip.rate
        if not _LEAST_S <= seconds <= longest_s:
            near = _LEAST_S if seconds < _LEAST_S else longest_s
            message = f"{self.clip_field!r} of {seconds:.2f} s: a clip has {_LEAST_S:g} to {longest_s:g} s"
            code = "audio_too_short" if seconds < _LEAST_S else "audio_too_long"
            raise RequestError(f"{message}; the nearest valid length is {near:g} s", param=self.clip_field, code=code)

    def speaker(self, config: TTSConfig, default: str) -> str:
        """The name of the built-in speaker, lower case."""
        name = (self.voice or default).lower()
        if name not in config.speakers:
            message = f"'voice': the model has no voice {name[:80]!r}{nearest(name, config.speakers)}"
            raise RequestError(message, param="voice", code="voice_not_found")
        return name


def samplings(knobs: Any, defaults: SamplingDefaults, most: int, eos: int) -> dict[str, SamplingParams]:
    """What group 0 and the other groups are sampled with, by the samplers' names. *most*: tokens of group 0."""

    def given(name: str) -> Any:
        value = getattr(knobs, name)
        return getattr(defaults, name) if value is None else value

    drawn, others = given("do_sample"), given("subtalker_dosample")
    first = SamplingParams(
        temperature=given("temperature") if drawn else 0.0,
        top_k=given("top_k"),
        top_p=given("top_p"),
        repetition_penalty=given("repetition_penalty"),
        seed=knobs.seed,
        max_tokens=most,
        # an end that came all the same would be no frame, so it may not come
        min_tokens=most if knobs.ignore_eos else _LEAST_TOKENS,
        stop_token_ids=(eos,),
    )
    rest = SamplingParams(
        temperature=given("subtalker_temperature") if others else 0.0,
        top_k=given("subtalker_top_k"),
        top_p=given("subtalker_top_p"),
        seed=knobs.seed,
    )
    return {"sampler": first, "subtalker": rest}


def max_tokens_of(knobs: Any, defaults: SamplingDefaults, text_tokens: int, frames_each: float) -> int:
    """The most frames of an answer. A request's own ``max_new_tokens`` counts the end, which is no frame; one that
    names none is also bound by the length of its text."""
    most = int((knobs.max_new_tokens or defaults.max_new_tokens) - 1)
    if knobs.max_new_tokens is None and not knobs.ignore_eos:
        most = min(most, int(_SPARE_FRAMES + frames_each * text_tokens))
    return max(1, most)
