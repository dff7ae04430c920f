"""The Triton kernels, compiled for a GPU on a machine without one. ``test_cuda_cases.py`` runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mstar.nn import ops
from mstar.testing.kernels import compile_kernel

pytest.importorskip("triton", reason="the kernels are written in Triton, which this system has no build of")


def _compile(
    kernel: Any, pointers: str, numbers: str = "", aligned: bool = False, warps: int = 4, **constants: Any
) -> str:
    """Compile for an H100 or H200, which needs no GPU, to start early; returns the PTX. *pointers*: ``name:type`` …

    :param aligned: whether pointers are multiples of 16 bytes.
    """
    types = {name: f"*{kind}" for name, kind in (each.split(":") for each in pointers.split())}
    types |= dict(each.split(":") for each in numbers.split())
    constants |= {"early": True} if "early" in kernel.arg_names else {}
    ptx = compile_kernel(kernel, types, constants, aligned, launch_pdl=True, num_warps=warps)
    # Nothing but weights is touched before the kernels before have ended.
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    assert wait, "the kernel does not wait for those before it"
    assert "st.global" not in before
    assert "atom." not in before
    if kernel.__name__ not in ("_one_row", "_few_rows", "_narrow"):
        assert "ld.global" not in before
    return ptx


def test_the_kernels_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The interpreter accepts what the compiler does not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from mstar.nn.ops import cuda
    from mstar.nn.ops import cuda_attention as attention

    same = "residual:bf16 delta:bf16 weight:bf16 out:bf16"
    sizes: dict[str, Any] = {"stride": 256, "delta_stride": 256, "size": 256, "block": 256}
    following = "rows:i32 next_lines:i32 next_of_row:i32 next_of_part:i32 next_row:i32 next_part:i32"
    for turn in (0, 256):  # lines of the weight that comes next
        asked = {"turn": turn, "line": 128}
        for code in (
            _compile(
                cuda._add_rms_norm, f"{same} next_weight:bf16", f"eps:fp32 {following}", added=3, **sizes, **asked
            ),
            _compile(
                cuda._silu_mul, "gate_up:bf16 out:bf16 next_weight:bf16", following, stride=512, size=256, block=256,
                **asked,
            ),
        ):  # fmt: skip
            assert code.count("prefetch.global.L2") == turn // 128  # of a thread; a warp's go at once
    assert _compile(cuda._add_layer_norm, f"{same} bias:bf16", "eps:fp32", added=True, **sizes)
    gated: dict[str, Any] = {"stride": 256, "gate_stride": 768, "size": 256, "block": 256}
    assert _compile(cuda._sigmoid_mul, "x:bf16 gate:bf16 out:bf16", **gated)
    for several in (False, True):
        angles = _compile(
            cuda._rotation,
            "positions:i64 inverse:fp32 axes:i64 cos:bf16 sin:bf16",
            "scale:fp32 stride:i32",
            **{"size": 128, "block": 128, "several": several},
        )
        assert "cos.approx" not in angles  # wrong beyond a few turns
    assert _compile(
        cuda._rotate_store,
        "heads:bf16 q:bf16 cos:bf16 sin:bf16 q_weight:bf16 k_weight:bf16 keys:bf16 values:bf16 places:i64",
        "eps:fp32",
        **{"stride": 512, "q_heads": 2, "kv_heads": 1, "size": 128, "group": 4, "half_block": 64},
        normed=True,
        stored=True,
    )
    assert _compile(
        cuda._store_rows,
        "keys:bf16 values:bf16 places:i64 k:bf16 v:bf16",
        **{"k_stride": 512, "v_stride": 512, "width": 128, "block": 128},
    )
    mixed = "heads:bf16 cos:bf16 sin:bf16 q_weight:bf16 k_weight:bf16 keys:bf16 values:bf16 out:bf16 "
    listed = "places:i64 indptr:i32 last:i32 indices:i32 shares:fp32 sums:fp32 counters:i32"
    shape = {"stride": 768, "group": 4, "kv_heads": 1, "size": 128, "page": 16, "scale": 0.1, "normed": True}
    way = {"softcap": 20.0, "window": 99, "tile": 16, "block": 64, "most_splits": 16, "part": 4}
    decoding = _compile(attention._attend_rows, mixed + listed, "eps:fp32 usual:i32 long:i32", **shape, **way)
    assert "mma.sync" in decoding
    assert "griddepcontrol.wait" in decoding
    from mstar.nn.ops import cuda_invariant as invariant

    pointers = "q:bf16 keys:bf16 values:bf16 tiles:i32 indices:i32 out:bf16 shares:fp32 sums:fp32 counters:i32"
    shape = {"stride": 768, "group": 3, "kv_heads": 2, "size": 128, "page": 16, "scale": 0.1, "softcap": 0.0}
    way = {"window": 99, "causal": True, "fields": 5, "tile": 16, "block": 64, "piece": 512}
    attending = _compile(invariant._attend, pointers, "most_pieces:i32 lines:i32", **shape, **way)
    assert "mma.sync" in attending
    # A loop before it stores, and its code may stand behind it: the barrier is in the straight line that ends in it.
    line = attending.partition("atom.global.gpu.acq_rel")[0].rpartition("$L__BB")[2]
    assert "bar.sync" in line
    assert "st.global" not in line.partition("bar.sync")[2]


@pytest.mark.parametrize("changed", [False, True])
def test_sampling_kernels_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: bool) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from mstar.nn.ops import cuda_brackets, cuda_sampling
    from mstar.nn.ops import cuda_filters as filters

    rows = "logits:bf16 slots:i64 floats:fp32 which:i64 words:i32 histories:i64 marks:i32 flags:u8 "
    sizes = {"columns": 7, "stride": 9000, "vocab": 9000, "blocks": 3, "changed": changed}
    block, lanes = {"block": 4096}, {"block_lanes": 4}
    blocks = "tops:fp32 sums:fp32 places:i32 "
    assert _compile(cuda_sampling._summarise, rows + blocks, **sizes, **block)
    drawn = "top_ks:i64 uniforms:fp64 thresholds:fp32 sums_filtered:fp32 ids:i64"
    assert _compile(cuda_sampling._choose, rows + blocks + drawn, filters=True, **sizes, **block, **lanes)
    rows += "top_ks:i64 bounds:fp64 found:i32 "
    assert _compile(cuda_brackets.bracket, rows + "tops:fp32 sums:fp32", **sizes, **lanes)
    kept = rows + "lines:i32 kept:fp32 weights:fp32 thresholds:fp32"
    assert _compile(filters._collect, kept + " tops:fp32", warps=8, **sizes, **block)
    assert _compile(filters._settle, kept + " until:i64", warps=8, **sizes, **block, **lanes)


def test_kernels_of_gated_delta_nets_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from mstar.nn.ops import cuda_delta as delta
    from mstar.nn.ops import cuda_delta_chunks as chunks
    from mstar.nn.ops import cuda_delta_step as steps

    heads: dict[str, Any] = {"v_heads": 4, "key": 128, "value": 128}
    layer = "mixed:bf16 a:bf16 b:bf16 weight:bf16 a_log:fp32 dt_bias:bf16 windows:bf16 states:fp32 out:bf16 "
    places = "gate:bf16 norm:bf16 offsets:i64 window_source:i64 window_target:i64 state_source:i64 state_target:i64"
    strides = {"stride": 1536, "a_stride": 1536, "b_stride": 1536, "window_stride": 9216, "state_stride": 131072}
    one = {"width": 4, "k_heads": 2, "gate_stride": 1536, "window_kept": True, "state_kept": True}
    options = {"groups": 4, "stages": 3, "line": 128}
    next_weight = " asking:i32 next_lines:i32 next_of_row:i32 next_of_part:i32 next_row:i32 next_part:i32"
    alone, streamed = (
        _compile(
            steps._delta_step, layer + places + " next_weight:bf16", "eps:fp32 rows:i32" + next_weight, aligned=True,
            warps=4, normed=True, single=True, resident=resident, turn=turn, **heads, **strides, **one, **options,
        )
        for resident, turn in ((False, 256), (True, 0))
    )  # fmt: skip
    assert alone.count("prefetch.global.L2") == 2  # of a thread, behind all that it stores
    assert alone.index("prefetch.global.L2") > alone.rindex("st.global")
    assert alone.count("st.global.v4") == 32  # a matrix of 64 kB: 128 numbers a thread
    # All of it is under way before anything that is computed is waited for.
    assert alone.index("ex2.approx") > [found.start() for found in re.finditer("ld.global.v4", alone)][31]
    assert streamed.count("cp.async.cg") >= 64  # two matrices on their way before the first is computed
    rows = "x:bf16 weight:bf16 bias:bf16 windows:bf16 out:bf16 source:i64 target:i64 row_of:i64 offsets:i64"
    sizes: dict[str, Any] = {
        "stride": 1536,
        "window_stride": 9216,
        "channels": 1024,
        "width": 4,
        "together": 16,
        "block": 256,
    }
    assert _compile(delta._conv, rows, "tokens:i32", biased=True, kept=True, **sizes)
    norm = {"stride": 512, "gate_stride": 1536, "heads": 4, "size": 128, "group": 8, "block": 128}
    assert _compile(delta._gated_rms_norm, "x:bf16 gate:bf16 weight:bf16 out:bf16", "eps:fp32", **norm)
    scratch = "solved:bf16 reads:bf16 writes:bf16 within:bf16 left:fp32 table:i32 "
    strides = {"q_stride": 1024, "k_stride": 1024, "v_stride": 1024, "a_stride": 1536, "b_stride": 1536}
    way: dict[str, Any] = {"chunk": 64, "longer": True, "precision": "tf32x3"}
    gates = "q:bf16 k:bf16 v:bf16 a:bf16 b:bf16 a_log:fp32 dt_bias:bf16 "
    prepared = _compile(
        chunks._prepare,
        gates + scratch,
        "most:i32",
        aligned=True,
        group=2,
        raw=True,
        solving="tf32",
        **heads,
        **strides,
        **way,
    )
    assert "wgmma" in prepared
    # Sizes that ptxas gets wrong with products of a warp group have none.
    small = {**heads, "key": 16, "value": 32, "warps": chunks.warps(16, 32)}
    assert "wgmma" not in _compile(
        chunks._prepare,
        gates + scratch,
        "most:i32",
        aligned=True,
        group=2,
        raw=True,
        solving="tf32",
        **small,
        **strides,
        **way,
    )
    scan = (
        scratch.replace("table:i32", "offsets:i64")
        + "first_chunks:i32 states:fp32 state_source:i64 state_target:i64 out:bf16"
    )
    sizes = {"state_stride": 131072, "columns": 32, "kept": True}
    scanned = _compile(chunks._scan, scan, aligned=True, **heads, **sizes, **way)
    assert "mma" in scanned


def test_kernels_of_modulated_transformers_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from mstar.nn.ops import cuda_modulate as modulate

    vectors = "gate:bf16 inner_weight:bf16 weight:bf16 scale:bf16 shift:bf16 kept:bf16 out:bf16"
    sizes = "tokens:i32 x_row:i32 x_token:i32 delta_row:i32 delta_token:i32 gate_row:i32 scale_row:i32 shift_row:i32"
    whole: dict[str, Any] = {"size": 3072, "block": 4096, "scaled": True, "shifted": True, "gated": True}
    for added, bounded, inner, kind in (
        (True, False, 0, 2),
        (True, True, 1, 1),
        (True, False, 0, 0),
        (False, False, 0, 2),
    ):
        norms = {"added": added, "bounded": bounded, "inner": inner, "inner_weighed": inner > 0, "kind": kind}
        assert _compile(
            modulate._add_modulate, f"x:bf16 delta:bf16 {vectors}", f"inner_eps:fp32 eps:fp32 {sizes}", aligned=True,
            weighed=kind == 1, **whole, **norms,
        )  # fmt: skip
    places = "tokens:i32 fused_row:i32 fused_token:i32 out_plane:i32 out_row:i32 out_token:i32"
    for planes in (2, 3):
        assert _compile(
            modulate._turn_heads, "fused:bf16 q_weight:bf16 k_weight:bf16 cos:fp32 sin:fp32 out:bf16",
            f"q_eps:fp32 k_eps:fp32 {places}", aligned=True, heads=24, planes=planes, size=128, group=8, block=128,
        )  # fmt: skip
    for width in (0, 3072):
        assert _compile(
            modulate._swiglu, "ahead:bf16 gate_up:bf16 out:bf16", "ahead_stride:i32 stride:i32", aligned=True,
            width=width, hidden=9216, block=1024,
        )  # fmt: skip


def test_group_norms_of_pictures_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """16 bytes are read at a time, also of channels that are no power of two."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from mstar.nn.ops import cuda_groupnorm as norm

    sizes: dict[str, Any] = {"channels": 96, "block": 128, "tile": 64}
    pointers = "x:bf16 added:bf16 means:fp32 squares:fp32"
    moments = _compile(norm._moments, pointers, "points:i32", aligned=True, tiles=4, adds=False, **sizes)
    assert re.search(r"cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10", moments), "fetched ahead"
    assert "ld.global" not in moments
    widths: dict[str, Any] = {"channels": 96, "width": 3, "joined": 128, "block": 4}
    pointers = "means:fp32 squares:fp32 weight:bf16 bias:bf16 factor:fp32 addend:fp32"
    assert _compile(norm._factors, pointers, "points:i32 piece:i32 pieces:i32 eps:fp32", turns=2, **widths)
    single = "piece:i32 pieces:i32 eps:fp32"  # an argument that is 1 is a constant to Triton
    assert _compile(norm._factors, pointers, single, points=1, turns=1, **widths)
    pointers = "x:bf16 added:bf16 factor:fp32 addend:fp32 out:bf16"
    applied = _compile(norm._apply, pointers, "points:i32", aligned=True, adds=True, activated=True, **sizes)
    summed = _compile(norm._add, "x:bf16 y:bf16 added:bf16 out:bf16", "points:i32", aligned=True, **sizes)
    for code in (applied, summed):
        assert "ld.global.v4" in code
        assert "st.global.v4" in code


def test_linear_kernels_compile_to_what_they_are_meant_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from mstar.nn.ops import cuda_linear

    pointers = "x:bf16 w:bf16 norm:bf16 bias:bf16 out:bf16 "
    sizes: dict[str, Any] = {"features": 1024, "k_size": 1024, "normed": True, "gated": True, "biased": False}
    one = _compile(
        cuda_linear._one_row, pointers, "eps:fp32", aligned=True, block_n=8, block_k=512, added=False, **sizes
    )
    before, _, _ = one.partition("griddepcontrol.wait")
    assert before.count("ld.global") == 4  # a tile of 8 kB: 64 bytes a thread, in pieces of 16
    assert "prefetch.global.L2" in before  # the next one
    few = _compile(
        cuda_linear._few_rows, pointers + "parts:fp32 counters:i32", "rows:i32 eps:fp32", aligned=True,
        x_stride=1024, out_stride=1024, block_n=64, block_m=16, block_k=128, split=2, stages=4, added=True, **sizes,
    )  # fmt: skip
    before, _, _ = few.partition("griddepcontrol.wait")
    assert "prefetch.global.L2" in before
    assert "wgmma.mma_async" in few
    assert few.count("cp.async.cg") >= 3 * 8  # three steps on their way before the first is used
    counted = few.index("atom.global.gpu.acq_rel")
    assert few.rindex("st.global", 0, counted) < few.rindex("bar.sync", 0, counted)  # parts are stored, by all threads
    assert "ld.global.cg" in few[counted:]  # not from a cache that other programs do not write to
    for rows in (8, 16):
        narrow = _compile(
            cuda_linear._narrow, pointers, "rows:i32 eps:fp32", aligned=True, x_stride=1024, out_stride=1024,
            block_n=16, block_m=rows, block_k=128, within=4, stages=3, added=True, **sizes,
        )  # fmt: skip
        before, _, _ = narrow.partition("griddepcontrol.wait")
        assert "prefetch.global.L2" in before
        assert narrow.count("cp.async.cg") >= 2 * 16  # two steps on their way, a row's 256 bytes in pieces of 16
        assert "mma.sync" in narrow
        assert "ldmatrix" in narrow  # weights do not pass through registers on their way
        assert "atom." not in narrow


def test_sums_over_ranks_are_sent_when_all_before_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And wait for the peers after everything that is sent, with words that are stored and loaded whole."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton.language as tl

    from mstar.nn.ops import cuda_sums

    pointers, numbers = "part:i32 out:i32 inboxes:i64 calls:i32", "words:i32 width:i32 turns:i32"
    for kind in (tl.bfloat16, tl.float32):
        for added, gathered in ((True, False), (False, False), (False, True)):
            code = _compile(
                cuda_sums._exchange, pointers, numbers, aligned=True, warps=8, room=1 << 18, rank=1, size=4,
                kind=kind, added=added, gathered=gathered, programs=256, block=256, native=True,
            )  # fmt: skip
            _, _, after = code.partition("griddepcontrol.wait")
            assert after.count("st.relaxed.sys.global.b64") == after.count("ld.relaxed.sys.global.b64") == 3
            assert after.rindex("st.relaxed.sys") < after.index("ld.relaxed.sys")
            counted = after.rindex("st.global.b32")
            assert after.rindex("bar.sync", 0, counted) > after.rindex("ld.relaxed.sys")


def test_cuda_tensors_go_to_the_kernels_and_others_do_not() -> None:
    from mstar.nn.ops import cuda, cuda_sampling, reference

    on_cuda: Any = SimpleNamespace(is_cpu=False, is_cuda=True)
    elsewhere: Any = SimpleNamespace(is_cpu=False, is_cuda=False)
    assert ops._ops(on_cuda) is cuda
    assert ops._ops(elsewhere) is reference
    assert ops.fused_sample(torch.device("cuda")) is cuda_sampling.sample
    assert ops.fused_sample(torch.device("cpu")) is None


def test_without_triton_torch_serves() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from mstar.nn import ops\n"
        "from types import SimpleNamespace as T\n"
        "assert ops._ops(T(is_cpu=False, is_cuda=True)) is ops.reference\n"
        "assert ops.fused_sample(torch.device('cuda')) is None\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("plain torch operations are used") == 1
    assert "triton" in done.stderr
