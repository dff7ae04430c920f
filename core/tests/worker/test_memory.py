"""The memory plan, with figures that are given to it: who gets what, and what it says when something does not fit. Each
setting that it names is tried: with it the pools can be made."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from mstar.graph.program import Plan
from mstar.nn.node import Node
from mstar.registry import Registry
from mstar.resources.base import Resource, ResourceContext
from mstar.resources.staging import Stage
from mstar.spec.deployment import merge_deployment
from mstar.spec.errors import DeploymentError, SetupError
from mstar.spec.graph import Entry, NodeSpec, Port
from mstar.spec.resources import CrossKV, PagedKV, RecurrentState, ResourceSpec, Sampler
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.miniatures import miniature
from mstar.testing.miniatures.text import Chat
from mstar.worker import build, machine
from mstar.worker.declared import declared_resources

TOKEN = 2 * 64 * 4  # bytes: one layer, one head of 64, keys and values in float32
KV = PagedKV(max_tokens=256)
STATE = RecurrentState(tensors={"x": ((500,), "float32")})  # twice 2000 bytes a slot
CROSS = CrossKV(max_tokens=8)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return miniature_registry()


def plan_of(declared: dict[str, ResourceSpec], sessions: tuple[str, ...] = (), contexts: int = 1) -> Plan:
    names = tuple(f"c{n}" for n in range(contexts))
    return Plan(SimpleNamespace(sessions=sessions), {}, dict.fromkeys(declared, names), {})  # type: ignore[arg-type]


def pools(
    registry: Registry,
    declared: dict[str, ResourceSpec],
    free: int,
    settings: dict[str, Any],
    sessions: tuple[str, ...] = (),
    contexts: int = 1,
    reserve: int = 0,
) -> tuple[dict[str, Resource], str]:
    """The pools of *declared* on the CPU with *free* bytes, and the plan's table."""
    deployment = merge_deployment("fake", {"max_sessions": 0, "max_concurrent_requests": 8}, settings)
    declared, faults = declared_resources(SimpleNamespace(resources=lambda: declared), deployment)  # type: ignore[arg-type]
    assert not faults
    memory = build.memory_plan(
        declared,
        plan_of(declared, sessions, contexts),
        deployment,
        registry,
        Stage("cpu"),
        torch.float32,
        free=free,
        weights_bytes=5_000_000,
        reserve_bytes=reserve,
    )
    make = partial(build.make_resource, registry=registry)
    made = {name: memory.make(name, partial(make, name, declared[name])) for name in memory.order}
    return made, memory.table()


def test_sized_pools_come_first_and_the_others_share_the_rest(registry: Registry) -> None:
    declared = {"a": KV, "state": STATE, "b": PagedKV(tokens=1024, max_tokens=64), "c": KV}
    made, table = pools(registry, declared, 2_000_000, {"engine": {"memory_fraction": 0.5}}, reserve=100_000)
    state, sized = made["state"].device_bytes(), made["b"].device_bytes()
    assert (state, sized) == (9 * 4000, (1024 + 16) * TOKEN)  # a slot and a page more, for padding rows
    shared = (2_000_000 - 100_000 - state - sized) * 0.5
    halves = [made[name].device_bytes() for name in "ac"]
    assert all(shared / 2 - 16 * TOKEN < half <= shared / 2 + 8 * TOKEN for half in halves)
    assert sum(halves) <= shared
    lines = dict(re.findall(r"^  (\S[^0-9]*?) +([\d.]+ \w+)", table, re.MULTILINE))
    assert lines["weights"] == "5.0 MB"
    assert lines["graphs and workspace"] == "100 kB"
    assert set(lines) == {"weights", "state", "b", "a", "c", "graphs and workspace", "free"}
    assert "64 pages, 1,024 tokens" in table
    assert "8 slots" in table


def test_what_a_pool_leaves_of_its_share_goes_to_the_next(registry: Registry) -> None:
    declared = {"small": PagedKV(max_tokens=16), "large": PagedKV(max_tokens=100_000)}
    made, _ = pools(registry, declared, 400_000_000, {"engine": {"memory_fraction": 1.0}})
    small = made["small"].device_bytes()
    assert small == (8 + 1) * 16 * TOKEN
    assert made["large"].device_bytes() == min(
        (8 * 100_000 + 16) * TOKEN, (400_000_000 - small) // (16 * TOKEN) * 16 * TOKEN
    )


@pytest.mark.parametrize(
    ("device", "given", "fraction"), [("cuda", None, 0.9), ("cpu", None, 0.25), ("cuda", 0.4, 0.4), ("cpu", 0.8, 0.8)]
)
def test_the_share_by_device(device: str, given: float | None, fraction: float, registry: Registry) -> None:
    seen: list[ResourceContext] = []

    def make(context: ResourceContext) -> Resource:
        seen.append(context)
        return SimpleNamespace(device_bytes=lambda: 0)  # type: ignore[return-value]

    deployment = merge_deployment("fake", {"engine": {"memory_fraction": given}})
    build.memory_plan(
        {"kv": KV}, plan_of({"kv": KV}), deployment, registry, Stage(device), torch.bfloat16, free=1000
    ).make("kv", make)
    assert [context.memory for context in seen] == [int(1000 * fraction)]


@pytest.mark.parametrize(
    ("device", "runner", "gib"),
    [("cuda", None, 1.5), ("cuda:1", "graphs", 1.5), ("cuda", "eager", 0.25), ("cpu", None, 0), ("cpu", "graphs", 0)],
)
def test_the_reserve_for_what_comes_after_the_pools(device: str, runner: str | None, gib: float) -> None:
    deployment = merge_deployment("fake", {"engine": {"runner": runner}})
    assert machine.reserved_bytes(deployment, torch.device(device)) == gib * 2**30


class Hungry(Node):
    def step_bytes(self, items: int, device: torch.device, dtype: torch.dtype) -> int:
        return items * 10 * dtype.itemsize


@pytest.mark.parametrize(("device", "told", "wanted"), [("cuda", None, 1024), ("cuda", 100, 100), ("cpu", 100, 0)])
def test_what_the_largest_step_of_a_node_needs(device: str, told: int | None, wanted: int) -> None:
    deployment = merge_deployment("fake", {"scheduler": {"max_step_tokens": told}})
    look = Entry(inputs=(Port("patches", "uint8", ("P", 3)),), chunk="patches", step_items=16)

    def need(node: Node, *entries: Entry) -> int:
        return machine.step_bytes(NodeSpec("x", entries), node, deployment, torch.device(device), torch.bfloat16)

    assert need(Hungry(), look, Entry(name="other")) == wanted * 16 * 20
    assert need(Hungry(), Entry()) == 0
    assert need(Node(), look) == 0


def test_a_start_keeps_what_a_step_needs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device: 4_000_000)
    monkeypatch.setattr(build, "step_bytes", lambda *given: 3_000_000)
    with caplog.at_level(logging.INFO, "mstar"):
        driver = Driver(miniature("mini_chat"), resources={"kv": {"tokens": None}}, max_concurrent_requests=4096)
    assert driver.worker.resources["kv"].device_bytes() <= 250_000
    assert re.search(r"graphs and workspace +3\.0 MB +reserved", caplog.text)


def test_a_start_keeps_the_reserve(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device: 4_000_000)
    monkeypatch.setattr(build, "reserved_bytes", lambda deployment, device: 3_000_000)
    with caplog.at_level(logging.INFO, "mstar"):
        driver = Driver(miniature("mini_chat"), resources={"kv": {"tokens": None}}, max_concurrent_requests=4096)
    assert driver.worker.resources["kv"].device_bytes() <= 250_000
    assert re.search(r"graphs and workspace +3\.0 MB +reserved", caplog.text)


def settings_in(message: str) -> list[dict[str, Any]]:
    """The settings that *message* says would fit, as layers of a deployment."""
    _, found, named = message.rpartition("It would fit with ")
    assert found, message
    layers = []
    for line in named.split(", or with "):
        layer: dict[str, Any] = {}
        for part in line.split(" and "):
            path, value = part.split(": ")
            at = layer
            *heads, last = path.split(".")
            for head in heads:
                at = at.setdefault(head, {})
            at[last] = yaml.safe_load(value)
        layers.append(layer)
    return layers


def merged(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(left[key], right[key]) if isinstance(left.get(key), dict) else right[key] for key in right}
    return left | both


@pytest.mark.parametrize(
    ("declared", "free", "given", "named"),
    [
        pytest.param({"kv": KV}, 200_000, {}, {"engine", "resources"}, id="one context is more than the share"),
        pytest.param({"kv": KV}, 100_000, {}, {"resources"}, id="one context is more than all"),
        pytest.param(
            {"kv": KV}, 400_000, {"resources": {"kv": {"tokens": 1024}}}, {"resources"}, id="more tokens than fit"
        ),
        pytest.param(
            {"kv": KV}, 100_000, {"resources": {"kv": {"tokens": 1024}}}, {"resources"}, id="not even one context fits"
        ),
        pytest.param({"state": STATE}, 30_000, {}, {"max_concurrent_requests"}, id="slots"),
        pytest.param({"cross": CROSS}, 30_000, {}, {"max_concurrent_requests"}, id="slots of keys and values"),
        pytest.param(
            {"state": STATE, "cross": CROSS}, 40_000, {}, {"max_concurrent_requests"}, id="the second of two slotted"
        ),
        pytest.param(
            {"state": STATE, "kv": PagedKV(max_tokens=32)},
            115_000,
            {},
            {"engine", "max_concurrent_requests", "resources"},
            id="a pool of slots leaves too little",
        ),
        pytest.param(
            {"state": STATE}, 60_000, {"resources": {"state": {"slots": 20}}}, {"resources"}, id="slots that were asked"
        ),
    ],
)
def test_settings_that_are_named_fit(
    declared: dict[str, ResourceSpec], free: int, given: dict[str, Any], named: set[str], registry: Registry
) -> None:
    with pytest.raises(SetupError) as caught:
        pools(registry, declared, free, given)
    layers = settings_in(str(caught.value))
    assert {key for layer in layers for key in layer} == named
    for layer in layers:
        pools(registry, declared, free, merged(given, layer))


def test_the_largest_setting_is_named(registry: Registry) -> None:
    """One step more does not fit."""
    with pytest.raises(SetupError, match=r"max_concurrent_requests: 6\b"):
        pools(registry, {"state": STATE}, 4000 * 7 + 3999, {})
    with pytest.raises(SetupError, match=r"resources\.kv\.max_tokens: 80\b"):
        pools(registry, {"kv": KV}, TOKEN * 4 * 111, {})
    with pytest.raises(SetupError):
        pools(registry, {"kv": KV}, TOKEN * 4 * 111, {"resources": {"kv": {"max_tokens": 81}}})


def test_pools_that_share_are_told_of_one_by_one_or_all_at_once(registry: Registry) -> None:
    declared: dict[str, ResourceSpec] = {"a": KV, "b": KV}
    with pytest.raises(SetupError) as caught:
        pools(registry, declared, 300_000, {})
    one, both = settings_in(str(caught.value))
    pools(registry, declared, 300_000, both)
    assert list(one["resources"]) == ["a"]
    with pytest.raises(SetupError, match="resource 'b'") as caught:
        pools(registry, declared, 300_000, one)
    for other in settings_in(str(caught.value)):
        pools(registry, declared, 300_000, merged(one, other))


def test_sessions_are_given_up_last(registry: Registry) -> None:
    given = {"max_sessions": 20, "max_concurrent_requests": 2}
    with pytest.raises(SetupError) as caught:
        pools(registry, {"state": STATE}, 4000 * 10, given, sessions=("state",))
    (layer,) = settings_in(str(caught.value))
    assert layer == {"max_concurrent_requests": 2, "max_sessions": 0}
    pools(registry, {"state": STATE}, 4000 * 10, merged(given, layer), sessions=("state",))


def test_several_contexts_a_request(registry: Registry) -> None:
    with pytest.raises(SetupError, match=r"max_concurrent_requests: 3\b"):
        pools(registry, {"state": STATE}, 4000 * 8, {}, contexts=2)
    pools(registry, {"state": STATE}, 4000 * 8, {"max_concurrent_requests": 3}, contexts=2)


def test_the_refusal_has_the_numbers(registry: Registry) -> None:
    declared = {"kv": KV, "sampler": Sampler(vocab=100)}
    with pytest.raises(SetupError) as caught:
        pools(registry, declared, 300_000, {}, reserve=50_000)
    message = str(caught.value)
    assert re.search(
        r"one context of max_tokens=256 needs 16 pages of 16 tokens \(139 kB with the page of padding rows\)", message
    )
    assert re.search(r"memory budget of 62 kB", message)
    assert re.search(r"weights +5\.0 MB", message)
    assert re.search(r"graphs and workspace +50 kB", message)
    assert re.search(r"free +2\d\d kB", message)


def test_where_no_setting_helps_it_says_so(registry: Registry) -> None:
    with pytest.raises(SetupError, match="No single setting makes it fit"):
        pools(registry, {"kv": KV}, 100, {})


@pytest.mark.parametrize("fraction", [0, 1.01, -0.5])
def test_the_fraction_is_a_share(fraction: float) -> None:
    with pytest.raises(DeploymentError, match="memory_fraction"):
        merge_deployment("fake", {"engine": {"memory_fraction": fraction}})


def heavy(build_node: Callable[..., Node]) -> Callable[..., Node]:
    """*build_node*, whose node has 500 parameters and one that is tied."""

    def made(*words: Any) -> Node:
        node = build_node(*words)
        node.weight = node.tied = torch.nn.Parameter(torch.zeros(500))
        return node

    return made


def test_a_start_logs_the_plan(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device: 10**9)
    monkeypatch.setattr(Chat, "build", heavy(Chat.build))
    with caplog.at_level(logging.INFO, "mstar"):
        driver = Driver(miniature("mini_chat"))
    (table,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("memory of cpu")]
    kv = driver.worker.resources["kv"]
    assert f"{kv.capacity():,} pages" in table
    (size,) = re.findall(r"weights +([\d.]+ kB)", table)
    assert size == "2.0 kB"
