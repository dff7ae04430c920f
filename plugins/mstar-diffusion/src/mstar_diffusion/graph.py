"""The graph that models of pictures share.

::

    ids → text_encoder → context → dit.prepare → prompt
    reference pixels → vae_encoder → condition
    ( latent + prompt + conditions → dit.step → latent ) × steps
    latent → vae_decoder → the answer

It is not :class:`mstar.patterns.denoise.DenoiseLoop`: velocity and update are one call here, so that a captured step
has both, the denoiser works on its prompt once, and there are walks with references. With guidance they are two calls,
as there, and each branch is a context, which a layout may give a rank of its own. What a solver remembers of a request
is the request's latent, its schedule and the loop's index; so requests at different steps, with different numbers of
them, share a step. All ports are stacked: a step has requests of one size, and nothing is padded or masked.
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mstar.nn.model import BuildContext, Model, Outcome, Run
from mstar.nn.node import Node
from mstar.spec.graph import (
    CLIENT,
    Call,
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
from mstar.spec.resources import RaggedAttention, ResourceSpec
from mstar.weights.names import WeightMap
from mstar_diffusion.dit.attention import BY_RESOURCE, RESOURCE
from mstar_diffusion.exact import keep_exact
from mstar_diffusion.knobs import MOST_STEPS, SIZES, ImageOptions, Size
from mstar_diffusion.lora import check_adapters, check_files, fold
from mstar_diffusion.native import NativeNames

__all__ = ["TOKEN", "ImageFacts", "ImageModel", "by_area", "condition", "reference"]

TOKEN = SIZES.multiple
"""Pixels along a side of a token."""

_DECODED = 2
"""Most pictures of a captured decode, which keeps its memory: more in one step run as plain calls."""

_IDS = Port("ids", "int64", ("T",), "stacked")
_LENGTH = Port("length", "int64", (), "stacked")
_SIGMAS = Port("sigmas", "float32", (MOST_STEPS + 1,), "stacked")
_INDEX = Port("index", "int64", (), "stacked")
_SCALE = Port("scale", "float32", (), "stacked")
_PIXELS = Port("pixels", "uint8", ("H", "W", 3), "list")
_IMAGE = Port("image", "uint8", ("H", "W", 3), "stacked")
_FINITE = Port("finite", "int64", (), "stacked")
_PROGRESS = Stream("progress", "main", CLIENT, Port("progress", "int64", (2,), "stacked"), "progress")
_PREVIEW = Stream("preview", "main", CLIENT, Port("preview", "uint8", ("H", "W", 3), "stacked"), "preview")
_ANSWER = Stream("image", "main", CLIENT, _IMAGE, "image")


def reference(number: int) -> str:
    """The request's input with the pixels of its reference *number*, from 0: uint8 ``[H, W, 3]``."""
    return f"reference_{number}"


def condition(number: int) -> str:
    """The denoiser's input with the tokens of reference *number*: ``[h, w, C]``."""
    return f"condition_{number}"


def by_area(sizes: Iterable[Size]) -> list[Size]:
    """*sizes*, each once, the largest first: what captures of smaller ones need then fits into its memory."""
    return sorted(set(sizes), key=lambda size: -size[0] * size[1])


@dataclass(frozen=True)
class ImageFacts:
    """What a family states.

    :param latent: dtype of what the loop refines; it is ``[h, w, channels]``, one token a point. :param channels: of
        it. :param context: width of what the text encoder gives. :param prompt: width of what the denoiser makes of
        it. :param heads: of the denoiser's attention. :param head_dim: their width.
    :param references: most pictures that a request may refer to. :param guided: whether there is guidance, by a second
        prompt and the parameter ``guidance_scale``.
    """

    latent: str
    channels: int
    context: int
    prompt: int
    heads: int
    head_dim: int
    references: int = 0
    guided: bool = False


class ImageModel(Model, abc.ABC):
    """Graph and routes. A family adds :meth:`facts`, the nodes in :meth:`build` and their weights.

    *Nodes.* ``text_encoder.forward(step, ids, length) -> {"context"}``, ``dit.prepare(step, context, length) ->
    {"prompt"}``, ``dit.step(step, latent, prompt, sigmas, index, condition_0…) -> {"latent", "clean"}``,
    ``dit.velocity(step, latent, prompt, sigmas, index) -> {"velocity"}`` and ``dit.guide(step, latent, cond, uncond,
    scale, sigmas, index) -> {"latent", "clean"}`` where there is guidance;
    :class:`~mstar_diffusion.vae.nodes.VaeEncoder` and :class:`~mstar_diffusion.vae.nodes.VaeDecoder`. *sigmas* are a
    request's noise levels, of which *index* counts;
    *clean* is what the picture would be now, for previews.

    *A request* brings ``ids`` and ``length`` (for guidance ``negative_ids`` and ``negative_length``), the start noise
    ``latent``, its ``sigmas`` and the parameter ``num_inference_steps``, and the pixels of its references.
    """

    options: ImageOptions

    def __init__(self, context: BuildContext):
        super().__init__(context)
        self.options = context.options
        check_files(self.options.lora)  # now, and not when gigabytes have been read

    def check_options(self) -> None:
        if self.options.lora:
            module = self.on_meta("dit")
            check_adapters(module, WeightMap.from_module(module), self.options.lora, self.native_names())

    @abc.abstractmethod
    def facts(self) -> ImageFacts: ...

    @abc.abstractmethod
    def captured(self) -> Iterator[Mapping[str, int]]:
        """Of the steps that are captured at the start, the largest first: ``h`` and ``w`` tokens of the latent,
        ``P`` of the prompt, which has as many as its text with the padding, ``h0`` and ``w0`` of the first
        reference."""

    # --- graph --------------------------------------------------------------------------------------------------------
    def graph(self) -> Graph:
        facts = self.facts()
        walks = {name: self._walk(facts, *how) for name, how in self._walks(facts)}
        negative = (replace(_IDS, name="negative_ids"), replace(_LENGTH, name="negative_length"))
        optional = (*(negative if facts.guided else ()), *self._references(facts))
        return Graph(
            nodes=tuple(self._nodes(facts)),
            walks=walks,
            partitions=(Partition("main", tuple(walks)),),
            streams=(_ANSWER, _PROGRESS, _PREVIEW),
            inputs=(_IDS, _LENGTH, _latent(facts), _SIGMAS, *(replace(port, optional=True) for port in optional)),
        )

    def resources(self) -> Mapping[str, ResourceSpec]:
        """What the denoiser's entries use, where a backend of the engine's is to attend."""
        if self.options.attention_backend != BY_RESOURCE:
            return {}
        facts = self.facts()
        return {RESOURCE: RaggedAttention(facts.heads, facts.heads, facts.head_dim, BY_RESOURCE)}

    def route(self, partition: str, request: EngineRequest) -> Generator[Run, Outcome, None]:
        facts = self.facts()
        references = sum(reference(number) in request.inputs for number in range(facts.references))
        guided = facts.guided and "negative_ids" in request.inputs
        # looking costs a decode a step, so those who do not look have walks of their own
        yield Run(_name(guided, references, "preview" in request.want))

    def _walks(self, facts: ImageFacts) -> Iterator[tuple[str, tuple[bool, int, bool]]]:
        kinds = [(False, references) for references in range(facts.references + 1)]
        kinds += [(True, 0)] if facts.guided else []
        for guided, references in kinds:
            for shown in (False, True):
                yield _name(guided, references, shown), (guided, references, shown)

    def _walk(self, facts: ImageFacts, guided: bool, references: int, shown: bool) -> Seq:
        encoded = [
            Call("vae_encoder", inputs={"pixels": reference(i)}, outputs={"condition": condition(i)})
            for i in range(references)
        ]
        before: list[Call | Seq] = [self._read("", "prompt", "cond" if guided else ""), *encoded]
        if guided:
            before.append(self._read("negative_", "negative_prompt", "uncond"))
        step: Call | Seq = self._guided_step() if guided else self._step(references)
        if shown:
            look = Call("vae_decoder", "preview", {"clean": "clean"}, emit={"preview": "preview"})
            step = Seq(step, look)
        answer = Call("vae_decoder", inputs={"latent": "latent"}, emit={"image": "image"})
        loop = Loop(step, Times(Param("num_inference_steps")), progress="progress")
        return Seq(before[0] if len(before) == 1 else Par(*before), loop, answer)

    def _read(self, prefix: str, prompt: str, branch: str) -> Seq:
        given: dict[str, Source] = {"ids": prefix + "ids", "length": prefix + "length"}
        context = f"{prefix}context"
        return Seq(
            Call("text_encoder", inputs=given, outputs={"context": context}, context=branch),
            Call("dit", "prepare", {"context": context, "length": given["length"]}, {"prompt": prompt}, context=branch),
        )

    def _step(self, references: int) -> Call:
        inputs: dict[str, Source] = {name: name for name in ("latent", "prompt", "sigmas")}
        inputs |= {"index": Index()} | {condition(i): condition(i) for i in range(references)}
        return Call("dit", "step", inputs, {"latent": "latent", "clean": "clean"})

    def _guided_step(self) -> Seq:
        calls = []
        for branch, prompt in (("cond", "prompt"), ("uncond", "negative_prompt")):
            inputs: dict[str, Source] = {"latent": "latent", "prompt": prompt, "sigmas": "sigmas", "index": Index()}
            calls.append(Call("dit", "velocity", inputs, {"velocity": branch}, context=branch))
        given: dict[str, Source] = {name: name for name in ("latent", "cond", "uncond", "sigmas")}
        given |= {"index": Index(), "scale": Param("guidance_scale")}
        return Seq(Par(*calls), Call("dit", "guide", given, {"latent": "latent", "clean": "clean"}))

    def _nodes(self, facts: ImageFacts) -> Iterator[NodeSpec]:
        context = Port("context", "model", ("T", facts.context), "stacked")
        options = self.options
        rows = tuple(sorted({size for size in options.capture_batch_sizes if size <= options.max_batch_size}))
        read = Entry(inputs=(_IDS, _LENGTH), outputs=(context,), graph_sizes=self._prompts())
        # a picture's row keeps the device busy by itself: one of nothing would cost as much
        shared: dict[str, Any] = {"max_rows": options.max_batch_size, "graph_fill": False}
        yield NodeSpec("text_encoder", (read,), graph_rows=rows, **shared)
        yield NodeSpec("dit", tuple(self._dit(facts, context)), graph_rows=rows, **shared)
        if facts.references:
            tokens = Port("condition", "model", ("h", "w", facts.channels), "list")
            yield NodeSpec("vae_encoder", (Entry(inputs=(_PIXELS,), outputs=(tokens,)),))
        latent, clean = _latent(facts), replace(_latent(facts), name="clean", dtype="float32")
        sizes = {(size["h"], size["w"]): {"h": size["h"], "w": size["w"]} for size in self.captured()}
        decode = Entry(inputs=(latent,), outputs=(_IMAGE, _FINITE), graph_sizes=tuple(sizes.values()))
        preview = Entry("preview", (clean,), (replace(_IMAGE, name="preview"),))
        few = tuple(size for size in rows if size <= _DECODED) or rows[:1]
        yield NodeSpec("vae_decoder", (decode, preview), graph_rows=few, **shared)

    def _dit(self, facts: ImageFacts, context: Port) -> Iterator[Entry]:
        latent, prompt = _latent(facts), Port("prompt", "model", ("P", facts.prompt), "stacked")
        clean = replace(latent, name="clean", dtype="float32")
        seen = tuple(
            Port(condition(i), "model", (f"h{i}", f"w{i}", facts.channels), "stacked", optional=True)
            for i in range(facts.references)
        )
        attention = tuple(self.resources())
        yield Entry("prepare", (context, _LENGTH), (prompt,), resources=attention, graph_sizes=self._prompts())
        given = (latent, prompt, _SIGMAS, _INDEX)
        yield Entry("step", (*given, *seen), (latent, clean), resources=attention, graph_sizes=tuple(self.captured()))
        if facts.guided:
            velocity = replace(latent, name="velocity")
            cond, uncond = replace(latent, name="cond"), replace(latent, name="uncond")
            yield Entry("velocity", given, (velocity,), resources=attention)
            yield Entry("guide", (latent, cond, uncond, _SCALE, _SIGMAS, _INDEX), (latent, clean))

    def _prompts(self) -> tuple[Mapping[str, int], ...]:
        """The lengths of prompts whose reading is captured, the longest first: those of captured denoise steps."""
        lengths = sorted({size["P"] for size in self.captured()}, reverse=True)
        return tuple({"T": length} for length in lengths)

    def _references(self, facts: ImageFacts) -> list[Port]:
        return [replace(_PIXELS, name=reference(number), layout="packed") for number in range(facts.references)]

    # --- weights ------------------------------------------------------------------------------------------------------
    def on_meta(self, node: str) -> Node:
        """The node's module without memory, for its names."""
        with torch.device("meta"):
            return self.build(node)

    def native_names(self) -> NativeNames:
        """What the model's authors call the denoiser's layers: adapters come under these names too."""
        return {}

    def loaded(self, node: str, module: Node) -> None:
        if node == "dit":
            fold(module, WeightMap.from_module(module), self.options.lora, self.native_names())
            keep_exact(module, self.options.compile_exact_ops)
        if node.startswith("vae_") and self.context.device.type == "cuda":
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _latent(facts: ImageFacts) -> Port:
    return Port("latent", facts.latent, ("h", "w", facts.channels), "stacked")


def _name(guided: bool, references: int, shown: bool) -> str:
    kind = "guided" if guided else f"edit_{references}" if references else "denoise"
    return kind + ("_shown" if shown else "")
