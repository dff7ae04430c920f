"""Denoise loop: noise becomes a picture, a video or actions in as many steps as the request asks for.

::

    prompt of each guidance branch → reader → context
    ( latent + context of each branch → denoiser.velocity ; latent, velocities → denoiser.update ) × steps
    latent → decoder → the answer

Requests at different steps, with different step counts and scales, share the denoiser's batches; stacked latents of one
shape do, packed ones of any.
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace

from mstar.nn.model import Demand, Model, Outcome, Run
from mstar.patterns.shapes import DecoderShape
from mstar.spec.graph import (
    CLIENT,
    Call,
    Const,
    Entry,
    Graph,
    Index,
    Loop,
    NodeSpec,
    Par,
    Param,
    Partition,
    Port,
    Seq,
    Source,
    Stream,
    Times,
)
from mstar.spec.request import EngineRequest
from mstar.spec.resources import Positions, RaggedAttention, ResourceSpec

__all__ = ["DenoiseFacts", "DenoiseLoop"]

_IDS = Port("ids", "int64", ("T",))
_INDEX, _BRANCH, _STEPS = (Port(name, "int64", (), "stacked") for name in ("index", "branch", "steps"))
_GUIDANCE = Port("guidance", "float32", (), "stacked")
_PROGRESS = Stream("progress", "main", CLIENT, Port("progress", "int64", (2,), "stacked"), "progress")


@dataclass(frozen=True)
class DenoiseFacts:
    """What a family of this pattern states.

    :param latent: the request's start noise and what the loop refines; named ``latent`` by custom.
    :param context: what reading a prompt gives, an input of the denoiser.
    :param answer: the stream to the client, from partition ``main``; its port is the decoder's output.
    :param branches: guidance branch → the request's input with its prompt ids. One branch: no guidance.
    :param kv: given: reading is an entry of the denoiser and fills a KV cache that its velocity sees, frozen. ``None``:
        a node ``reader`` makes the context.
    :param attention: the reader's attention, if it attends within its prompt: resource ``reader_attention``.
    :param preview: a further output of the denoiser's update, what there is to see after a step: uint8 ``[H, W, 3]``,
        stacked and cheap to make (a linear map of the latent, say). ``None``: there are no previews.
    """

    latent: Port
    context: Port
    answer: Stream
    branches: Mapping[str, str] = field(default_factory=lambda: {"cond": "prompt", "uncond": "negative"})
    kv: DecoderShape | None = None
    attention: RaggedAttention | None = None
    preview: Port | None = None


class DenoiseLoop(Model):
    """Graph, resources and demand of a denoise loop. A family adds :meth:`facts`, the modules in :meth:`build` and its
    weights; its knobs need ``steps`` and, with several branches, ``guidance``.

    *Nodes.* ``reader.forward(step, ids) -> {CONTEXT}`` (or ``denoiser.read``, with views ``kv`` and ``positions``).
    ``denoiser.velocity(step, LATENT, CONTEXT, branch, index, steps) -> {"velocity"}``, all scalars ``[rows]``:
    *branch* counts the facts' branches from 0, *index* the request's steps from 0 to ``steps - 1``.
    ``denoiser.update(step, LATENT, index, steps[, guidance], **{branch: velocity}) -> {LATENT[, PREVIEW]}``: guidance
    and one step of the solver. ``decoder.forward(step, LATENT) -> {ANSWER}``.

    *Progress.* A request that wants ``progress`` hears of each step on a stream of that name; one that wants
    ``preview`` also sees what there is on a stream ``preview``, if the facts have some. Processors render both with
    :class:`~mstar.processing.progress.ProgressReport`; the spec names the words in ``outputs``.

    *A request* brings LATENT (the processor draws it from the request's seed) and each branch's prompt.
    """

    @abc.abstractmethod
    def facts(self) -> DenoiseFacts: ...

    def latent_tokens(self, request: EngineRequest) -> int:
        """KV entries that a velocity pass writes after the prompt's, to be forgotten: the latent's length."""
        return len(request.inputs[self.facts().latent.name])

    def graph(self) -> Graph:
        facts = self.facts()
        node = "reader" if facts.kv is None else "denoiser"
        entry = "forward" if facts.kv is None else "read"
        reads = [
            Call(node, entry, {"ids": prompt}, {facts.context.name: f"context_{branch}"}, context=branch)
            for branch, prompt in facts.branches.items()
        ]
        shown = ("denoise",) if facts.preview is None else ("denoise", "denoise_shown")
        show = Call(
            "decoder",
            inputs={facts.latent.name: facts.latent.name},
            emit={facts.answer.port.name: facts.answer.name},
        )
        return Graph(
            nodes=self._nodes(facts),
            walks={walk: Seq(_side_by_side(reads), self._loop(facts, walk == "denoise_shown"), show) for walk in shown},
            partitions=(Partition("main", shown),),
            streams=(facts.answer, _PROGRESS, *_preview_stream(facts)),
            inputs=(
                *(Port(prompt, "int64", ("T",)) for prompt in dict.fromkeys(facts.branches.values())),
                facts.latent,
            ),
        )

    def route(self, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        # a walk of its own, so that nothing is copied to the host for those who do not look
        shown = self.facts().preview is not None and "preview" in request.want
        yield Run("denoise_shown" if shown else "denoise")

    def _loop(self, facts: DenoiseFacts, shown: bool) -> Loop:
        update = self._update(facts)
        if shown and facts.preview is not None:
            update = replace(update, emit={facts.preview.name: "preview"})
        body = Seq(_side_by_side(self._velocities(facts)), update)
        return Loop(body, Times(Param("steps")), progress="progress")

    def _nodes(self, facts: DenoiseFacts) -> tuple[NodeSpec, ...]:
        state = ("kv", "positions") if facts.kv is not None else ()
        velocity = replace(facts.latent, name="velocity")
        entries = (
            Entry(
                "velocity",
                (facts.latent, facts.context, _BRANCH, _INDEX, _STEPS),
                (velocity,),
                resources=state,
                frozen=state,
            ),
            Entry(
                "update",
                (
                    facts.latent,
                    *(replace(facts.latent, name=branch) for branch in facts.branches),
                    _INDEX,
                    _STEPS,
                    *((_GUIDANCE,) if len(facts.branches) > 1 else ()),
                ),
                (facts.latent, *(() if facts.preview is None else (facts.preview,))),
            ),
        )
        decoder = NodeSpec("decoder", (Entry(inputs=(facts.latent,), outputs=(facts.answer.port,)),))
        if facts.kv is not None:
            read = Entry("read", (_IDS,), (facts.context,), chunk="ids", resources=state)
            return NodeSpec("denoiser", (read, *entries)), decoder
        own = ("reader_attention",) if facts.attention is not None else ()
        reader = NodeSpec("reader", (Entry(inputs=(_IDS,), outputs=(facts.context,), resources=own),))
        return reader, NodeSpec("denoiser", entries), decoder

    def _velocities(self, facts: DenoiseFacts) -> list[Call]:
        calls = []
        for number, branch in enumerate(facts.branches):
            inputs: dict[str, Source] = {
                facts.latent.name: facts.latent.name,
                facts.context.name: f"context_{branch}",
                "branch": Const(number),
                "index": Index(),
                "steps": Param("steps"),
            }
            calls.append(Call("denoiser", "velocity", inputs, {"velocity": f"velocity_{branch}"}, context=branch))
        return calls

    def _update(self, facts: DenoiseFacts) -> Call:
        inputs: dict[str, Source] = {branch: f"velocity_{branch}" for branch in facts.branches}
        inputs |= {facts.latent.name: facts.latent.name, "index": Index(), "steps": Param("steps")}
        if len(facts.branches) > 1:
            inputs["guidance"] = Param("guidance")
        return Call("denoiser", "update", inputs, {facts.latent.name: facts.latent.name})

    def resources(self) -> Mapping[str, ResourceSpec]:
        facts = self.facts()
        found: dict[str, ResourceSpec] = {}
        if facts.kv is not None:
            found |= {"kv": facts.kv.kv(), "positions": Positions()}
        elif facts.attention is not None:
            found["reader_attention"] = facts.attention
        return found

    def demand(self, request: EngineRequest) -> Iterable[Demand]:
        facts = self.facts()
        if facts.kv is None:
            return
        latent = self.latent_tokens(request)
        for branch, prompt in facts.branches.items():
            yield Demand("kv", branch, len(request.inputs[prompt]) + latent)


def _preview_stream(facts: DenoiseFacts) -> tuple[Stream, ...]:
    return () if facts.preview is None else (Stream("preview", "main", CLIENT, facts.preview, "preview"),)


def _side_by_side(calls: list[Call]) -> Call | Par:
    return calls[0] if len(calls) == 1 else Par(*calls)


def _distinct(branches: Mapping[str, str]) -> list[str]:
    """The prompts' names, each once: two branches may read the same prompt."""
    return list(dict.fromkeys(branches.values()))
