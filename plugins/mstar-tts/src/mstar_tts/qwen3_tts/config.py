"""Sizes, ids and names of a Qwen3-TTS checkpoint, from its ``config.json`` and ``generation_config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mstar.nn.config import DecoderConfig, read_config
from mstar.processing.tokenizer import read_json
from mstar.spec.errors import SetupError, nearest

__all__ = ["CodecIds", "SamplingDefaults", "TTSConfig", "Variant"]

Variant = Literal["custom_voice", "voice_design", "base"]
_SPECIAL = 1024
"""How many of the talker's ids, the last ones, are no codes."""
_VARIANTS = ("custom_voice", "voice_design", "base")
_KEYS = {
    "custom_voice": "qwen3_tts or qwen3_tts_1p7b",
    "voice_design": "qwen3_tts_voicedesign",
    "base": "qwen3_tts_base",
}


@dataclass(frozen=True)
class CodecIds:
    """Ids of the talker's own vocabulary beside the codec's codes."""

    pad: int
    bos: int
    eos: int
    think: int
    nothink: int
    think_bos: int
    think_eos: int

    @classmethod
    def read(cls, talker: Mapping[str, Any]) -> CodecIds:
        names = ("pad", "bos", "eos_token", "think", "nothink", "think_bos", "think_eos")
        return cls(*(_whole(talker, f"codec_{name}_id", "talker_config.") for name in names))


@dataclass(frozen=True)
class SamplingDefaults:
    """What a request that says nothing samples with: ``generation_config.json``, else the reference's own values."""

    do_sample: bool = True
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    subtalker_dosample: bool = True
    subtalker_temperature: float = 0.9
    subtalker_top_k: int = 50
    subtalker_top_p: float = 1.0
    max_new_tokens: int = 2048

    @classmethod
    def read(cls, folder: Path | None) -> SamplingDefaults:
        given = {} if folder is None else read_json(folder, "generation_config.json")
        known = cls()
        values = {name: given[name] for name in vars(known) if given.get(name) is not None}
        for name, value in values.items():
            kind = type(getattr(known, name))
            if isinstance(value, bool) != (kind is bool) or not isinstance(value, int | float):
                raise SetupError(f"generation_config.json: {name} is {value!r}; it must be a {kind.__name__}")
            values[name] = kind(value)
        return replace(known, **values)


@dataclass(frozen=True)
class TTSConfig:
    """One checkpoint.

    :param talker: its decoder; ``vocab`` is that of group 0. :param predictor: the code predictor's; ``vocab`` is that
        of each other group. :param groups: codes of a frame.
    :param text_vocab: and *text_hidden*: of the embedding of texts, which is projected to the talker's width.
    :param speakers: name → id, lower case. :param dialects: speaker → the language that goes with it.
    :param languages: name → id, lower case, dialects included.
    """

    variant: Variant
    talker: DecoderConfig
    predictor: DecoderConfig
    groups: int
    text_vocab: int
    text_hidden: int
    codec: CodecIds
    tts_pad: int
    tts_bos: int
    tts_eos: int
    speakers: Mapping[str, int]
    dialects: Mapping[str, str]
    languages: Mapping[str, int]
    instructable: bool

    @classmethod
    def read(cls, folder: Path | None) -> TTSConfig:
        """From ``config.json`` in *folder*. Raises :class:`SetupError` for what these modules do not compute."""
        config = read_config(folder)
        variant = config.get("tts_model_type")
        if config.get("model_type") != "qwen3_tts" or variant not in _VARIANTS:
            raise SetupError(
                f"config.json: model_type {config.get('model_type')!r} with tts_model_type {variant!r} is no Qwen3-TTS"
                f"{nearest(str(variant), _VARIANTS)}"
            )
        if config.get("tokenizer_type") not in (None, "qwen3_tts_tokenizer_12hz"):
            raise SetupError(
                f"config.json: tokenizer_type {config['tokenizer_type']!r} is not supported; "
                "only 'qwen3_tts_tokenizer_12hz' is"
            )
        talker = _section(config, "talker_config")
        predictor = _section(talker, "code_predictor_config", "talker_config.")
        groups = _whole(talker, "num_code_groups", "talker_config.")
        if _whole(predictor, "num_code_groups", "code_predictor_config.") != groups:
            raise SetupError("config.json: talker and code predictor disagree about num_code_groups")
        dialects = {
            str(name).lower(): spoken for name, spoken in (talker.get("spk_is_dialect") or {}).items() if spoken
        }
        found = cls(
            variant=variant,
            talker=_decoder(talker),
            predictor=_decoder(predictor),
            groups=groups,
            text_vocab=_whole(talker, "text_vocab_size", "talker_config."),
            text_hidden=_whole(talker, "text_hidden_size", "talker_config."),
            codec=CodecIds.read(talker),
            tts_pad=_whole(config, "tts_pad_token_id"),
            tts_bos=_whole(config, "tts_bos_token_id"),
            tts_eos=_whole(config, "tts_eos_token_id"),
            speakers=_ids(talker, "spk_id"),
            dialects=dialects,
            languages=_ids(talker, "codec_language_id"),
            # the reference leaves a style instruction to the small model out without a word
            instructable=variant != "base" and str(config.get("tts_model_size")) not in "0b6",
        )
        found._check()
        return found

    def require(self, key: str, wanted: Variant) -> None:
        """Raises :class:`SetupError` unless these weights are what *key* serves."""
        if self.variant != wanted:
            raise SetupError(
                f"{key!r} serves weights whose tts_model_type is {wanted!r}; these are {self.variant!r}: serve them as "
                f"{_KEYS[self.variant]}"
            )

    @property
    def suppressed(self) -> range:
        """Ids of the talker that no code has; but for the end they are never generated."""
        return range(self.talker.vocab - _SPECIAL, self.talker.vocab)

    @property
    def spoken(self) -> tuple[str, ...]:
        """Languages that a request may name."""
        return tuple(name for name in self.languages if "dialect" not in name)

    def _check(self) -> None:
        if self.talker.activation != "silu":
            raise SetupError(f"config.json: hidden_act {self.talker.activation!r} is not supported; only 'silu' is")
        if self.talker.vocab - _SPECIAL < 1:
            raise SetupError(
                f"config.json: talker_config.vocab_size {self.talker.vocab} leaves no codes: the last {_SPECIAL} ids "
                "are not codes"
            )
        for name, dialect in self.dialects.items():
            if dialect not in self.languages:
                raise SetupError(
                    f"config.json: speaker {name!r} speaks {dialect!r}, which codec_language_id lacks"
                    f"{nearest(dialect, self.languages)}"
                )
        if self.variant == "custom_voice" and not self.speakers:
            raise SetupError("config.json: talker_config.spk_id names no speaker")


def _decoder(config: Mapping[str, Any]) -> DecoderConfig:
    """Both decoders are Qwen3's. Their positions have three axes in the talker, which are equal for texts and codes, so
    plain rotary positions are the same."""
    if config.get("use_sliding_window"):
        raise SetupError("config.json: use_sliding_window is set, which no Qwen3-TTS has had so far")
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "mrope"):
        raise SetupError(f"config.json: rope_type {kind!r} is not supported; only 'default' is")
    return DecoderConfig.from_hf({**config, "model_type": "qwen3", "rope_scaling": None, "rope_parameters": None})


def _section(config: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
    found = config.get(name)
    if not isinstance(found, Mapping):
        raise SetupError(f"config.json: {where}{name} is missing")
    return found


def _whole(config: Mapping[str, Any], name: str, where: str = "") -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SetupError(f"config.json: {where}{name} is {value!r}; it must be a whole number")
    return value


def _ids(talker: Mapping[str, Any], name: str) -> dict[str, int]:
    return {str(word).lower(): int(number) for word, number in (talker.get(name) or {}).items()}
