"""Whisper's API side: clips to windows, windows to requests. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mstar.processing.resampling import samples_at
from mstar.processing.speech.languages import among, find_language
from mstar.processing.tokenizer import TextTokenizer, read_json
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.processor import Prepared, Processor, ProcessorContext, Renderer
from mstar.spec.tasks import Audio, GenerateTask, Task, TranscriptionTask
from mstar_asr.whisper.clip import Clip, chunks
from mstar_asr.whisper.longform import History, temperatures
from mstar_asr.whisper.renderer import PlainRenderer, WindowRenderer
from mstar_asr.whisper.request import RATE, WINDOW, window_prompt, window_request
from mstar_asr.whisper.spec import WhisperKnobs
from mstar_asr.whisper.tokens import WhisperTokens
from mstar_asr.whisper.window import Window

__all__ = ["WhisperProcessor"]


class WhisperProcessor(Processor):
    """Transcribes clips of any length, and single windows of at most 30 s for the native route.

    *A transcription* goes through the clip as the reference does (:mod:`mstar_asr.whisper.longform`), whatever the
    response's format is, so that all formats have the same words: with timestamps, each window judged and heard again
    at higher temperatures, the next one where the last segment ended, with what was said as its prompt. With
    ``task.chunked`` the clip is cut where nobody speaks, and each stretch of at most 30 s goes its own way at once.
    Windows in which nobody speaks are left out, unless the request's ``vad_filter`` is off.

    *A native request* (:class:`~mstar.spec.tasks.GenerateTask`) is one window, heard once: its text streams as it is
    written. Its tests and fallbacks are those of transcriptions only, since they take an answer back. It is asked for
    timestamps as well, whether they are told or not: without them the models often end at a long pause and leave out
    what is said after it.
    """

    def __init__(self, context: ProcessorContext):
        super().__init__(context)
        if context.weights is None:
            raise SetupError(f"{context.spec.key}: this model needs weights; name a folder or a Hub id with --weights")
        self.tokenizer = TextTokenizer(context.weights)
        self.tokens = WhisperTokens.read(context.weights)
        config = read_json(context.weights, "config.json")
        self.positions, self.bins = int(config["max_target_positions"]), int(config["num_mel_bins"])
        self.languages = tuple(self.tokens.languages) or ("en",)

    # --- windows

    def windows(self, task: TranscriptionTask) -> Sequence[TranscriptionTask]:
        if task.audio is None:
            return (task,)  # prepare says that it must be there
        knobs, language = _knobs(task), self._language(task)
        self._prompt(task, language)  # raises for what this model cannot do, though nobody may speak in the clip
        clip = Clip(samples_at(task.audio, RATE), self.bins, task.offset)
        stretches = chunks(clip) if task.chunked else [(0, clip.frames)]
        found = []
        for seek, end in stretches:
            window = Window(clip, seek, end, self._history(task), language)
            if knobs.vad_filter:
                window = replace(window, seek=clip.next_speech(seek, end))
            if window.seek < end:
                found.append(window.task(task))
        return found

    def _window(self, task: TranscriptionTask | GenerateTask) -> Window:
        """The window of a task that :meth:`windows` has not made."""
        audio = self._audio(task)
        clip = Clip(samples_at(audio, RATE), self.bins)
        end = max(clip.frames, 1)
        window = Window(clip, 0, end, self._history(task), self._language(task))
        silent = _knobs(task).vad_filter and clip.next_speech(0, end) == end
        return replace(window, silent=silent or clip.frames == 0)

    def _audio(self, task: TranscriptionTask | GenerateTask) -> Audio:
        if isinstance(task, TranscriptionTask):
            if task.audio is None:
                raise RequestError("this model hears whole clips only", param="audio")
            return task.audio
        for place, part in enumerate(task.parts):
            if not isinstance(part, Audio):
                where, kind = f"parts[{place}]", type(part).__name__
                raise RequestError(f"{where!r}: this model hears sound, it has no use for {kind}", param=where)
        if not task.parts:
            raise RequestError("'files': there is no sound to write down", param="files", code="missing_input")
        if len(task.parts) > 1:
            message = f"'files': one clip a request, got {len(task.parts)}"
            raise RequestError(message, param="files", code="too_many_files")
        if task.text.strip():
            message = "'text': this model takes no text; what was said before the clip goes into 'initial_prompt'"
            raise RequestError(message, param="text", code="unsupported_parameter")
        (audio,) = task.parts
        assert isinstance(audio, Audio)
        seconds = len(audio.samples) / audio.rate
        if seconds > WINDOW / RATE:
            message = (
                f"'parts[0]': the clip has {seconds:.2f} seconds, a native request hears at most {WINDOW // RATE}; "
                "POST /v1/audio/transcriptions takes longer ones"
            )
            raise RequestError(message, param="parts[0]", code="audio_too_long")
        return audio

    def _history(self, task: TranscriptionTask | GenerateTask) -> History:
        knobs = _knobs(task)
        text, param = knobs.initial_prompt, "initial_prompt"
        if isinstance(task, TranscriptionTask) and task.prompt.strip():
            text, param = task.prompt, "prompt"
        if not text.strip():
            return History()
        ids = self.tokenizer.encode(" " + text.strip(), special=False)
        special = next((token for token in ids if token >= self.tokens.eot), None)
        if special is not None:
            (name,) = self.tokenizer.tokens([special])
            message = f"{param!r}: {name!r} is one of the model's special tokens, which a prompt must not hold"
            raise RequestError(message, param=param)
        return History(tuple(ids))

    def _language(self, task: TranscriptionTask | GenerateTask) -> str | None:
        asked = task.language if isinstance(task, TranscriptionTask) else None
        asked = asked or _knobs(task).language
        if asked is None:
            return None if self.tokens.multilingual else "en"
        found = find_language(asked)
        if found is not None and found.code == "jv" and "jw" in self.languages:
            return "jw"  # what Javanese is called in the checkpoints
        return among(asked, self.languages)

    # --- requests

    def prepare(self, task: Task, request_id: str) -> Prepared:
        if not isinstance(task, TranscriptionTask | GenerateTask):
            raise RequestError(f"this model transcribes, it has no use for a {type(task).__name__}")
        knobs = _knobs(task)
        carried = task.carried if isinstance(task, TranscriptionTask) else None
        window = carried if isinstance(carried, Window) else self._window(task)
        words = _wants_words(task)
        prompt = self._prompt(task, window.language, window.history)
        request = window_request(
            request_id,
            self.tokens,
            window.clip.window(window.seek),
            prompt,
            frames=window.frames,
            loudest=window.loudest,
            max_initial_timestamp=knobs.max_initial_timestamp,
            words=words and not window.silent,
            temperature=self.temperatures(task)[window.attempt],
            seed=knobs.seed,
            max_tokens=1 if window.silent else knobs.max_tokens,
            logprobs=0,
            positions=self.positions,
            want=task.want,
            tenant=task.tenant,
        )
        return Prepared(request, prompt_tokens=len(prompt), state=window)

    def _prompt(
        self, task: TranscriptionTask | GenerateTask, language: str | None, history: History | None = None
    ) -> list[int]:
        """The decoder's first tokens. Raises :class:`RequestError` for a language or a task that the model lacks."""
        return window_prompt(
            self.tokens,
            language=language,
            task="translate" if _translates(task) else "transcribe",
            timestamps=True,
            previous=() if history is None else history.tokens,
            positions=self.positions,
        )

    def temperatures(self, task: TranscriptionTask | GenerateTask) -> tuple[float, ...]:
        """Of the first attempt and those after it."""
        knobs = _knobs(task)
        step = knobs.temperature_increment if isinstance(task, TranscriptionTask) else 0.0
        return temperatures(knobs.temperature, step)

    def renderer(self, task: Task, prepared: Prepared) -> Renderer:
        window = prepared.state
        assert isinstance(window, Window)
        if isinstance(task, TranscriptionTask):
            return WindowRenderer(self.tokens, self.tokenizer.decode, task, window, self.temperatures(task))
        assert isinstance(task, GenerateTask)
        if window.silent or _knobs(task).timestamps == "none":
            return PlainRenderer(self.tokens, self.tokenizer.decode, task, window)
        asked = TranscriptionTask(knobs=task.knobs, want=task.want, logprobs=task.logprobs, audio=self._audio(task))
        return WindowRenderer(self.tokens, self.tokenizer.decode, asked, window, self.temperatures(task), alone=True)

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token)


def _knobs(task: Task) -> WhisperKnobs:
    assert isinstance(task.knobs, WhisperKnobs)
    return task.knobs


def _translates(task: TranscriptionTask | GenerateTask) -> bool:
    asked = isinstance(task, TranscriptionTask) and task.translate
    return asked or _knobs(task).task == "translate"


def _wants_words(task: TranscriptionTask | GenerateTask) -> bool:
    asked = isinstance(task, TranscriptionTask) and "word" in task.timestamps
    return asked or _knobs(task).timestamps == "word"
