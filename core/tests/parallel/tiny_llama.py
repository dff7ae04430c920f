"""Tiny Llamas in the published layout, and what a rank says of one: importable in the ranks' processes too."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mstar.nn.linear import RowLinear, VocabEmbedding
from mstar.nn.mesh import SINGLE, Group, Mesh, World, building
from mstar.nn.model import BuildContext, Model
from mstar.registry import RegisteredModel, Registry
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.examples import Example

TEXTS = ("hello, ranks", "a", "the sum of all heads is what one rank says. " * 2)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 67,  # which no number of ranks divides
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
VARIANTS: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 4},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 1},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
    },
}


def registry(model: str, key: str = "tiny") -> Registry:
    """One with a model whose worker side is *model*, ``"module:Class"``; its tokens are characters."""
    found = miniature_registry()
    spec = replace(found.model("mini_chat"), key=key, model=model)
    found.models[key] = RegisteredModel(spec, found.models["mini_chat"].plugin)
    return found


def write(folder: Path, config: Mapping[str, Any], model: type[Model]) -> Path:
    """A random checkpoint of *model*, under its published names, as *config* has it."""
    (folder / "config.json").write_text(json.dumps(dict(config)))
    built = model(BuildContext(folder, torch.float32, torch.device("cpu")))
    tensors: dict[str, Tensor] = {}
    draw = torch.Generator().manual_seed(3)
    with building(SINGLE):
        for node in built.graph().nodes:
            with torch.device("meta"):
                module = built.build(node.name)
            targets = dict(module.named_parameters(remove_duplicate=False))
            for place in built.weights(node.name).placements:
                target = targets[place.target]
                shape = target.shape if place.rows is None else (place.rows, *target.shape[1:])
                mean = 1.0 if place.published.endswith("norm.weight") else 0.0
                tensors[place.published] = torch.randn(shape, generator=draw) * 0.3 + mean
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass
class Answer:
    """What a rank says. *sums*: how often it added something up with others in a step;
    *pools*: bytes of each; *capacities*: their units."""

    tokens: list[list[int]]
    sums: int = 0
    pools: dict[str, int] = field(default_factory=dict)
    capacities: dict[str, int] = field(default_factory=dict)


class Counted:
    """Counts a group's sums."""

    def __init__(self, group: Group):
        self.count, self._sum = 0, group.all_reduce
        group.all_reduce = self  # type: ignore[method-assign,assignment]

    def __call__(self, x: Tensor) -> Tensor:
        self.count += 1
        return self._sum(x)  # type: ignore[no-any-return]


def answer(
    world: World | None,
    model: str,
    folder: Path,
    without: str | None = None,
    texts: tuple[str, ...] = TEXTS,
    knobs: Mapping[str, Any] | None = None,
) -> Answer:
    """What *model* writes after each of *texts*, which it reads at once, as one of the ranks of its node.

    :param without: names of modules that contain it do not add their ranks' parts up.
    """
    mesh = SINGLE if world is None else everybody(world)
    driver = Driver("tiny", registry(model), folder, {"llm": mesh})
    (node,) = driver.worker.engine.nodes.values()
    if without is not None:
        break_sums(node, without)
    sums = Counted(mesh.tp) if mesh.size > 1 else None
    given = {"max_tokens": 12, "temperature": 0.0, **(knobs or {})}
    for number, text in enumerate(texts):
        driver.submit(str(number), Example(text, knobs=given))
    driver.run()
    tokens = [driver.result(str(number))["text"] for number in range(len(texts))]
    driver.assert_empty()
    last = 0
    if sums is not None:  # one step more, to count its sums
        sums.count, steps = 0, driver.worker.engine.steps
        driver.submit("more", Example("one", knobs={"max_tokens": 2}))
        driver.run()
        last = sums.count // (driver.worker.engine.steps - steps)
        del mesh.tp.all_reduce  # type: ignore[misc]
    pools = {name: resource.device_bytes() for name, resource in driver.worker.resources.items()}
    capacities = {name: resource.capacity() for name, resource in driver.worker.resources.items()}
    return Answer(tokens, last, pools, capacities)


def everybody(world: World) -> Mesh:
    """All ranks as one tp group."""
    size = torch.distributed.get_world_size()
    mesh = world.mesh(range(size), tp=size)
    assert mesh is not None
    return mesh


def break_sums(node: nn.Module, name: str) -> None:
    """Modules of *node* whose names contain *name* forget the other ranks."""
    found = Counter[str]()
    for path, module in node.named_modules():
        if name in path and isinstance(module, RowLinear | VocabEmbedding):
            module.tp = _Deaf(module.tp.rank, module.tp.size)
            found[name] += 1
    assert found[name], f"no sum in a module called {name}"


class _Deaf(Group):
    def all_reduce(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x
