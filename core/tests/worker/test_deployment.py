"""A deployment that a worker cannot serve is refused with a sentence that names the key."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mstar.registry import Registry
from mstar.spec.deployment import Deployment, merge_deployment
from mstar.spec.errors import SetupError
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.miniatures import miniature


@pytest.fixture(scope="module")
def registry() -> Registry:
    return miniature_registry()


def test_a_steps_tokens_follow_the_device_unless_they_are_said(registry: Registry) -> None:
    """What nobody has said is decided where the device is known: behind the way to the worker's process."""
    for said, cpu, gpu in ((None, 512, 1024), (77, 77, 77)):
        deployment = merge_deployment("mini_chat", {"scheduler": {"max_step_tokens": said}})
        there = Deployment.model_validate(deployment.model_dump(mode="json")).scheduler
        assert there.max_step_tokens == said
        assert (there.step_tokens("cpu"), there.step_tokens("cuda")) == (cpu, gpu)
        driver = Driver(miniature("mini_chat"), registry, scheduler={"max_step_tokens": said})
        assert driver.worker.scheduler.options.max_step_tokens == cpu  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("later", "ranks"),
    [
        ({"prefill": 1, "decode": 0}, {1, 0}),  # a place for each walk, which a mesh cannot be beside
        ({"walks": {"prefill": 1, "decode": 0}}, {1, 0}),
        ({"tp": 2}, {0, 1, 2, 3}),
        ({"ranks": [0, 1], "tp": 2}, {0, 1}),
        (0, {0}),
        ({}, {0, 1, 2, 3}),
        (None, {0, 1, 2, 3}),
    ],
)
def test_a_place_in_another_form_stands_instead_of_the_layout_s(later: Any, ranks: set[int]) -> None:
    layout = {"placement": {"llm": {"ranks": [0, 1, 2, 3], "tp": 4}, "encoder": 0}}
    placement = merge_deployment("mini_chat", layout, {"placement": {"llm": later}}).placement
    assert {rank for seat in placement["llm"].seats for rank in seat.ranks} == ranks
    assert placement["encoder"].ranks == (0,)


@pytest.mark.parametrize(
    ("later", "places"),
    [
        ({"prefill": 2}, {"prefill": (2,), "decode": (0,)}),
        ({}, {"prefill": (1,), "decode": (0,)}),
        (None, {"prefill": (1,), "decode": (0,)}),
        ({"ranks": [0, 1], "tp": 2}, {}),
    ],
)
def test_places_for_walks_are_merged_and_a_mesh_stands_instead_of_them(later: Any, places: dict[str, Any]) -> None:
    layout = {"placement": {"llm": {"prefill": 1, "decode": 0}}}
    place = merge_deployment("mini_chat", layout, {"placement": {"llm": later}}).placement["llm"]
    assert {walk: where.ranks for walk, where in place.walks.items()} == places


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"placement": {"llm": {"ranks": 1, "tp": 2}}}, r"placement\.llm\.ranks: this must be a list \(got 1\)"),
        ({"placement": ["llm"]}, r"placement: this must be a mapping \(key: value\) \(got \['llm'\]\)"),
        ({"engine": 3}, r"engine: this must be a mapping \(key: value\) \(got 3\)"),
        ({"rank_devices": 0}, r"rank_devices: this must be a list \(got 0\)"),
    ],
)
def test_a_key_of_another_kind_is_refused_in_the_file_s_words(values: dict[str, Any], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        merge_deployment("mini_chat", values)


@pytest.mark.parametrize(
    ("kv", "said"),
    [
        ({"token": 5}, r"kv\.token: unknown key; did you mean 'tokens'"),
        ({"tokens": "1e9"}, r"kv\.tokens: .*integer"),  # YAML reads 1e9 as a string
        ({"tokens": "x"}, r"kv\.tokens: .*integer"),
        ({"tokens": -1}, r"kv\.tokens: must be at least 0"),
        ({"tokens": 0}, "the pool holds 0 pages"),
        ({"page_size": 0}, r"kv\.page_size: must be at least 1"),
        ({"prefix_cache": "perhaps"}, r"kv\.prefix_cache: .*boolean"),
        ({"tokens": 10**15}, "memory"),
    ],
)
def test_overrides_of_a_resource_are_typed(registry: Registry, kv: dict[str, Any], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        Driver(miniature("mini_chat"), registry, resources={"kv": kv})


@pytest.mark.parametrize(
    "layer",
    [
        {"session_ttl_s": math.inf},
        {"request_timeout_s": math.inf},
        {"engine": {"idle_check_s": math.inf}},
        {"engine": {"threads": 10**20}},
    ],
)
def test_numbers_without_a_bound_are_refused(layer: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match=r"finite|1024"):
        merge_deployment("mini_chat", layer)
