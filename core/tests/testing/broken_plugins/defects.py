"""Models with one defect each. The key says which; what the suite says of it stands in ``test_broken_plugins.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from mstar.hookspecs import hookimpl
from mstar.spec.knobs import Knobs
from mstar.spec.model import Licence, ModelSpec, WeightsRef
from mstar.testing.miniatures import miniature
from mstar.testing.miniatures.common import VOCAB, MiniKnobs
from mstar.weights.writer import write_safetensors

MODELS, PROCESSORS = "broken_plugins.models:", "broken_plugins.processors:"
SOUND = replace(
    miniature("mini_chat").spec,
    key="sound",
    family="broken",
    abilities=("generate", "chat"),
    examples=None,
    processor=PROCESSORS + "Sound",
    outputs=("text",),
)
STATES = ("leaky_state", "cut_state", "failing_state", "open_state")
WEIGHTS = (WeightsRef("hub", "someone/something", "0123456789abcdef"),)


class Undescribed(MiniKnobs):
    steps: int = Field(4, ge=1, le=9)


class Unbounded(MiniKnobs):
    steps: int = Field(4, description="Steps.")


class Unenforced(MiniKnobs):
    """The schema promises what nothing checks."""

    steps: int = Field(4, description="Steps.", json_schema_extra={"minimum": 1, "maximum": 9})


class BadDefault(MiniKnobs):
    steps: int = Field(40, ge=1, le=9, description="Steps.")


class Greedy(MiniKnobs):
    """More by default than one request may hold."""

    max_tokens: int | None = 300


class Shifted(MiniKnobs):
    shift: int = Field(0, ge=0, le=9, description="Added to every token.")


class Idle(MiniKnobs):
    steps: int = Field(4, ge=1, le=9, description="Steps.")


class Exempt(Shifted):
    may_change_nothing = ("shift",)


class Beams(Knobs):
    beams: int = Field(4, ge=1, le=16, description="Answers that are followed at once.")


class Vague(Knobs):
    beams: int = 4


class Lenient(MiniKnobs):
    model_config = ConfigDict(extra="ignore")


def write_scale(folder: Path) -> None:
    """A checkpoint with the one tensor that ``Scaled`` has."""
    import numpy as np

    write_safetensors(folder / "model.safetensors", {"scale": ("F32", (VOCAB,))}, [np.ones(VOCAB, "<f4").tobytes()])


def write_scale_and_more(folder: Path) -> None:
    """A checkpoint with a tensor that the model has no place for."""
    import numpy as np

    layout = dict.fromkeys(("scale", "shift"), ("F32", (VOCAB,)))
    write_safetensors(folder / "model.safetensors", layout, [np.ones(VOCAB, "<f4").tobytes()] * 2)


def _model(key: str, model: str = "", **changes: Any) -> ModelSpec:
    return replace(SOUND, key=key, **({"model": MODELS + model} if model else {}), **changes)


def _weighted(key: str, model: str = "Scaled", **changes: Any) -> ModelSpec:
    given = {
        "weights": WEIGHTS,
        "licence": Licence("MIT", "https://opensource.org/license/mit"),
        "tiny": "broken_plugins.defects:write_scale",
    }
    return _model(key, model, **{**given, **changes})


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    return [
        SOUND,
        _weighted("sound_weights"),
        # the spec
        _model("no_licence", licence=Licence("")),
        _weighted("no_licence_link", licence=Licence("MIT")),
        _model("no_commerce", licence=Licence("CC-BY-NC-4.0", "https://creativecommons.org", commercial=False)),
        _model("wrong_target", processor=PROCESSORS + "Sund"),
        _weighted("unpinned", weights=(WeightsRef("hub", "someone/something"),)),
        _model("wrong_ability", processor=PROCESSORS + "NoChat"),
        _model("other_id", processor=PROCESSORS + "OtherId"),
        _model("wrong_outputs", outputs=("audio",)),
        # knobs
        _model("undescribed", knobs=Undescribed),
        _model("unbounded", knobs=Unbounded),
        _model("unenforced", knobs=Unenforced),
        _model("bad_default", knobs=BadDefault),
        _model("lenient", knobs=Lenient),
        _model("unread_knob", knobs=Idle),
        _model("default_too_large", knobs=Greedy),
        _model("default_too_long", knobs=Greedy, processor=PROCESSORS + "Short"),
        _model("ignored_knob", "IgnoresKnob", knobs=Shifted),
        _model("exempt_knob", "IgnoresKnob", knobs=Exempt),
        _model("misspelt_param", "MisspeltParam", knobs=Shifted),
        # options
        _model("unread_option", options=Beams),
        _model("vague_option", options=Vague),
        # what cannot be served
        _model("ignores_media", processor=PROCESSORS + "IgnoresMedia"),
        _model("raises_on_bad_input", processor=PROCESSORS + "Raises"),
        _model("names_no_field", processor=PROCESSORS + "NamesNoField"),
        _model("fails_on_no_text", "FailsOnShort", processor=PROCESSORS + "TakesEmpty"),
        # answers
        _model("unmade_output", outputs=("text", "audio")),
        _model("ignores_stop", processor=PROCESSORS + "IgnoresStop"),
        _model("goes_on", processor=PROCESSORS + "GoesOn"),
        _model("refuses_stop", processor=PROCESSORS + "RefusesStop"),
        _model("counts_nothing", processor=PROCESSORS + "CountsNothing"),
        _model("counts_messages", processor=PROCESSORS + "CountsMessages"),
        # graph and deployment
        _model("bad_graph", "BadGraph"),
        _model("fickle_graph", "FickleGraph"),
        _model("bad_deployment", deployment={"max_concurent_requests": 3}),
        _model("bad_layout", layouts={"two": "broken_plugins:two.yaml"}),
        _model("bad_resources", deployment={**SOUND.deployment, "resources": {"kvv": {"tokens": 9}}}),  # type: ignore[dict-item]
        _model("wrong_dtype", "WrongDtype"),
        _model("wrong_shape", "WrongShape"),
        # weights
        _weighted("no_tiny", tiny=None),
        _weighted("unused_tensor", tiny="broken_plugins.defects:write_scale_and_more"),
        _weighted("ignores_all", "IgnoresAll"),
        _weighted("loads_anything", "LoadsAnything"),
        _weighted("lopsided", "Lopsided"),
        _weighted("undivided", "Undivided"),
        # behaviour
        _model("keeps_state", "KeepsState"),
        _model("mixes_rows", "MixesRows"),
        _model("skips_state", "SkipsState"),
        _model("forgets_chunks", "ForgetsChunks"),
        _model("ignores_seed", "Flat", processor=PROCESSORS + "NoSeed"),
        _model("swallows_errors", "SwallowsErrors"),
        _model("first_rows_knob", "FirstRowsKnob", knobs=Shifted),
        _model("mixes_phases", "MixesPhases"),
        _model("asks_for_too_little", "AsksForTooLittle"),
        _model("never_ends", "NeverEnds"),
        _model("leaks", "Leaks"),
        _model("leaks_when_cut", "LeaksWhenCut"),
        _model("leaks_on_error", "LeaksOnError"),
        _model("undeclared_resource", "Undeclared"),
        _model("extra_row", "ExtraRow"),
        _model("silent", "Silent"),
        _model("crashes", "Crashes"),
        _model("breaks_off", processor=PROCESSORS + "Breaks"),
    ]


@hookimpl
def mstar_resources() -> dict[str, str]:
    return {kind: MODELS + "".join(map(str.title, kind.split("_"))) for kind in STATES}
