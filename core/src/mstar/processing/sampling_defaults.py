"""What a checkpoint says that requests are sampled with, unless they say it themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from mstar.processing.tokenizer import read_json
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.knobs import Knobs, SamplingKnobs, validate_knobs

__all__ = ["checkpoint_defaults", "with_defaults"]

_FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

K = TypeVar("K", bound=Knobs)


def checkpoint_defaults(folder: Path) -> dict[str, Any]:
    """Sampling knobs that *folder*'s ``generation_config.json`` names. ``do_sample: false`` is a temperature of 0;
    where the file does not say, nothing follows (transformers would be greedy, and no chat model is meant to be).

    :raises SetupError: a value that no request could ask for either.
    """
    content = read_json(folder, _FILE)
    found = {name: content[name] for name in _NAMES if content.get(name) is not None}
    if content.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        validate_knobs(SamplingKnobs, found)
    except RequestError as error:
        raise SetupError(f"{folder / _FILE}: {error}") from None
    return found


def with_defaults(knobs: K, defaults: Mapping[str, Any]) -> K:
    """*knobs* with *defaults* for those that the request did not name and the family has."""
    kind = type(knobs).model_fields
    update = {name: value for name, value in defaults.items() if name in kind and name not in knobs.model_fields_set}
    return knobs.model_copy(update=update) if update else knobs
