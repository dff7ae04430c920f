"""Kokoro's API side: text to phonemes and a style; samples out."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mstar.nn.config import read_config
from mstar.nn.sampling import stream_key
from mstar.processing.sentences import sentences
from mstar.spec.errors import RequestError
from mstar.spec.processor import AudioDelta, Delta, Prepared, Processor, ProcessorContext, Renderer, Voice
from mstar.spec.request import Emit, EngineRequest
from mstar.spec.tasks import GenerateTask, SpeechTask, Task
from mstar_tts.kokoro.buckets import bucket
from mstar_tts.kokoro.config import RATE, KokoroConfig
from mstar_tts.kokoro.g2p import can_pronounce, phonemes
from mstar_tts.kokoro.languages import LANGUAGES, Language, language_of
from mstar_tts.kokoro.pieces import pieces
from mstar_tts.kokoro.voices import Voices

__all__ = ["KokoroProcessor"]

_MARK = 0
"""The id at both ends of a text."""
_SPARE_FRAMES = 40
"""Of the silence before and after speech."""


@dataclass(frozen=True)
class _Piece:
    """:param frames: the most that it may last. :param samples: of a frame."""

    frames: int
    samples: int


class KokoroProcessor(Processor):
    """See :mod:`mstar_tts.kokoro.g2p` for how texts are pronounced, :mod:`mstar_tts.kokoro.voices` for voices."""

    def __init__(self, context: ProcessorContext):
        super().__init__(context)
        folder = context.weights or Path()
        self.options = context.options
        self.config = KokoroConfig.read(read_config(context.weights))
        self._voices = Voices(folder / "voices", 2 * self.config.style)
        self._default = self._voices.default(self.options.default_voice)
        self._fallback = self.options.espeak_fallback
        self._longest = self.config.max_phonemes
        self._target = min(self.options.chunk_target_phonemes, self._longest)
        self._first = min(self.options.first_chunk_target_phonemes, self._longest)

    # --- voices ---------------------------------------------------------------------------------------------------
    def voices(self) -> Sequence[Voice]:
        """Those whose language can be pronounced here."""
        able = {letter for letter, language in LANGUAGES.items() if can_pronounce(language)}
        return [self._voices.describe(name) for name in self._voices.names if name[:1] in able | {""} - set(LANGUAGES)]

    def knows_voice(self, voice: str) -> bool:
        """A voice or a blend. One whose language cannot be pronounced is known: the error then says what is missing."""
        self._voices.blend(voice)
        return True

    # --- long texts -----------------------------------------------------------------------------------------------
    def pieces(self, task: SpeechTask) -> Sequence[SpeechTask]:
        """Sentences joined to pieces, the first one short; each has its phonemes with it."""
        found = pieces(self._sentences(task), self._target, self._first, self._longest)
        if not found:
            return (task,)  # prepare() says that there is nothing to speak
        return [replace(task, knobs=task.knobs.model_copy(update={"phonemes": piece})) for piece in found]

    def _sentences(self, task: SpeechTask) -> list[str]:
        if task.knobs.phonemes is not None:
            spoken = [task.knobs.phonemes]
        else:
            language = self._language(task, self._blend(task))
            spoken = phonemes(sentences(task.text, language.code), language, self._fallback)
        return [known for sentence in spoken if _audible(known := self._known(sentence))]

    # --- requests -------------------------------------------------------------------------------------------------
    def prepare(self, task: Task, request_id: str) -> Prepared:
        if not isinstance(task, SpeechTask | GenerateTask):
            raise RequestError(f"this model takes no {type(task).__name__}", param="model")
        field = "input" if isinstance(task, SpeechTask) else "text"
        self._check(task)
        blend = self._blend(task)
        spoken = self._spoken(task, blend, field)
        ids = [_MARK, *(self.config.vocab[symbol] for symbol in spoken), _MARK]
        padded = np.zeros(bucket(len(ids), self.options.text_buckets), np.int64)
        padded[: len(ids)] = ids
        knobs = task.knobs
        seed = secrets.randbits(63) if knobs.seed is None else knobs.seed
        most = int((_SPARE_FRAMES + self.options.max_frames_per_phoneme * len(ids)) / knobs.speed)
        request = EngineRequest(
            id=request_id,
            inputs={
                "ids": padded,
                "length": np.array(len(ids)),
                "style": self._voices.style(blend, len(spoken)),
                "most": np.array(most),
                "noise_key": np.array(stream_key(seed, "kokoro") - (1 << 63)),
            },
            params={"speed": knobs.speed},
            want=task.want,
            tenant=task.tenant,
            timeout=task.timeout,
        )
        return Prepared(request, len(ids), _Piece(most, self.config.frame_samples))

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        return _Sound(prepared.state)

    def _check(self, task: SpeechTask | GenerateTask) -> None:
        """What Kokoro has no use for."""
        if task.stop:
            raise RequestError("'stop' means nothing to a model that makes no text", param="stop")
        if isinstance(task, SpeechTask):
            if task.sample is not None:
                raise RequestError("'ref_audio': Kokoro speaks with its own voices only", param="ref_audio")
            if task.instructions:
                message = "'instructions' are not supported by this model; leave them out"
                raise RequestError(message, param="instructions", code="unsupported_parameter")
        elif task.parts:
            raise RequestError("this model takes text and no files", param="parts[0]", code="unsupported_modality")

    def _blend(self, task: SpeechTask | GenerateTask) -> dict[str, float]:
        named = task.voice if isinstance(task, SpeechTask) else None
        return self._voices.blend(named or task.knobs.voice or self._default)

    def _language(self, task: SpeechTask | GenerateTask, blend: dict[str, float]) -> Language:
        code = task.knobs.lang_code or self.options.lang_code
        return self._voices.language(blend) if code is None else language_of(code)

    def _spoken(self, task: SpeechTask | GenerateTask, blend: dict[str, float], field: str) -> str:
        """The phonemes, all of which the model knows."""
        if task.knobs.phonemes is not None:
            field, spoken = "phonemes", self._known(task.knobs.phonemes)
        else:
            text = " ".join(task.text.split())
            spoken = self._known(phonemes([text], self._language(task, blend), self._fallback)[0])
        if not _audible(spoken):
            message = f"{field!r} has nothing in it that this model can speak"
            raise RequestError(message, param=field, code="nothing_to_speak")
        if len(spoken) > self._longest:
            message = (
                f"{field!r} is {len(spoken)} phonemes; this model speaks at most {self._longest} at once. "
                "/v1/audio/speech speaks longer texts in pieces, unless 'sentence_chunking' is false"
            )
            raise RequestError(message, param=field, code="text_too_long")
        return spoken

    def _known(self, spoken: str) -> str:
        """*spoken* without what the model has no sound for, as the reference does."""
        return "".join(symbol for symbol in spoken if symbol in self.config.vocab).strip()


def _audible(spoken: str) -> bool:
    return any(symbol.isalpha() for symbol in spoken)


class _Sound(Renderer):
    """A piece's samples, without the padding. A piece that was cut ends with reason ``length``."""

    def __init__(self, piece: _Piece):
        self._piece, self._frames = piece, 0

    def feed(self, event: Emit) -> Iterable[Delta]:
        if event.stream == "durations":
            self._frames = int(np.asarray(event.data).sum())
            return
        samples = np.asarray(event.data, np.float32).reshape(-1)
        heard = samples[: min(self._frames, self._piece.frames) * self._piece.samples]
        yield AudioDelta(np.clip(heard, -1.0, 1.0), RATE)
        if self._frames > self._piece.frames:
            self.finished = "length"
