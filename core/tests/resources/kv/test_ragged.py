from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kv_reference import make_context, reference

from mstar.resources.attention import AttentionBackend, AttentionNeed, pick_backend
from mstar.resources.attention.torch_sdpa import TorchAttention
from mstar.resources.base import IntegrityError, Owner, Row
from mstar.resources.ragged import RaggedAttention
from mstar.resources.staging import Lane
from mstar.spec import resources as specs
from mstar.spec.errors import MstarError, SetupError
from mstar.spec.request import EngineRequest

pytestmark = pytest.mark.usefixtures("attention_backend")

A, B = Owner("A"), Owner("B")


def make(heads: int = 4, kv_heads: int = 4) -> RaggedAttention:
    spec = specs.RaggedAttention(heads=heads, kv_heads=kv_heads, head_dim=8)
    return RaggedAttention("ragged", spec, make_context())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("lengths", [[5], [3, 3, 3], [2, 7, 2, 1, 7], [1, 1], [4, 0, 4], []])
def test_segments_equal_the_reference(lengths: list[int], heads: tuple[int, int], causal: bool) -> None:
    resource = make(*heads)
    total = sum(lengths)
    q, k, v = torch.randn(total, heads[0], 8), torch.randn(total, heads[1], 8), torch.randn(total, heads[1], 8)
    by_rows = resource.plan([Row(A, n) for n in lengths]).attend(q, k, v, causal=causal, scale=0.5)
    by_segments = resource.plan([Row(A, total)]).attend(q, k, v, causal=causal, scale=0.5, lengths=lengths)
    assert by_rows.shape == q.shape
    for out in (by_rows, by_segments):
        for part, qs, ks, vs in zip(*(t.split(lengths) for t in (out, q, k, v)), strict=True):
            wanted = reference(qs.double(), ks.double(), vs.double(), 0, causal=causal, scale=0.5)
            torch.testing.assert_close(part.double(), wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_windows_of_one_length(heads: tuple[int, int]) -> None:
    resource = make(*heads)
    q, k, v = torch.randn(3, 5, heads[0], 8), torch.randn(3, 5, heads[1], 8), torch.randn(3, 5, heads[1], 8)
    view = resource.plan([Row(A), Row(B), Row(A)])
    for some in (slice(3), slice(1)):
        out = view.attend_windows(q[some], k[some], v[some])
        for got, qs, ks, vs in zip(out, q, k, v, strict=False):
            wanted = reference(qs.double(), ks.double(), vs.double(), 0, causal=False)
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=2e-6)


def test_captured_steps_have_windows_only_where_plans_of_them_stay() -> None:
    class Refilled(TorchAttention):
        name, priority, capturable_beside = "refilled", 99, True

    context = replace(make_context(), attention_backends=[Refilled()])
    resource = RaggedAttention("ragged", specs.RaggedAttention(4, 4, 8), context)
    context.stage.begin(Lane(2, torch.device("cpu"), {"ragged": ()}))
    q = torch.randn(2, 5, 4, 8)
    with pytest.raises(MstarError, match="attention within windows"):
        resource.plan([Row(A), Row(B)]).attend_windows(q, q, q)


def test_books() -> None:
    resource = make()
    assert resource.reserve(A, resource.units(10_000))
    resource.open(A, EngineRequest(id="A"))
    resource.check([A])
    assert resource.match(A, [1, 2]) is None
    resource.close(A)
    resource.check([])
    for call in (lambda: resource.close(A), lambda: resource.check([B])):
        with pytest.raises(IntegrityError):
            call()


def test_segments_must_add_up() -> None:
    q = torch.randn(4, 4, 8)
    with pytest.raises(MstarError, match="5 items in all for 4"):
        make().plan([Row(A, 4)]).attend(q, q, q, lengths=[2, 3])


class Picky(TorchAttention):
    name = "picky"
    priority = 10

    def supports(self, need: AttentionNeed) -> str | None:
        return None if need.device.type == "cuda" else f"needs CUDA, not {need.device.type}"


@pytest.mark.parametrize(("device", "warned"), [("cpu", False), ("meta", False), ("cuda:1", True)])
def test_a_backend_that_is_passed_over_is_news_on_a_gpu_only(
    device: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(TorchAttention):
        name, priority = "refusing", 10

        def supports(self, need: AttentionNeed) -> str | None:
            return "never"

    need = AttentionNeed("ragged", torch.device(device), torch.float32, 4, 2, 8)
    assert pick_backend([TorchAttention(), Refusing()], need).name == "torch_sdpa"
    assert ("refusing: never" in caplog.text) is warned


def test_pick_backend_prefers_priority_and_lists_reasons() -> None:
    need = AttentionNeed("ragged", torch.device("cpu"), torch.float32, 4, 2, 8)
    on_cuda = AttentionNeed("ragged", torch.device("cuda"), torch.float32, 4, 2, 8)
    backends: list[AttentionBackend] = [TorchAttention(), Picky()]
    assert pick_backend(backends, need).name == "torch_sdpa"
    assert pick_backend(backends, on_cuda).name == "picky"
    assert pick_backend(backends, on_cuda, "torch_sdpa").name == "torch_sdpa"
    with pytest.raises(SetupError, match="picky: needs CUDA, not cpu"):
        pick_backend(backends, need, "picky")
    with pytest.raises(SetupError, match="did you mean 'picky'"):
        pick_backend(backends, need, "pickky")
    with pytest.raises(SetupError, match="torch_sdpa: 5 query heads are not a multiple of 2"):
        pick_backend(backends, AttentionNeed("kv", torch.device("cpu"), torch.float32, 5, 2, 8))
