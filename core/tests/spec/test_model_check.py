from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mstar.spec.knobs import Knobs
from mstar.spec.model import Licence, LiveInput, ModelSpec, WeightsRef
from mstar.spec.model_check import spec_faults

SOUND = ModelSpec(
    key="owl", family="owl", summary="An owl – small.", weights=(WeightsRef("hub", "owls/owl", "v1"),),
    licence=Licence("Apache-2.0"), model="owls:Model", processor="owls:Processor", knobs=Knobs,
    live=(LiveInput("ears", "audio", rate=16000),),
)  # fmt: skip


def test_a_sound_spec() -> None:
    assert list(spec_faults(SOUND)) == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("key", "", "must be a text, not str ''"),
        ("key", 3, "must be a text, not int 3"),
        ("key", "owl\n", "space around it"),
        ("key", "o\x1bwl", "cannot be printed"),
        ("key", "o\udc80wl", "cannot be printed"),
        ("key", "--help", "begins with -"),
        ("family", None, "must be a text"),
        ("summary", "An owl.\nTwo.", "cannot be printed"),
        ("model", "owls.Model", "must be 'module:name', not str 'owls.Model'"),
        ("processor", object, "must be 'module:name'"),
        ("tiny", "write", "must be 'module:name' or None"),
        ("examples", 1, "must be 'module:name' or None"),
        ("knobs", Knobs(), "must be a subclass of mstar.spec.knobs.Knobs"),
        ("knobs", dict, "must be a subclass of"),
        ("options", None, "must be a subclass of"),
        ("abilities", "chat", "must be a tuple of words, not str 'chat'"),
        ("abilities", ("chta",), "'chta' is none; did you mean 'chat'?"),
        ("inputs", ["text"], "must be a tuple of words"),
        ("outputs", ("",), "must be a tuple of words"),
        ("deployment", None, "must be a mapping or 'package:file.yaml'"),
        ("live", ("audio",), "must be a tuple of LiveInput, not tuple ('audio',)"),
        ("live[0].name", "", "must be a text"),
        ("live[0].modality", None, "must be a text"),
        ("live[0].shape", [3], "must be a tuple of sizes"),
        ("live[0].shape", (0,), "must be a tuple of sizes"),
        ("live[0].rate", 0, "must be items a second or None"),
        ("live[0].rate", float("nan"), "must be items a second or None"),
        ("live[0].labels", "abc", "must be a tuple of words"),
        ("size", "1 GB", "must be a number of bytes or None"),
        ("size", True, "must be a number of bytes or None"),
        ("licence", "MIT", "must be a Licence, not str 'MIT'"),
        ("licence.name", b"MIT", "must be a text"),
        ("licence.url", None, "must be a text"),
        ("licence.permissive", "no", "must be True or False"),
        ("weights", None, "must be a tuple of WeightsRef"),
        ("weights", ("owls/owl",), "must be a tuple of WeightsRef"),
        ("weights[0].id", "", "must be a text"),
        ("weights[0].revision", 1, "must be a text"),
        ("weights[0].options", [], "must be a mapping"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any, said: str) -> None:
    whole, _, part = field.partition(".")
    if whole == "licence" and part:
        spec = dataclasses.replace(SOUND, licence=dataclasses.replace(SOUND.licence, **{part: value}))
    elif whole == "live[0]":
        spec = dataclasses.replace(SOUND, live=(dataclasses.replace(SOUND.live[0], **{part: value}),))
    elif part:
        spec = dataclasses.replace(SOUND, weights=(dataclasses.replace(SOUND.weights[0], **{part: value}),))
    else:
        spec = dataclasses.replace(SOUND, **{whole: value})
    ((name, fault),) = spec_faults(spec)
    assert name == field
    assert said in fault
