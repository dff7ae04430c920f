"""Qwen3-ASR's API side: a clip, or speech that goes on, and how the model is asked to write it down."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mstar.nn.config import read_config
from mstar.processing.resampling import samples_at
from mstar.processing.speech.languages import among, find_language
from mstar.processing.speech.live import LiveSound
from mstar.processing.speech.windows import WindowPolicy, cut
from mstar.processing.tokenizer import TextTokenizer
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.processor import Prepared, Processor, ProcessorContext, Renderer
from mstar.spec.request import EngineRequest, SamplingParams
from mstar.spec.tasks import Audio, GenerateTask, Task, TranscriptionTask
from mstar_asr.qwen3_asr.config import Qwen3ASRConfig, audio_tokens
from mstar_asr.qwen3_asr.renderer import LiveRenderer, WholeRenderer
from mstar_asr.qwen3_asr.sound import normalized, sound_rows
from mstar_asr.qwen3_asr.spec import LANGUAGES, Qwen3ASROptions
from mstar_asr.qwen3_asr.transcript import ASR_TEXT
from mstar_asr.whisper.request import RATE

__all__ = ["LONGEST_S", "Asked", "Qwen3ASRProcessor"]

LONGEST_S = 1200.0
"""Seconds of sound that the model hears at a time (``MAX_ASR_INPUT_SECONDS`` of the reference)."""

_WINDOWS = WindowPolicy(LONGEST_S, search_s=5.0, quiet_s=0.1)
_GO_ON = (
    "end it before that (in /v1/realtime: commit the turn) and go on in another one, whose context says what was "
    "written so far; the operator allows up to 1200 with model_kwargs.live_seconds"
)
_TOKENS_A_SECOND = 10
"""Fast speech has half as many."""


@dataclass(frozen=True)
class Asked:
    """What a renderer needs to know of a request.

    :param seconds: of the clip; ``None``: it is heard live. :param language: code of the forced language.
    """

    seconds: float | None
    language: str | None
    sampling: SamplingParams


class Qwen3ASRProcessor(Processor):
    def __init__(self, context: ProcessorContext):
        super().__init__(context)
        if context.weights is None:
            raise SetupError(f"{context.spec.key}: this model needs weights; name a folder or a Hub id with --weights")
        self.sizes = Qwen3ASRConfig.from_hf(read_config(context.weights))
        self.options: Qwen3ASROptions = context.options
        self.live_tokens = self.options.live_max_tokens
        self.tokenizer = TextTokenizer(context.weights)
        self.stop_ids = self.tokenizer.stop_ids or (self._id("<|im_end|>"), self._id("<|endoftext|>"))
        self._id("<|audio_start|>")
        self._id("<|audio_end|>")

    def _id(self, token: str) -> int:
        found = self.tokenizer.id_of(token)
        if found is None:
            raise SetupError(f"{self.tokenizer.folder}: the tokenizer has no token {token!r}")
        return found

    def token_bytes(self, token: int) -> bytes:
        """For log-probabilities: the bytes that *token* stands for."""
        return self.tokenizer.token_bytes(token)

    # --- requests -----------------------------------------------------------------------------------------------------
    def windows(self, task: TranscriptionTask) -> Sequence[TranscriptionTask]:
        """As the reference: the whole clip is resampled and brought to full scale, and then cut."""
        if task.audio is None:
            return (task,)
        return cut(replace(task, audio=Audio(normalized(samples_at(task.audio, RATE)), RATE)), _WINDOWS)

    def prepare(self, task: Task, request_id: str) -> Prepared:
        audio, context, where = self._read(task)
        language = self._language(task)
        head = self.tokenizer.encode_around(
            "<|im_start|>system\n", context, "<|im_end|>\n<|im_start|>user\n<|audio_start|>"
        )
        answer = "" if language is None else f"language {language}{ASR_TEXT}"
        tail = self.tokenizer.encode(f"<|audio_end|><|im_end|>\n<|im_start|>assistant\n{answer}", special=False)
        if audio is None:
            return self._live(task, request_id, head, tail, language)
        samples = normalized(samples_at(audio, RATE))
        seconds = len(samples) / RATE
        if seconds > LONGEST_S:
            message = (
                f"{where!r}: {seconds:.1f} seconds are longer than the {LONGEST_S:g} that the model hears at a time"
            )
            raise RequestError(message, param=where, code="audio_too_long")
        sound = sound_rows(samples, self.sizes.audio.second)
        places = audio_tokens(int(sound[:, 0].sum()), self.sizes.audio.second)
        prompt = np.array([*head, *[self.sizes.audio_token] * places, *tail], np.int64)
        default = max(self.options.default_max_tokens, math.ceil(seconds * _TOKENS_A_SECOND))
        sampling = self._sampling(task, len(prompt), default, "prompt" if where == "file" else "text")
        request = self._request(task, request_id, {"prompt": prompt, "sound": sound}, sampling)
        return Prepared(request, prompt_tokens=len(prompt), state=Asked(seconds, _code(language), sampling))

    def _live(self, task: Task, request_id: str, head: list[int], tail: list[int], language: str | None) -> Prepared:
        if task.logprobs is not None:
            raise RequestError("live speech has no log-probabilities", param="logprobs", code="unsupported_parameter")
        sound = self.options.live_seconds * audio_tokens(self.sizes.audio.second, self.sizes.audio.second)
        wanted = task.knobs.max_tokens or self.live_tokens
        where = "prompt" if isinstance(task, TranscriptionTask) else "text"
        most = self.options.live_tokens(wanted)
        sampling = self._sampling(task, len(head) + len(tail) + sound, wanted, where, most)
        inputs = {"prompt": np.array(head, np.int64), "rest": np.array(tail, np.int64)}
        request = self._request(task, request_id, inputs, sampling, ("audio",))
        return Prepared(
            request,
            prompt_tokens=len(head) + len(tail),
            state=Asked(None, _code(language), sampling),
            intake=LiveSound("audio", RATE, self.options.live_seconds, _GO_ON),
        )

    def _request(
        self,
        task: Task,
        request_id: str,
        inputs: dict[str, Any],
        sampling: SamplingParams,
        streams: tuple[str, ...] = (),
    ) -> EngineRequest:
        return EngineRequest(
            id=request_id,
            inputs=inputs,
            params=task.knobs.model_dump(),
            sampling={"sampler": sampling},
            want=task.want,
            client_streams=streams,
            session=task.session,
            tenant=task.tenant,
        )

    def _read(self, task: Task) -> tuple[Audio | None, str, str]:
        """The clip (``None``: it comes live), the context, and the field that the clip came in."""
        if task.stop:
            raise RequestError("'stop': a transcript has no stop strings", param="stop", code="unsupported_parameter")
        for name in task.live:
            if name != "audio":
                raise RequestError(f"this model takes no live input {name!r}; it takes 'audio'", param="live")
        if isinstance(task, TranscriptionTask):
            if task.translate:
                raise RequestError("this model does not translate", param="task", code="unsupported_task")
            if "word" in task.timestamps:
                where = "timestamp_granularities"
                message = f"{where!r}: this model does not know when a word was said; it takes 'segment'"
                raise RequestError(message, param=where, code="unsupported_parameter")
            return self._one(task.audio, bool(task.live), "file"), task.prompt, "file"
        if isinstance(task, GenerateTask):
            for i, part in enumerate(task.parts):
                if not isinstance(part, Audio):
                    where, kind = f"parts[{i}]", type(part).__name__.lower()
                    message = f"{where}: this model hears sound only, not {kind}"
                    raise RequestError(message, param=where, code="unsupported_modality")
            if len(task.parts) > 1:
                message = f"this model hears one clip a request, got {len(task.parts)}"
                raise RequestError(message, param="parts", code="too_many_files")
            audio = task.parts[0] if task.parts else None
            assert audio is None or isinstance(audio, Audio)
            return self._one(audio, bool(task.live), "files"), task.text, "files"
        raise RequestError(f"this model does not serve {type(task).__name__}", code="unsupported_task")

    @staticmethod
    def _one(audio: Audio | None, live: bool, where: str) -> Audio | None:
        if live and audio is not None:
            message = f"{where!r}: a live request hears what is sent on its stream 'audio', and no file"
            raise RequestError(message, param=where, code="unsupported_parameter")
        if not live and audio is None:
            raise RequestError(f"{where!r}: there is no sound to write down", param=where, code="missing_input")
        return audio

    def _language(self, task: Task) -> str | None:
        wanted = task.language if isinstance(task, TranscriptionTask) and task.language else task.knobs.language
        return None if not wanted else among(wanted, LANGUAGES)

    def _sampling(self, task: Task, prompt: int, default: int, param: str, answer: int | None = None) -> SamplingParams:
        """:param default: tokens where the request names none. :param param: the context's field.
        :param answer: tokens of a whole live request."""
        context = min(self.options.max_tokens or self.sizes.text.max_positions, self.sizes.text.max_positions)
        asked = task.knobs.max_tokens
        room = context - prompt
        if room < (answer or asked or 1):
            wanted = f"{prompt} tokens of sound and prompt" + (
                f" and {answer or asked} of text" if answer or asked else ""
            )
            raise RequestError(
                f"{wanted} do not fit: one request holds {context} tokens in all (model_kwargs.max_tokens)",
                param="max_tokens" if asked is not None and room > 0 else param,
                code="context_length_exceeded",
            )
        return SamplingParams(
            temperature=task.knobs.temperature,
            seed=task.knobs.seed,
            max_tokens=asked or min(default, room),
            stop_token_ids=self.stop_ids,
            logprobs=task.logprobs,
        )

    # --- answers ------------------------------------------------------------------------------------------------------
    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        asked: Asked = prepared.state
        kind = LiveRenderer if asked.seconds is None else WholeRenderer
        return kind(self.tokenizer, asked.sampling, asked.language, asked.seconds or 0.0)


def _code(language: str | None) -> str | None:
    found = None if language is None else find_language(language)
    return None if found is None else found.code
