"""Settings: what the environment says, and sentences for what it says wrongly."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mstar.settings import Settings
from mstar.spec.errors import SetupError


def test_defaults() -> None:
    settings = Settings.from_env({})
    assert settings == Settings()
    assert settings.cache == Path.home() / ".cache" / "mstar"
    assert settings.plugins is None
    assert not settings.offline


def test_every_variable_is_read(tmp_path: Path) -> None:
    settings = Settings.from_env(
        {
            "MSTAR_CACHE": str(tmp_path),
            "MSTAR_CONFIG": str(tmp_path / "config"),
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "MSTAR_PLUGINS": "demo, qwen3",
            "MSTAR_BLOCK_PLUGINS": "tts",
            "MSTAR_EXTRA_PLUGINS": "my.module,,other",
            "MSTAR_TRACE_PLUGINS": "1",
            "MSTAR_ACCEPT_LICENCES": "a,b",
            "MSTAR_API_KEY": "secret",
            "MSTAR_MAX_VIDEO_PIXELS": "1000000",
            "MSTAR_LOG_LEVEL": "DEBUG",
            "MSTAR_LOG_FORMAT": "Json",
            "HF_TOKEN": "hf_secret",
            "HF_ENDPOINT": "https://mirror.example/",
            "HF_HUB_OFFLINE": "YES",
        }
    )
    assert settings == Settings(
        cache=tmp_path,
        config=tmp_path / "config",
        hub_cache=tmp_path / "hub",
        plugins=("demo", "qwen3"),
        block_plugins=("tts",),
        extra_plugins=("my.module", "other"),
        trace_plugins=True,
        accept_licences=("a", "b"),
        api_key="secret",
        max_video_pixels=1_000_000,
        log_level="debug",
        log_format="json",
        hub_token="hf_secret",
        hub_endpoint="https://mirror.example",
        offline=True,
    )
    differing = [
        f.name for f in dataclasses.fields(Settings) if getattr(settings, f.name) == getattr(Settings(), f.name)
    ]
    assert differing == [], "a field that no variable sets"


def test_a_relative_cache_does_not_move_with_the_working_folder() -> None:
    assert Settings.from_env({"MSTAR_CACHE": "here"}).cache == Path.cwd() / "here"


def test_the_hubs_cache_lies_where_its_library_has_it(tmp_path: Path) -> None:
    assert Settings.from_env({"HF_HOME": str(tmp_path)}).hub_cache == tmp_path / "hub"
    assert Settings.from_env({}).hub_cache == Path.home() / ".cache" / "huggingface" / "hub"


def test_an_empty_allow_list_allows_nothing() -> None:
    assert Settings.from_env({"MSTAR_PLUGINS": ""}).plugins == ()


def test_secrets_stay_out_of_repr() -> None:
    assert "secret" not in repr(Settings.from_env({"HF_TOKEN": "secret", "MSTAR_API_KEY": "secret"}))


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("HF_HUB_OFFLINE", "maybe", "use 1 or 0"),
        ("MSTAR_LOG_LEVEL", "inof", "did you mean 'info'?"),
        ("MSTAR_LOG_LEVEL", "loud", "known: debug, error, info, warning"),
        ("HF_ENDPOINT", "mirror.example", "must begin with http"),
        ("MSTAR_EXTRA_PLUGINS", "my-module", "not the name of a Python module"),
        ("MSTAR_CACHE", __file__, "is not a folder"),
    ],
)
def test_a_value_that_does_not_parse_names_its_variable(variable: str, value: str, hint: str) -> None:
    with pytest.raises(SetupError, match=variable) as caught:
        Settings.from_env({variable: value})
    assert hint in str(caught.value)
    assert repr(value) in str(caught.value) or variable == "MSTAR_EXTRA_PLUGINS"
