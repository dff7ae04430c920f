"""Orpheus' API side: a voice and a text to a prompt; samples out."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from mstar.nn.config import read_config
from mstar.nn.sampling import stream_key
from mstar.processing.chat import Limits, sampling_params
from mstar.processing.crossfade import Crossfade
from mstar.processing.sentences import sentence_pieces
from mstar.processing.tokenizer import TextTokenizer
from mstar.spec.errors import RequestError, SetupError, nearest
from mstar.spec.processor import AudioDelta, Delta, Prepared, Processor, ProcessorContext, Renderer, Voice
from mstar.spec.request import Done, Emit, EngineRequest
from mstar.spec.tasks import GenerateTask, SpeechTask, Task
from mstar_tts.orpheus.spec import OrpheusOptions
from mstar_tts.orpheus.tokens import OrpheusTokens
from mstar_tts.snac.config import SnacConfig

__all__ = ["OrpheusProcessor"]

_END_OF_TEXT = "<|eot_id|>"
_SPARE_TOKENS = 336
"""Four seconds: of the silence around speech, and for a sigh."""
_DIGIT = 6
"""Characters that one is spoken as."""


class OrpheusProcessor(Processor):
    """The prompt is the reference's, id for id."""

    def __init__(self, context: ProcessorContext):
        super().__init__(context)
        folder = context.weights or Path()
        config = read_config(context.weights)
        self.options: OrpheusOptions = context.options
        self.snac = SnacConfig.read(read_config(folder / "snac"), "snac/config.json")
        self.tokens = OrpheusTokens.read(config, self.snac.codes)
        self.tokenizer = TextTokenizer(folder)
        self.limits = Limits.read(folder, self.tokenizer.vocab_size, self.options)
        self._longest = self.options.longest_piece
        end = self.tokenizer.id_of(_END_OF_TEXT)
        if end is None:
            raise SetupError(f"{folder}: the tokenizer has no {_END_OF_TEXT}, which ends a text")
        self._before = (self.tokens.start_of_human, *self.tokenizer.encode(""))
        self._behind = (end, *self.tokens.before_speech)

    # --- voices ---------------------------------------------------------------------------------------------------
    def voices(self) -> Sequence[Voice]:
        return [Voice(name) for name in self.options.voices]

    def _voice(self, task: SpeechTask | GenerateTask) -> str:
        named = task.voice if isinstance(task, SpeechTask) else None
        voice = named or task.knobs.voice or self.options.voices[0]
        if voice not in self.options.voices:
            message = f"'voice': there is no {voice!r}{nearest(voice, self.options.voices)}"
            raise RequestError(message, param="voice", code="unknown_voice")
        return str(voice)

    # --- long texts -----------------------------------------------------------------------------------------------
    def pieces(self, task: SpeechTask) -> Sequence[SpeechTask]:
        """As many sentences as fit. A piece without a letter or digit would be babbled at: it has none (see
        :func:`~mstar.processing.sentences.sentences`)."""
        texts = sentence_pieces(task.text, self._longest)
        return [replace(task, text=text) for text in texts] or (task,)

    # --- requests -------------------------------------------------------------------------------------------------
    def prepare(self, task: Task, request_id: str) -> Prepared:
        if not isinstance(task, SpeechTask | GenerateTask):
            raise RequestError(f"this model takes no {type(task).__name__}", param="model")
        field = "input" if isinstance(task, SpeechTask) else "text"
        _check(task)
        if not any(character.isalnum() for character in task.text):
            message = f"{field!r} has nothing in it that this model can speak"
            raise RequestError(message, param=field, code="nothing_to_speak")
        ids = [*self._before, *self.tokenizer.encode_around(f"{self._voice(task)}: ", task.text, ""), *self._behind]
        sampling = sampling_params(task, len(ids), field, self.limits, (self.tokens.end_of_speech,))
        if not sampling.ignore_eos:
            most = max(self._most(task.text), sampling.min_tokens)
            sampling = msgspec.structs.replace(sampling, max_tokens=min(sampling.max_tokens, most))
        seed = secrets.randbits(63) if task.knobs.seed is None else task.knobs.seed
        request = EngineRequest(
            id=request_id,
            inputs={
                "prompt": np.array(ids, dtype=np.int64),
                "noise_key": np.array(stream_key(seed, "orpheus") - (1 << 63)),
            },
            sampling={"sampler": sampling},
            want=task.want,
            tenant=task.tenant,
            cache_salt=task.tenant,
            timeout=task.timeout,
        )
        return Prepared(request, len(ids))

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        overlap = min(round(self.options.overlap_ms * self.snac.rate / 1000), self.snac.frame_samples)
        return _Sound(self.snac.rate, overlap, self.snac.frame_samples)

    def _most(self, text: str) -> int:
        """Tokens that *text* may take: a model that does not find its end is cut there."""
        weight = len(text) + (_DIGIT - 1) * sum(character.isdigit() for character in text)
        return _SPARE_TOKENS + int(self.options.tokens_per_character * weight)


def _check(task: SpeechTask | GenerateTask) -> None:
    """What Orpheus has no use for."""
    if task.stop:
        raise RequestError("'stop' means nothing to a model that makes no text", param="stop")
    if task.logprobs is not None:
        raise RequestError("'logprobs' means nothing to a model that makes no text", param="logprobs")
    if isinstance(task, SpeechTask):
        if task.sample is not None:
            raise RequestError("'ref_audio': Orpheus speaks with its own voices only", param="ref_audio")
        if task.instructions:
            message = "'instructions' are not supported by this model; leave them out"
            raise RequestError(message, param="instructions", code="unsupported_parameter")
    elif task.parts:
        raise RequestError("this model takes text and no files", param="parts[0]", code="unsupported_modality")


class _Sound(Renderer):
    """The sound; of an answer that ended within its first frame a frame of silence, since its client waits for a file
    that can be played. *frame*: its samples."""

    def __init__(self, rate: int, overlap: int, frame: int):
        self._rate, self._fade, self._frame = rate, Crossfade(overlap), frame
        self._heard = False

    def feed(self, event: Emit) -> Iterable[Delta]:
        self._heard = self._heard or len(event.data) > 0
        yield AudioDelta(self._fade.feed(np.asarray(event.data, np.float32)), self._rate)

    def finish(self, done: Done | None) -> Iterable[Delta]:
        held = self._fade.finish() if self._heard else np.zeros(self._frame, np.float32)
        if len(held):
            yield AudioDelta(held, self._rate)
