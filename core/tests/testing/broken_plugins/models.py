"""Worker sides with one defect each; the first two are sound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mstar.nn.mesh import current_mesh
from mstar.nn.model import Demand
from mstar.nn.node import Node, Step
from mstar.nn.shards import Cut, Division, Part, Share
from mstar.resources.base import Owner, Row
from mstar.resources.recurrent import RecurrentStateResource
from mstar.spec.graph import Call, Graph, Loop, NodeSpec, Param, Port, WhenTrue
from mstar.spec.request import EngineRequest
from mstar.spec.resources import RecurrentState, ResourceSpec
from mstar.testing.miniatures.catalog import VOCAB
from mstar.testing.miniatures.text import LM_CALL, Chat, Hybrid, SumNode, context_sums, generate, token_logits
from mstar.weights.checkpoint import Checkpoint
from mstar.weights.names import WeightMap


class _Scaled(Node):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(VOCAB))

    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        token = (context_sums(step, ids) + 1) % VOCAB
        return {"token": step["sampler"].sample(token_logits(token[step.last]) * self.scale)}


class Scaled(Chat):
    """A sound model with weights."""

    def build(self, node: str) -> Node:
        return _Scaled()

    def weights(self, node: str) -> Any:
        with torch.device("meta"):
            return WeightMap.from_module(self.build(node))


class IgnoresAll(Scaled):
    """Shuts its eyes to tensors that it does not know."""

    def weights(self, node: str) -> Any:
        with torch.device("meta"):
            return WeightMap.from_module(self.build(node), ignore=(".*",))


class LoadsAnything(Scaled):
    """Starts whatever the checkpoint lacks, with ones in its place."""

    def build(self, node: str) -> Node:
        assert self.context.weights is not None
        built = _Scaled()
        if "scale" not in Checkpoint(self.context.weights).tensors:
            del built.scale
            built.register_buffer("scale", torch.ones(VOCAB, device="cpu"), persistent=False)
        return built


class _FirstHalf(_Scaled):
    """Whichever rank it is for."""

    tensor_parallel = True

    def __init__(self) -> None:
        super().__init__()
        size = VOCAB // current_mesh().tp.size
        self.divisions = (Division("tokens", VOCAB),)
        self.scale = nn.Parameter(torch.empty(size))

    def published_parts(self, name: str) -> Iterator[Part]:
        size = self.scale.shape[0]
        yield Part("", cut=None if size == VOCAB else Cut(0, VOCAB, (Share(0, size),)))


class Lopsided(Scaled):
    """Divided among ranks, all have the same half."""

    def build(self, node: str) -> Node:
        return _FirstHalf()


class _Whole(_Scaled):
    tensor_parallel = True


class Undivided(Scaled):
    """Says that it can be divided, and has nothing that is."""

    def build(self, node: str) -> Node:
        return _Whole()


class BadGraph(Chat):
    """A call reads a value that nothing makes, from an entry that does not exist."""

    def graph(self) -> Graph:
        call = Call("lm", outputs={"tokn": "token"}, emit={"token": "text"})
        return replace(super().graph(), walks={"generate": generate(call, {"ids": "promt"})})


class FickleGraph(Chat):
    """Another stream capacity each time it is asked."""

    asked = 0

    def graph(self) -> Graph:
        self.asked += 1
        graph = super().graph()
        return replace(graph, streams=(replace(graph.streams[0], capacity=4096 + self.asked),))


class _WithStatistics(Chat):
    port: ClassVar[Port] = Port("mean", "float32", (), "stacked")
    node: ClassVar[type[Node]]

    def graph(self) -> Graph:
        graph = super().graph()
        (entry,) = graph.nodes[0].entries
        return replace(graph, nodes=(NodeSpec("lm", (replace(entry, outputs=(*entry.outputs, self.port)),)),))

    def build(self, node: str) -> Node:
        return self.node()


class _Double(SumNode):
    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        return {**super().forward(step, ids), "mean": ids[step.last].double()}


class WrongDtype(_WithStatistics):
    """Returns float64 where its port says float32."""

    node = _Double


class _Matrix(SumNode):
    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        return {**super().forward(step, ids), "mean": ids[step.last].float()[:, None]}


class WrongShape(_WithStatistics):
    """Returns a dimension too many."""

    node = _Matrix


class _Counting(SumNode):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        self.steps += 1
        token = (context_sums(step, ids)[step.last] + self.steps) % VOCAB
        return {"token": step["sampler"].sample(token_logits(token))}


class KeepsState(Chat):
    """Its node remembers earlier steps, whoever they were for."""

    def build(self, node: str) -> Node:
        return _Counting()


class _Mixing(SumNode):
    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        token = (context_sums(step, ids)[step.last] + ids.sum()) % VOCAB
        return {"token": step["sampler"].sample(token_logits(token))}


class MixesRows(Chat):
    """An answer depends on who else is in the step."""

    def build(self, node: str) -> Node:
        return _Mixing()


class _Forgetting(SumNode):
    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        context_sums(step, ids)
        lengths = torch.tensor(step.lengths)
        return {"token": step["sampler"].sample(token_logits((ids[step.last] + lengths) % VOCAB))}


class ForgetsChunks(Chat):
    """Reads its prompt from the step's inputs, and so only the last chunk of it."""

    def build(self, node: str) -> Node:
        return _Forgetting()


class _PhaseNode(SumNode):
    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        prompts = max(step.lengths) > 1
        decoding = torch.tensor(step.lengths).eq(1) & step["positions"].positions[step.last].gt(0)
        token = (context_sums(step, ids)[step.last] + (decoding & prompts)) % VOCAB
        return {"token": step["sampler"].sample(token_logits(token))}


class MixesPhases(Chat):
    """A decode beside a prompt in the same step comes out wrong."""

    def build(self, node: str) -> Node:
        return _PhaseNode()


class _ShiftNode(SumNode):
    def forward(self, step: Step, ids: Tensor, shift: Tensor) -> dict[str, Any]:  # type: ignore[override]
        token = (context_sums(step, ids)[step.last] + shift[0]) % VOCAB
        return {"token": step["sampler"].sample(token_logits(token))}


class FirstRowsKnob(Chat):
    """Takes a knob of the first row for all rows."""

    def graph(self) -> Graph:
        graph = super().graph()
        (entry,) = graph.nodes[0].entries
        entry = replace(entry, inputs=(*entry.inputs, Port("shift", "int64", (), "stacked")))
        walk = generate(LM_CALL, {"shift": Param("shift")})
        return replace(graph, nodes=(NodeSpec("lm", (entry,)),), walks={"generate": walk})

    def build(self, node: str) -> Node:
        return _ShiftNode()


class _ShortNode(SumNode):
    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        if bool((step["positions"].positions + 1 < 2)[step.last].any()):
            raise IndexError("no second token")
        return super().forward(step, ids)


class FailsOnShort(Chat):
    """Trips over a prompt of one token."""

    def build(self, node: str) -> Node:
        return _ShortNode()


class AsksForTooLittle(Chat):
    """Forgets the answer when it says what it needs."""

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        yield Demand("kv", tokens=len(request.inputs["prompt"]))


class _EndlessNode(SumNode):
    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        done = torch.zeros(step.rows, dtype=torch.bool)
        return {"token": ids[step.last], "done": done}


class NeverEnds(Chat):
    """Waits for a word that its node never says."""

    def graph(self) -> Graph:
        graph = super().graph()
        (entry,) = graph.nodes[0].entries
        done = Port("done", "bool", (), "stacked")
        entry = replace(entry, outputs=(*entry.outputs, done), resources=(), prefix=False)
        call = Call("lm", inputs={"ids": "prompt"}, outputs={"done": "done"}, emit={"token": "text"})
        return replace(graph, nodes=(NodeSpec("lm", (entry,)),), walks={"generate": Loop(call, WhenTrue("done"))})

    def resources(self) -> Mapping[str, ResourceSpec]:
        return {}

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        return ()

    def build(self, node: str) -> Node:
        return _EndlessNode()


class _FlatNode(SumNode):
    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        token = context_sums(step, ids)[step.last] % VOCAB
        return {"token": step["sampler"].sample(token_logits(token) * 0.01)}


class Flat(Chat):
    """Sound, with a next token that is open: what a seed decides."""

    def build(self, node: str) -> Node:
        return _FlatNode()


class _Swallowing(SumNode):
    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        try:
            return super().forward(step, ids)
        except Exception:
            return {"token": torch.zeros(step.rows, dtype=torch.int64)}


class SwallowsErrors(Chat):
    """Answers with zeros when something goes wrong."""

    def build(self, node: str) -> Node:
        return _Swallowing()


@dataclass(frozen=True)
class LeakySpec(RecurrentState):
    kind: ClassVar[str] = "leaky_state"
    tensors: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=lambda: {"x": ((1,), "float32")})


class LeakyState(RecurrentStateResource):
    """Never gives a slot back."""

    kind = "leaky_state"

    def close(self, owner: Owner) -> None:
        self._open.discard(owner)


class CutSpec(LeakySpec):
    kind: ClassVar[str] = "cut_state"


class CutState(RecurrentStateResource):
    """Never gives back the slot of a request that ends between two chunks of its prompt."""

    kind = "cut_state"

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._cut: set[Owner] = set()

    def commit(self, rows: Sequence[Row], frozen: bool = False) -> None:
        super().commit(rows, frozen)
        self._cut -= {row.owner for row in rows if row.complete}
        self._cut |= {row.owner for row in rows if not row.complete}

    def close(self, owner: Owner) -> None:
        if owner not in self._cut:
            super().close(owner)


class OpenSpec(RecurrentState):
    kind: ClassVar[str] = "open_state"


class OpenState(RecurrentStateResource):
    """Has nothing against prompts whose head is skipped, and begins behind it with zeros."""

    kind = "open_state"

    def match(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> int | None:
        return None

    def skip(self, owner: Owner, ids: Sequence[int], sibling: Owner | None = None) -> None: ...


class SkipsState(Hybrid):
    """Attention's prefix cache skips the head of a prompt, the recurrence's state does not follow."""

    def resources(self) -> Mapping[str, ResourceSpec]:
        found = dict(super().resources())
        state = found["state"]
        assert isinstance(state, RecurrentState)
        return {**found, "state": OpenSpec(state.tensors, layers=state.layers)}


class FailingSpec(LeakySpec):
    kind: ClassVar[str] = "failing_state"


class FailingState(RecurrentStateResource):
    """Never gives back the slot of a request whose step failed."""

    kind = "failing_state"

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._failed: set[Owner] = set()

    def rollback(self, rows: Sequence[Row], frozen: bool = False) -> None:
        super().rollback(rows, frozen)
        if len(rows) == 1:  # halved until the one at fault is alone
            self._failed.add(rows[0].owner)

    def close(self, owner: Owner) -> None:
        if owner not in self._failed:
            super().close(owner)


class Leaks(Chat):
    """Uses a resource that leaks."""

    state: ClassVar[ResourceSpec] = LeakySpec()

    def graph(self) -> Graph:
        graph = super().graph()
        (entry,) = graph.nodes[0].entries
        entry = replace(entry, resources=(*entry.resources, "state"), prefix=False)
        return replace(graph, nodes=(NodeSpec("lm", (entry,)),))

    def resources(self) -> Mapping[str, ResourceSpec]:
        return {**super().resources(), "state": self.state}


class LeaksWhenCut(Leaks):
    state = CutSpec()


class LeaksOnError(Leaks):
    state = FailingSpec()


class Silent(Chat):
    """Generates for nobody."""

    def graph(self) -> Graph:
        call = Call("lm", outputs={"token": "token"})
        return replace(super().graph(), walks={"generate": generate(call)})


class _Crashing(SumNode):
    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        raise ZeroDivisionError("no such luck")


class Crashes(Chat):
    """Cannot answer at all."""

    def build(self, node: str) -> Node:
        return _Crashing()


class _IgnoringNode(SumNode):
    def forward(self, step: Step, ids: Tensor, shift: Tensor) -> dict[str, Any]:  # type: ignore[override]
        return super().forward(step, ids)


class IgnoresKnob(FirstRowsKnob):
    """Is handed a knob and does nothing with it."""

    def build(self, node: str) -> Node:
        return _IgnoringNode()


class MisspeltParam(FirstRowsKnob):
    """Asks for a parameter that nobody sends."""

    def graph(self) -> Graph:
        return replace(super().graph(), walks={"generate": generate(LM_CALL, {"shift": Param("shfit")})})


class _UndeclaredNode(SumNode):
    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        step["state"].read("sum")
        return super().forward(step, ids)


class Undeclared(Chat):
    """Its node uses a resource that its entry does not list."""

    def build(self, node: str) -> Node:
        return _UndeclaredNode()


class _ExtraRowNode(SumNode):
    def forward(self, step: Step, ids: Tensor) -> dict[str, Any]:
        return {"token": torch.zeros(step.rows + 1, 2, dtype=torch.int64)}


class ExtraRow(Chat):
    """Returns one row more than it was given."""

    def build(self, node: str) -> Node:
        return _ExtraRowNode()
