"""What is read of a Qwen3-TTS checkpoint's configuration, and which is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mstar.spec.errors import SetupError
from mstar_tts.qwen3_tts.config import SamplingDefaults, TTSConfig
from mstar_tts.qwen3_tts.tiny import write_qwen3_tts_1p7b


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("published")
    write_qwen3_tts_1p7b(folder)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def changed(folder: Path, config: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> Path:
    copy = json.loads(json.dumps(config))
    change(copy)
    (folder / "config.json").write_text(json.dumps(copy))
    return folder


def test_names_and_ids_are_the_checkpoints(tmp_path: Path, published: dict[str, Any]) -> None:
    config = TTSConfig.read(changed(tmp_path, published, lambda config: None))
    assert (config.variant, config.groups, config.instructable) == ("custom_voice", 16, True)
    assert config.speakers == published["talker_config"]["spk_id"]
    assert config.dialects == {"dylan": "beijing_dialect"}
    assert config.spoken == ("chinese", "english", "german")
    assert config.codec.eos == published["talker_config"]["codec_eos_token_id"]
    small = TTSConfig.read(changed(tmp_path, published, lambda config: config.update(tts_model_size="0b6")))
    assert not small.instructable


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(tts_model_type="custom_voic"), "custom_voice"),
        (lambda c: c.update(model_type="llama"), "no Qwen3-TTS"),
        (lambda c: c.update(tokenizer_type="qwen3_tts_tokenizer_25hz"), "12hz"),
        (lambda c: c.pop("talker_config"), "talker_config is missing"),
        (lambda c: c["talker_config"].pop("codec_think_bos_id"), "talker_config.codec_think_bos_id"),
        (lambda c: c["talker_config"].update(use_sliding_window=True), "use_sliding_window"),
        (lambda c: c["talker_config"].update(rope_scaling={"rope_type": "yarn"}), "yarn"),
        (lambda c: c["talker_config"].update(hidden_act="relu"), "silu"),
        (lambda c: c["talker_config"].update(vocab_size=1024), "leaves no codes"),
        (lambda c: c["talker_config"].update(spk_id={}), "no speaker"),
        (lambda c: c["talker_config"].update(spk_is_dialect={"dylan": "beijing"}), "beijing_dialect"),
        (lambda c: c["talker_config"]["code_predictor_config"].update(num_code_groups=8), "disagree"),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, published: dict[str, Any], change: Callable[[dict[str, Any]], object], words: str
) -> None:
    with pytest.raises(SetupError, match=words):
        TTSConfig.read(changed(tmp_path, published, change))


def test_weights_of_another_kind_are_named(tmp_path: Path, published: dict[str, Any]) -> None:
    config = TTSConfig.read(changed(tmp_path, published, lambda config: None))
    config.require("custom_voice")
    with pytest.raises(SetupError, match="serve them as qwen3_tts or qwen3_tts_1p7b"):
        config.require("base")


def test_sampling_defaults_are_the_checkpoints(tmp_path: Path) -> None:
    assert SamplingDefaults.read(tmp_path) == SamplingDefaults()
    (tmp_path / "generation_config.json").write_text('{"temperature": 1, "subtalker_top_k": 5, "eos_token_id": 3}')
    assert SamplingDefaults.read(tmp_path) == SamplingDefaults(temperature=1.0, subtalker_top_k=5)
    (tmp_path / "generation_config.json").write_text('{"do_sample": "yes"}')
    with pytest.raises(SetupError, match="do_sample"):
        SamplingDefaults.read(tmp_path)
