"""One window on its way through a clip: what the next one has to know, in a task's ``carried``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mstar.spec.tasks import Audio, TranscriptionTask
from mstar_asr.whisper.clip import Clip
from mstar_asr.whisper.longform import FRAMES_PER_S, History
from mstar_asr.whisper.request import FRAMES, HOP, RATE

__all__ = ["Window"]


@dataclass(frozen=True, eq=False)
class Window:
    """Times are frames of the clip, 0.01 s each.

    :param seek: where it begins. :param end: where the clip, or the stretch of it that is heard by itself, ends.
    :param history: what was said before. :param language: a code of the checkpoint; ``None``: to be detected.
    :param attempt: how often it was heard before. :param last_word: seconds, when the last word before it ended.
    :param silent: nobody speaks in it, so whatever the model says is no answer.
    """

    clip: Clip
    seek: int
    end: int
    history: History
    language: str | None = None
    attempt: int = 0
    last_word: float = 0.0
    silent: bool = False

    @property
    def frames(self) -> int:
        """Its length."""
        return min(FRAMES, self.end - self.seek)

    @property
    def start_s(self) -> float:
        """Where it begins in :attr:`clip`, in seconds."""
        return self.seek / FRAMES_PER_S

    @property
    def loudest(self) -> float | None:
        """As :func:`~mstar_asr.whisper.request.window_request` takes it."""
        alone = self.seek == 0 and self.clip.frames <= FRAMES
        return None if alone else self.clip.loudest

    def task(self, asked: TranscriptionTask) -> TranscriptionTask:
        """*asked*, of this window."""
        part = self.clip.samples[self.seek * HOP : (self.seek + self.frames) * HOP]
        offset = self.clip.offset + self.start_s
        return replace(asked, audio=Audio(part, RATE), offset=offset, carried=self)

    def again(self, language: str | None) -> Window:
        """The same window, to be heard once more."""
        return replace(self, attempt=self.attempt + 1, language=language)

    def after(
        self, seek: int, *, history: History, language: str | None, last_word: float, skip: bool
    ) -> Window | None:
        """The window from frame *seek* on; ``None`` at the end.

        :param skip: leave out windows in which nobody speaks.
        """
        if skip:
            seek = self.clip.next_speech(seek, self.end)
        if seek >= self.end:
            return None
        return replace(self, seek=seek, history=history, language=language, last_word=last_word, attempt=0)
