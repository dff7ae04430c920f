"""``engine.compile``: compiled layers give the tokens of plain ones, are compiled once a shape, and fail in words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recording import record_steps
from torch import Tensor, nn

from mstar.cluster.base import WorkerConfig
from mstar.engine import compile as engine_compile
from mstar.engine.compile import CompileFault, compile_regions, compiler_fault, opaque
from mstar.nn.node import Node, Step
from mstar.registry import RegisteredModel, Registry
from mstar.spec.deployment import EngineOptions, merge_deployment
from mstar.spec.errors import DeploymentError
from mstar.spec.knobs import TextOptions
from mstar.spec.request import Emit, EngineRequest, Failed, SamplingParams
from mstar.testing.compiling import fresh_compiler
from mstar.testing.drive import miniature_registry
from mstar.worker.core import Worker
from mstar.worker.machine import compiles

CPU = torch.device("cpu")
PROMPTS = [list(range(3, 40)), [7], [90, 12, 45, 3, 3, 8, 100, 60, 2], list(range(100, 160))]
TOKENS = 12

needs_compiler = pytest.mark.skipif(compiler_fault(CPU) is not None, reason=str(compiler_fault(CPU)))
# What the compiler itself warns of, by the Python and torch that are installed.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that one test compiled, or told torch, is another's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    with fresh_compiler():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.8 if parameter.dim() == 1 else 0.0, 0.25)
    model.save_pretrained(folder)
    return folder


def registry_of(model: str, options: type = TextOptions) -> Registry:
    registry = miniature_registry()
    plugin = registry.models["mini_chat"].plugin
    spec = replace(registry.model("mini_chat"), key="tiny", model=model, options=options)
    registry.models["tiny"] = RegisteredModel(spec, plugin)
    return registry


def worker_of(checkpoint: Path, cache: Path | None = None, **engine: Any) -> Worker:
    deployment = merge_deployment(
        "tiny", {"device": "cpu", "engine": engine, "scheduler": {"max_step_tokens": 24}, "max_concurrent_requests": 8}
    )
    config = WorkerConfig(
        key="tiny", weights=str(checkpoint), deployment=deployment, cache=None if cache is None else str(cache)
    )
    return Worker(config, registry_of("mstar.patterns.causal_lm:CausalLM"))


def tokens(worker: Worker, prompts: list[list[int]], prefix: str = "r", apart: int = 2) -> list[list[int]]:
    """Of requests that come one after the other, *apart* steps apart, so that batches change."""
    out: dict[str, list[int]] = {}
    waiting = [(f"{prefix}{i}", prompt) for i, prompt in enumerate(prompts)]
    for turn in itertools.count():
        while waiting and turn % max(apart, 1) == 0:
            name, prompt = waiting.pop(0)
            params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=3, temperature=len(waiting) % 2)
            out[name] = []
            given = {"prompt": np.array(prompt, np.int64)}
            worker.submit(EngineRequest(id=name, inputs=given, sampling={"sampler": params}))
            if apart:
                break
        progressed = worker.step()
        for event in worker.events():
            assert not isinstance(event, Failed), event
            if isinstance(event, Emit):
                out[event.id].extend(event.data)
                worker.ack(event.id, event.stream, 1)
        if not progressed and not waiting:
            return list(out.values())
    raise AssertionError


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are traced, guarded and differentiated into operators as ever, but no machine code is made of them, which
    takes minutes on a busy machine."""
    real = torch.compile

    def without_codegen(function: Any, *, dynamic: bool, options: Any) -> Any:
        return real(function, dynamic=dynamic, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", without_codegen)


@pytest.mark.timeout(300)
def test_layers_give_the_same_tokens_and_are_compiled_once(checkpoint: Path, traced: None) -> None:
    wanted = tokens(worker_of(checkpoint), PROMPTS)
    assert [len(found) for found in wanted] == [TOKENS] * len(PROMPTS)
    worker = worker_of(checkpoint, compile=True)
    assert tokens(worker, PROMPTS) == wanted
    compiled = graphs()
    # Five pieces of a layer, of which the first is another where there is no delta; for one row and for more. Not once
    # for each of the three layers, nor for each number of rows.
    assert 0 < compiled <= 12
    steps = worker.engine.steps
    assert tokens(worker, PROMPTS[::-1], "again") != []
    assert worker.engine.steps > steps + 10
    assert graphs() == compiled


@pytest.mark.timeout(300)
def test_compiled_layers_in_recorded_steps(checkpoint: Path, traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tokens(worker_of(checkpoint), PROMPTS[:3])
    worker = worker_of(checkpoint, compile=True)
    _, recorder = record_steps(monkeypatch, type("Held", (), {"worker": worker})(), rows=4)
    assert tokens(worker, PROMPTS[:3]) == wanted
    assert recorder.replays


@needs_compiler
@pytest.mark.timeout(600)
def test_machine_code_gives_the_same_tokens_and_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    prompts = [[7, 9, 30], [90, 12, 45]]  # together, so that there are two rows or more in all steps
    wanted = tokens(worker_of(checkpoint), prompts, apart=0)
    assert tokens(worker_of(checkpoint, tmp_path, compile=True), prompts, apart=0) == wanted
    assert any(Path(tmp_path, "compile").iterdir())
    # The next start finds it all in the folder.
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    assert tokens(worker_of(checkpoint, tmp_path, compile=True), prompts, apart=0) == wanted
    assert counters["inductor"]["fxgraph_cache_hit"] > 0
    assert counters["inductor"]["fxgraph_cache_miss"] == 0


class Layer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) + 1


class Two(Node):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.more = nn.ModuleDict({"layers": nn.ModuleList([Layer()]), "heads": nn.ModuleList([Layer()])})

    def forward(self, step: Step, x: Tensor) -> Mapping[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"x": x}


def test_regions_are_the_items_of_layers() -> None:
    assert [name for name, _ in Two().regions()] == ["layers.0", "layers.1", "more.layers.0"]


def test_what_cannot_be_compiled_names_node_and_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Any, **options: Any) -> Any:
        def backend(graph: Any, inputs: Any) -> Any:
            raise ValueError("no such instruction")

        return torch._dynamo.optimize(backend)(function)

    monkeypatch.setattr(torch, "compile", broken)
    node = Two()
    assert compile_regions({"lm": node}) == ["lm.layers.0", "lm.layers.1", "lm.more.layers.0"]
    with pytest.raises(CompileFault, match=r"node 'lm', layer 'layers\.0' cannot be compiled: .*") as caught:
        node(None, torch.zeros(3))
    assert "engine.compile: false" in str(caught.value)
    assert "no such instruction" in str(caught.value)


def test_without_a_compiler_the_start_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.cpp_builder as builder
    from torch._inductor.exc import InvalidCxxCompiler

    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(builder, "get_cpp_compiler", none)
    with pytest.raises(DeploymentError, match=r"engine\.compile.*needs a C\+\+ compiler"):
        worker_of(checkpoint, compile=True)


class View:
    def __init__(self) -> None:
        self.calls = 0

    def use(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


def test_views_are_opaque_and_the_same() -> None:
    view = View()
    twin = opaque(view)
    assert isinstance(twin, View)
    assert twin.use(torch.zeros(1)).item() == 1
    assert view.calls == twin.calls == 1
    assert type(opaque(View())) is type(twin)
    assert opaque((1, 2)) == (1, 2)


@needs_compiler
@pytest.mark.timeout(120)
def test_a_region_stops_at_a_view_and_goes_on() -> None:
    class Uses(nn.Module):
        def forward(self, x: Tensor, view: View) -> Tensor:
            return torch.relu(view.use(x * 2)) - 1

    node = Node()
    node.layers = nn.ModuleList([Uses()])
    engine_compile.compile_regions({"lm": node}, deterministic=True)
    for count, rows in enumerate((3, 5, 9), 1):
        view = View()
        got = node.layers[0](torch.ones(rows), opaque(view))
        assert view.calls == 1
        assert got.tolist() == [2.0] * rows
        if count == 2:
            before = graphs()
    assert graphs() == before


class Rounded(nn.Module):
    """Adds what bfloat16 cannot hold, and takes it away again."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 256) - 256


class Rounding(Node):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Rounded()])

    def forward(self, step: Step, x: Tensor) -> Any:
        return self.layers[0](x)


@needs_compiler
@pytest.mark.parametrize("eager_rounding", [False, True])
def test_values_are_rounded_between_fused_operations_if_so_asked(eager_rounding: bool) -> None:
    x = torch.linspace(0, 3, 64, dtype=torch.bfloat16)
    plain, node = Rounding()(None, x), Rounding()
    compile_regions({"lm": node}, eager_rounding=eager_rounding)
    assert torch.equal(node(None, x), plain) is eager_rounding


def test_compiling_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """`cuda` is a wish: a machine that cannot do it serves all the same, and the log says why."""
    options, cuda = EngineOptions(compile="cuda"), torch.device("cuda")
    monkeypatch.setattr("mstar.worker.machine.compiler_fault", lambda device: None)
    assert compiles(options, cuda)
    assert not compiles(options, CPU)
    assert compiles(EngineOptions(compile=True), CPU)
    assert not compiles(EngineOptions(), cuda)
    monkeypatch.setattr("mstar.worker.machine.compiler_fault", lambda device: "there is no Triton")
    assert not compiles(options, cuda)
    assert "there is no Triton" in caplog.text
