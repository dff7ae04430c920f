"""Qwen3-TTS's API side: texts, speakers and clips to the rows that the talker reads; samples out."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mstar.nn.config import read_config
from mstar.processing.resampling import samples_at
from mstar.processing.sentences import sentence_pieces
from mstar.processing.speech.languages import among, find_language
from mstar.processing.tokenizer import TextTokenizer
from mstar.spec.errors import RequestError, nearest
from mstar.spec.processor import AudioDelta, Delta, Prepared, Processor, ProcessorContext, Renderer, Voice
from mstar.spec.request import Emit, EngineRequest
from mstar.spec.tasks import SpeechTask, Task
from mstar_tts.qwen3_tts.codec_config import FOLDER, CodecConfig
from mstar_tts.qwen3_tts.config import SamplingDefaults, TTSConfig
from mstar_tts.qwen3_tts.prompt import VOICE, Prompt, Words, lay_out
from mstar_tts.qwen3_tts.requests import Asked, max_tokens_of, samplings

__all__ = ["Qwen3TTSProcessor"]

log = logging.getLogger(__name__)

_AUTO = "auto"


class Qwen3TTSProcessor(Processor):
    """All four keys; what a request may say follows from the checkpoint's ``tts_model_type``."""

    def __init__(self, context: ProcessorContext):
        super().__init__(context)
        options = self.options = context.options
        self._chunk_from, self._chunk = options.chunk_from_chars, options.chunk_chars
        self.config = TTSConfig.read(context.weights)
        self.config.require(context.options.variant)
        assert context.weights is not None  # or there would be no config.json
        self._codec = CodecConfig.read(read_config(context.weights / FOLDER))
        self._defaults = SamplingDefaults.read(context.weights)
        self._tokenizer = TextTokenizer(context.weights)
        self._default_voice = self._known_default() if self.config.variant == "custom_voice" else ""
        self._longest = self.options.max_tokens or self.config.talker.max_positions

    def _known_default(self) -> str:
        """The default speaker: as the deployment says, else the checkpoint's first."""
        preferred, speakers = self.options.default_voice, self.config.speakers
        if preferred.lower() in speakers:
            return str(preferred.lower())
        first = next(iter(speakers))
        log.warning(
            "default_voice: there is no voice %r%s; %r speaks instead", preferred, nearest(preferred, speakers), first
        )
        return first

    # --- voices and long texts ----------------------------------------------------------------------------------------
    def voices(self) -> Sequence[Voice]:
        if self.config.variant != "custom_voice":
            return ()
        return [
            Voice(name, name.replace("_", " ").title(), description=_dialect(self.config.dialects.get(name)))
            for name in self.config.speakers
        ]

    def knows_voice(self, voice: str) -> bool:
        return self.config.variant == "custom_voice" and voice.lower() in self.config.speakers

    def pieces(self, task: SpeechTask) -> Sequence[SpeechTask]:
        """Sentences joined to pieces, if the text is long."""
        if len(task.text) < self._chunk_from:
            return (task,)
        spoken = find_language(task.knobs.language or "")
        texts = sentence_pieces(task.text, self._chunk, None if spoken is None else spoken.code)
        return [replace(task, text=text) for text in texts] or (task,)

    # --- requests -----------------------------------------------------------------------------------------------------
    def prepare(self, task: Task, request_id: str) -> Prepared:
        asked = Asked.of(task, self.config)
        knobs = task.knobs
        words = self._words(asked)
        clip = None if asked.clip is None else self._clip(asked)
        in_context = clip is not None and not knobs.x_vector_only_mode
        frames = -(-len(clip) // self._codec.samples_per_frame) if in_context and clip is not None else 0
        if not in_context:
            words = replace(words, said=())
        speaker = self._speaker(asked)
        prompt = lay_out(
            self.config,
            words,
            language=self._language(knobs.language, asked),
            speaker=VOICE if clip is not None else speaker,
            frames=frames,
            streaming=self._streams(knobs),
        )
        most = max_tokens_of(knobs, self._defaults, len(words.text), self.options.max_frames_per_token)
        longest = max((words.said, "ref_text"), (words.text, asked.text_field), key=lambda part: len(part[0]))
        self._check_length(prompt, most, longest[1])
        request = EngineRequest(
            id=request_id,
            inputs=self._inputs(prompt, clip),
            params=self._params(clip, in_context),
            sampling=samplings(knobs, self._defaults, most, self.config.codec.eos),
            want=task.want,
            tenant=task.tenant,
            timeout=task.timeout,
        )
        read = len(words.instruct) + len(words.role) + len(words.said) + len(words.text)
        return Prepared(request, read, None)

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        return _Sound(self._codec.rate)

    def _streams(self, knobs: Any) -> bool:
        whole = knobs.non_streaming_mode
        return self.config.variant == "base" if whole is None else not whole

    def _words(self, asked: Asked) -> Words:
        tokenizer = self._tokenizer
        role = tokenizer.encode("<|im_start|>assistant\n", special=False)
        end = tokenizer.encode("<|im_end|>\n", special=False)

        def inside(text: str, field: str) -> list[int]:
            """The ids of *text* as they are between these two."""
            try:
                ids = tokenizer.encode_around("<|im_start|>assistant\n", text, "<|im_end|>\n")
            except RequestError as error:
                raise RequestError(str(error), param=field) from None
            return ids[len(role) : len(ids) - len(end)]

        text = inside(asked.text, asked.text_field)
        instruct: list[int] = []
        if asked.instruct and self.config.instructable:
            instruct = tokenizer.encode_around("<|im_start|>user\n", asked.instruct, "<|im_end|>\n")
        return Words(role, text, instruct, inside(asked.said, "ref_text") if asked.said else ())

    def _speaker(self, asked: Asked) -> int | None:
        if self.config.variant != "custom_voice":
            return None
        return self.config.speakers[asked.speaker(self.config, self._default_voice)]

    def _language(self, named: str | None, asked: Asked) -> int | None:
        """The id of the language; ``None``: the model finds out. Speakers of a dialect speak it where others would
        speak Chinese, or what the model finds out."""
        word = among(named or _AUTO, (_AUTO, *self.config.spoken))
        if word in (_AUTO, "chinese") and self.config.variant == "custom_voice":
            dialect = self.config.dialects.get(asked.speaker(self.config, self._default_voice))
            if dialect is not None:
                return self.config.languages[dialect]
        return None if word == _AUTO else self.config.languages[word]

    def _clip(self, asked: Asked) -> np.ndarray[Any, Any]:
        assert asked.clip is not None
        asked.check_clip(self.options.max_clip_s)
        return samples_at(asked.clip, self._codec.rate)

    def _check_length(self, prompt: Prompt, most: int, field: str) -> None:
        longest, rows = self._longest, len(prompt.rows)
        if len(prompt.queue) > self.options.max_streamed_text:
            message = (
                f"{field!r}: {len(prompt.queue)} tokens are to be read while they are spoken; the limit is "
                f"{self.options.max_streamed_text}. Set 'non_streaming_mode' to true, or send a shorter text"
            )
            raise RequestError(message, param=field, code="text_too_long")
        if rows + most > longest:
            message = (
                f"{field!r}: the prompt has {rows} tokens, which with up to {most} frames is more than the {longest} "
                f"that the model holds at once. Send a shorter text or clip, or lower 'max_new_tokens'"
            )
            raise RequestError(message, param=field, code="text_too_long")

    def _inputs(self, prompt: Prompt, clip: np.ndarray[Any, Any] | None) -> dict[str, Any]:
        inputs: dict[str, Any] = {"rows": prompt.rows}
        if len(prompt.queue) or clip is not None:
            queue = prompt.queue if len(prompt.queue) else np.array([self.config.tts_pad])
            inputs |= {"queue": queue, "prompt_length": np.array(len(prompt.rows))}
        return inputs if clip is None else {**inputs, "clip": clip}

    @staticmethod
    def _params(clip: np.ndarray[Any, Any] | None, in_context: bool) -> dict[str, Any]:
        if clip is None:
            return {}
        digest = hashlib.blake2b(np.ascontiguousarray(clip, "<f4").tobytes(), digest_size=16).hexdigest()
        return {"clip": digest, "in_context": in_context}


def _dialect(language: str | None) -> str:
    return "" if language is None else f"Speaks {language.replace('_', ' ')}."


class _Sound(Renderer):
    def __init__(self, rate: int):
        self._rate = rate

    def feed(self, event: Emit) -> Iterable[Delta]:
        yield AudioDelta(np.clip(np.asarray(event.data, np.float32).reshape(-1), -1.0, 1.0), self._rate)
