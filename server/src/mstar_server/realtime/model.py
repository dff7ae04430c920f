"""The model of a session: what it can do, and what a session's settings may therefore be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mstar.spec.errors import RequestError
from mstar_server.openai.text_answers import token_bytes_of
from mstar_server.protocols import Service
from mstar_server.realtime.hearing import check_wish
from mstar_server.realtime.settings import LOGPROBS, SessionSettings
from mstar_server.state import ServerState

__all__ = ["STREAM", "SessionModel"]

STREAM = "audio"
"""The live stream that a client's audio goes to."""


class SessionModel:
    """Knows which of the server's models answers, and which writes down.

    A model with the ability ``realtime`` hears live and answers: its processor prepares a
    :class:`~mstar.spec.tasks.ChatTask` with ``live=("audio",)``, and takes what the client says as
    :class:`~mstar.spec.tasks.Audio` parts on that stream, at the rate that its spec's live input of sound names. One
    with the ability ``transcription`` that can be fed with such a stream writes down live: a
    :class:`~mstar.spec.tasks.TranscriptionTask` without audio. Other models get whole turns: chat models as messages,
    transcription models as clips.

    :param wanted: the model that the socket's address names. Raises :class:`RequestError` if it cannot serve *kind*.
    """

    def __init__(self, state: ServerState, wanted: str | None, kind: str):
        self.state = state
        self.service: Service | None = None
        if wanted is None and len(state.services) != 1:
            if kind != "transcription":
                state.find(None)  # says that a model is needed
            return
        found = state.find(wanted)
        abilities = found.spec.abilities
        able = ("realtime", "transcription") if kind == "transcription" else ("realtime", "chat", "transcription")
        ability = next((name for name in able if name in abilities), "realtime")
        self.service = state.ready(found.spec.key, ability)

    @property
    def name(self) -> str | None:
        return None if self.service is None else self.service.spec.key

    def _can(self, ability: str) -> bool:
        return self.service is not None and ability in self.service.spec.abilities

    def listener(self, settings: SessionSettings) -> Service | None:
        """The model that hears while the client speaks, if one does: the session's, or the one that writes down."""
        if settings.kind == "transcription":
            writer = self.writer(settings)
            return writer if writer is not None and _writes_live(writer) else None
        return self.service if self._can("realtime") else None

    @property
    def hears(self) -> bool:
        """Whether a turn's audio can be shown to the chat model itself."""
        return self.service is not None and "audio" in self.service.spec.inputs

    def writer(self, settings: SessionSettings) -> Service | None:
        """The model that writes down what the client says, if somebody is to do that."""
        wish = settings.transcription
        if wish is not None and wish.model is not None:
            return self.state.ready(wish.model, "transcription")
        if self.service is not None and self._can("transcription"):
            return self.service if wish is not None or settings.kind == "transcription" else None
        return None

    def check_hears(self, settings: SessionSettings) -> None:
        """Raises :class:`RequestError` where audio would be of no use."""
        if self.listener(settings) is not None or self.writer(settings) is not None:
            return
        where = "session.audio.input.transcription.model"
        if settings.kind == "transcription":
            message = f"no model writes down what is said: name one in {where!r}"
        elif not self.hears:
            message = f"the model {self.name!r} takes no audio: name a model that writes it down in {where!r}"
        else:
            return
        raise RequestError(message, param=where, code="missing_required_parameter")

    async def check_included(self, settings: SessionSettings) -> None:
        """Raises :class:`RequestError` where the model that writes down knows no log-probabilities and the client wants
        some. One that is loaded on demand is loaded for it."""
        writer = self.writer(settings) if settings.logprobs else None
        if writer is None:
            return
        try:
            token_bytes_of(await self.state.processor(writer))
        except RequestError as error:
            if error.code == "unsupported_parameter":
                error.param = "session.include"
                error.message = (
                    f"'session.include': {writer.spec.key!r} gives no log-probabilities: leave {LOGPROBS!r} out"
                )
            raise

    async def check_wish(self, settings: SessionSettings) -> None:
        """Raises :class:`RequestError` for a language or a prompt that the model which writes down would refuse in
        every turn."""
        wish, writer = settings.transcription, self.writer(settings)
        if wish is not None and writer is not None and (wish.language or wish.prompt):
            await check_wish(self.state, writer, wish, "session.audio.input.transcription")

    def defaults(self, settings: SessionSettings) -> SessionSettings:
        """*settings* as this model's sessions begin. One that can only write down is not asked for answers."""
        if self.service is None:
            return settings
        if not self._can("realtime") and not self._can("chat"):
            settings = replace(settings, kind="transcription")
        speaks = "audio" in self.service.spec.outputs
        return replace(settings, modalities=("audio",) if speaks else ("text",))

    def changed(self, old: SessionSettings, new: SessionSettings, asked: Any) -> SessionSettings:
        """*new*, if this model can do it. *asked*: the model that a client's update names."""
        if asked is not None and asked != self.name:
            if self.service is not None or new.kind != "transcription":
                message = f"'session.model': the session has {self.name!r}; open another one for {str(asked)[:80]!r}"
                raise RequestError(message, param="session.model", code="cannot_update_model")
            self.service = self.state.ready(str(asked), "transcription")
        if new.kind == "realtime" and not self._can("realtime") and not self._can("chat"):
            text = f"'session.type': the model {self.name!r} only writes down what is said: use 'transcription'"
            raise RequestError(text, param="session.type", code="unsupported_parameter")
        service = self.service
        if new.kind == "realtime" and "audio" in new.modalities and service and "audio" not in service.spec.outputs:
            if new.modalities != ("text", "audio"):  # the beta's default, which asks for audio where there is some
                text = f"the model {self.name!r} does not speak: ask for 'text'"
                raise RequestError(text, param="session.output_modalities", code="unsupported_modality")
            new = replace(new, modalities=("text",))
        if new.transcription != old.transcription:
            self.writer(new)  # raises for a model that cannot
            wish = new.transcription
            if wish is not None and wish.model is None and not self._can("transcription"):
                where = "session.audio.input.transcription.model"
                raise RequestError(f"{where!r} is required", param=where, code="missing_required_parameter")
        return new


def _writes_live(service: Service) -> bool:
    spec = service.spec
    return "realtime" in spec.abilities or any(fed.name == STREAM and fed.modality == "audio" for fed in spec.live)
