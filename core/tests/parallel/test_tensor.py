"""Tensor parallelism of decoders: several ranks say what one says, and each has its share only."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_llama
import torch
from tiny_hybrid import HybridLM
from tiny_llama import CONFIG, VARIANTS, answer

from mstar.nn.mesh import Mesh, World, building
from mstar.nn.model import BuildContext
from mstar.nn.symmetric import SymmetricReducer, symmetric_fault
from mstar.patterns.causal_lm import CausalLM
from mstar.spec import resources as specs
from mstar.spec.errors import SetupError
from mstar.testing.drive import Driver
from mstar.testing.ranks import Ranks
from mstar.weights.loader import load
from mstar.worker import machine
from mstar.worker.layout import mesh_faults

MODEL = "mstar.patterns.causal_lm:CausalLM"


@pytest.fixture(scope="module", params=list(VARIANTS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write(tmp_path_factory.mktemp("llama"), CONFIG | VARIANTS[request.param], CausalLM)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write(tmp_path_factory.mktemp("llama"), CONFIG, CausalLM)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_say_what_one_says(ranks: Ranks, folder: Path, tp: int) -> None:
    alone = answer(None, MODEL, folder)
    together = ranks.run(tp, answer, MODEL, folder)
    for rank in together:
        assert rank.tokens == alone.tokens
    assert len({tuple(map(tuple, alone.tokens))}) == 1
    assert len(set(alone.tokens[0])) > 3, "an answer of one token would say little"


@pytest.mark.parametrize("tp", [2, 4])
def test_recurrent_heads_are_divided_too(ranks: Ranks, tmp_path: Path, tp: int) -> None:
    model = "tiny_hybrid:HybridLM"
    folder = tiny_llama.write(tmp_path, CONFIG | {"num_hidden_layers": 1}, HybridLM)
    alone = answer(None, model, folder)
    assert len(set(alone.tokens[0])) > 3
    for rank in ranks.run(tp, answer, model, folder):
        assert rank.tokens == alone.tokens
        assert rank.pools["state"] * tp == alone.pools["state"]
        assert rank.sums == 1 + 2 + 1  # the embedding, the layer that attends, the delta net
    for rank in ranks.run(tp, answer, model, folder, "linear_attn.out_proj"):
        assert rank.tokens != alone.tokens


def test_sampled_with_a_seed_they_agree_too(ranks: Ranks, plain: Path) -> None:
    knobs = {"temperature": 1.0, "top_p": 0.9, "seed": 11, "repetition_penalty": 1.2}
    alone = answer(None, MODEL, plain, knobs=knobs)
    assert alone.tokens != answer(None, MODEL, plain).tokens
    for rank in ranks.run(2, answer, MODEL, plain, knobs=knobs):
        assert rank.tokens == alone.tokens


@pytest.mark.parametrize("without", ["embed_tokens", "layers.0.self_attn.o_proj", "layers.1.mlp.down_proj"])
def test_no_sum_can_be_left_out(ranks: Ranks, plain: Path, without: str) -> None:
    alone = answer(None, MODEL, plain)
    for rank in ranks.run(2, answer, MODEL, plain, without):
        assert rank.tokens != alone.tokens


def test_there_are_two_sums_a_layer_and_one_for_the_embedding(ranks: Ranks, plain: Path) -> None:
    for rank in ranks.run(2, answer, MODEL, plain):
        assert rank.sums == 2 * CONFIG["num_hidden_layers"] + 1


def test_each_rank_has_and_reads_its_share(ranks: Ranks, tmp_path: Path) -> None:
    wide = CONFIG | {"hidden_size": 256, "head_dim": 32, "intermediate_size": 1024, "vocab_size": 512}
    folder = tiny_llama.write(tmp_path, wide, CausalLM)
    size = share(folder, Mesh.sketch())
    assert size == pytest.approx((folder / "model.safetensors").stat().st_size, rel=0.01)
    alone = answer(None, MODEL, folder)
    read = ranks.run(4, share_read, folder)
    for number, rank in enumerate(ranks.run(4, answer, MODEL, folder)):
        own = share(folder, Mesh.sketch(tp=4, rank=number))
        assert size / 4 < own < size / 4 * 1.1  # all ranks have the norms, and two have the same key-value head
        assert own <= read[number] < own + 20_000, "other ranks' bytes were read"
        assert rank.pools["kv"] * 2 == alone.pools["kv"], "one of two key-value heads"
        assert rank.capacities == alone.capacities


def share_read(world: World, folder: Path) -> int:
    """Bytes that a rank reads from files to get its weights."""
    mesh = tiny_llama.everybody(world)
    model = CausalLM(BuildContext(folder, torch.float32, torch.device("cpu")))
    for _ in range(2):  # the first time it also reads Python's own files
        with building(mesh), torch.device("meta"):
            node, weightmap = model.build("llm"), model.weights("llm")
        before = bytes_read()
        load(node, weightmap, folder, torch.device("cpu"), torch.float32)
    return bytes_read() - before


def bytes_read() -> int:
    """That this process has read from files so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def share(folder: Path, mesh: Mesh) -> int:
    """Bytes of the weights of a rank of *mesh*."""
    with building(mesh), torch.device("meta"):
        node = CausalLM(BuildContext(folder, torch.float32, torch.device("cpu"))).build("llm")
    return sum(parameter.nbytes for parameter in node.parameters())


def test_sizes_that_do_not_divide_are_told_with_what_would(plain: Path) -> None:
    meshes = {"llm": Mesh.sketch(tp=3)}
    with pytest.raises(SetupError) as error:
        Driver("tiny", tiny_llama.registry(MODEL), plain, meshes)
    assert str(error.value) == ("resource 'kv': 2 key-value heads are not divided by tp=3")


def test_layers_that_do_not_divide_are_told_by_name(tmp_path: Path) -> None:
    config = CONFIG | {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 80}
    folder = tiny_llama.write(tmp_path, config, CausalLM)
    mesh = Mesh.sketch(tp=4)
    with building(mesh), torch.device("meta"):
        node = CausalLM(BuildContext(folder, torch.float32, torch.device("cpu"))).build("llm")
    assert list(mesh_faults("llm", node, mesh)) == [
        "node 'llm': model.layers.0.self_attn.qkv_proj: 6 query heads are not divided by tp=4; "
        "tp: 1 or 2 would do for node 'llm'",
        "node 'llm': model.layers.0.self_attn.o_proj: 6 groups of 6 input features are not divided by tp=4; "
        "tp: 1 or 2 would do for node 'llm'",
    ]


def test_a_node_that_does_not_say_so_is_not_divided() -> None:
    with pytest.raises(SetupError, match="Calculator does not say that its layers can be"):
        Driver("mini_planner", meshes={"calc": Mesh.sketch(tp=2)})


def test_a_mesh_for_a_node_that_is_not_there() -> None:
    with pytest.raises(SetupError, match="a mesh for node 'calk': unknown node; did you mean 'calc'"):
        Driver("mini_planner", meshes={"calk": Mesh.sketch(tp=2)})


def with_memory(world: World, folder: Path) -> int:
    """Pages of the pool on a rank that has less memory free the higher it is."""
    mesh, free = tiny_llama.everybody(world), machine.free_memory
    machine.free_memory = lambda device: (8 - 2 * world.rank) << 20
    try:
        driver = Driver("tiny", tiny_llama.registry(MODEL), folder, {"llm": mesh}, max_concurrent_requests=4096)
    finally:
        machine.free_memory = free
    return driver.worker.resources["kv"].capacity()


def test_pools_have_one_size_that_of_the_rank_with_the_least_memory(ranks: Ranks, plain: Path) -> None:
    pages = ranks.run(2, with_memory, plain)
    assert pages[0] == pages[1]
    token = 2 * CONFIG["num_hidden_layers"] * CONFIG["head_dim"] * 4  # of one key-value head, float32
    budget = (6 << 20) // 2 * 0.25  # two ranks share the machine, and pools without a size get a quarter
    assert 0.9 * budget < pages[0] * 16 * token <= budget


def test_resources_are_divided_by_heads_and_others_are_whole() -> None:
    window = specs.WindowKV(kv_heads=2, query_heads=8)
    assert window.divided(4) == specs.WindowKV(kv_heads=1, query_heads=2)
    ragged = specs.RaggedAttention(heads=6, kv_heads=6)
    assert ragged.divided(3) == specs.RaggedAttention(heads=2, kv_heads=2)
    assert specs.Sampler(vocab=7).divided(4) == specs.Sampler(vocab=7)
    with pytest.raises(SetupError, match="6 query heads are not divided by tp=4"):
        specs.PagedKV(kv_heads=2, query_heads=6).divided(4)


def test_small_sums_through_symmetric_memory_are_for_gpus() -> None:
    assert symmetric_fault(torch.device("cpu")) == "symmetric memory is for GPUs"
    with pytest.raises(RuntimeError, match="is for GPUs"):
        SymmetricReducer(None, torch.device("cpu"), 1 << 18)
