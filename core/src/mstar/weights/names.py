"""Which published tensor fills which rows of which parameter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from mstar.nn.shards import Cut, Part

__all__ = ["Placement", "WeightMap"]


@dataclass(frozen=True)
class Placement:
    """Published tensor *published* fills *rows* rows of parameter (or persistent buffer) *target* from *start* on.

    ``rows=None``: the tensor is the whole parameter. *cut*: the part of the tensor that this rank has; ``None``: all.
    """

    published: str
    target: str
    start: int = 0
    rows: int | None = None
    cut: Cut | None = None


@dataclass(frozen=True)
class WeightMap:
    """A node's weights by name: every parameter, and every tensor of the checkpoint, must occur (promise P11).

    :param zeros: (target, start, rows) of what is 0 and not published: the bias of a fused layer's part that has none.
    :param ignore: regular expressions (whole names) of published tensors that the node does not need.
    :param float32: regular expressions (whole names) of parameters that stay float32 whatever the model's dtype.
    :param folder: where the node's checkpoint lies below the weights' folder, for repositories that have a folder for
        each part of the model (``transformer``, ``vae``). An absolute path stands for itself: weights that are not the
        model's own.
    """

    placements: tuple[Placement, ...]
    ignore: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()
    zeros: tuple[tuple[str, int, int], ...] = ()
    folder: str = ""

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        rename: Mapping[str, str] | None = None,
        ignore: tuple[str, ...] = (),
        float32: tuple[str, ...] = (),
        folder: str = "",
    ) -> WeightMap:
        """The map of a module whose submodules bear the published names; fused layers know their parts, divided ones
        their share.

        :param rename: the module's prefix → the published one, for trees published elsewhere; the longest match wins.
            The names of tied parameters after the first are ignored in the checkpoint, and those of other ranks.
        """
        seen: set[int] = set()
        placements: list[Placement] = []
        aliases: list[str] = []
        zeros: list[tuple[str, int, int]] = []
        prefixes = sorted((rename or {}).items(), key=lambda item: -len(item[0]))
        for path, owner in module.named_modules():
            for name, tensor in _persistent(owner):
                target = f"{path}.{name}" if path else name
                if id(tensor) in seen:
                    aliases.append(re.escape(_published(target, prefixes)))
                    continue
                seen.add(id(tensor))
                for part in _parts(owner, name):
                    if part.module is not None and part.rows == 0:
                        aliases.append(re.escape(_published(_named(path, part.module, name), prefixes)))
                    elif part.module is not None:
                        published = _published(_named(path, part.module, name), prefixes)
                        placements.append(Placement(published, target, part.start, part.rows, part.cut))
                    elif part.rows is not None:
                        zeros.append((target, part.start, part.rows))
        return cls(tuple(placements), (*ignore, *aliases), float32, tuple(zeros), folder)

    @classmethod
    def of_node(
        cls, module: nn.Module, node: str, prefixes: Mapping[str, str], ignore: tuple[str, ...] = ()
    ) -> WeightMap:
        """The map of *node*'s module where several nodes share a checkpoint, each under a prefix of its own.

        :param prefixes: node → the published prefix (``"model.decoder."``). Tensors under another node's prefix are
            left to that node; one under no prefix at all stays a fault.
        """
        others = tuple(re.escape(prefix) + ".*" for name, prefix in prefixes.items() if name != node)
        return cls.from_module(module, rename={"": prefixes[node]}, ignore=(*ignore, *others))

    def ignores(self, published: str) -> bool:
        return any(re.fullmatch(pattern, published) for pattern in self.ignore)

    def keeps_float32(self, target: str) -> bool:
        return any(re.fullmatch(pattern, target) for pattern in self.float32)


def _persistent(module: nn.Module) -> Iterator[tuple[str, object]]:
    yield from module.named_parameters(recurse=False)
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _parts(owner: nn.Module, name: str) -> Iterator[Part]:
    """The published tensors that make up one parameter of *owner*, whose ``published_parts`` tells, if it has one."""
    told = getattr(owner, "published_parts", None)
    if told is None:
        yield Part("")
    else:
        yield from told(name)


def _named(path: str, module: str, name: str) -> str:
    """The name under the module's own tree of parameter *name* of *path*, or of its sibling *module*."""
    where = ".".join(word for word in (path.rpartition(".")[0], module) if word) if module else path
    return f"{where}.{name}" if where else name


def _published(name: str, prefixes: list[tuple[str, str]]) -> str:
    for own, published in prefixes:
        if name.startswith(own):
            return published + name[len(own) :]
    return name
