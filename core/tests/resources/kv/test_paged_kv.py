from __future__ import annotations

import pytest
import torch
from kv_reference import Driver, make_context

from mstar.nn import ops
from mstar.nn.config import RopeConfig
from mstar.nn.ops import HeadNorms
from mstar.nn.rotary import Rotary
from mstar.resources.base import IntegrityError, Owner, Row
from mstar.resources.paged_kv import PagedKV
from mstar.spec import resources as specs
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.request import EngineRequest

pytestmark = pytest.mark.usefixtures("attention_backend")

A, B, C, D = (Owner(name) for name in "ABCD")


def make(max_owners: int = 8, memory: int | None = None, **fields: object) -> PagedKV:
    defaults = {"layers": 2, "kv_heads": 2, "query_heads": 6, "head_dim": 8, "max_tokens": 96, "page_size": 4}
    spec = specs.PagedKV(**{**defaults, **fields})  # type: ignore[arg-type]
    return PagedKV("kv", spec, make_context(max_owners, memory))


def driver(resource: PagedKV) -> Driver:
    spec = resource.spec
    run = Driver(resource, spec.layers, spec.query_heads, spec.kv_heads, spec.head_dim)
    run.windows = spec.windows or run.windows
    return run


def start(resource: PagedKV, *owners: Owner, tokens: int = 96, salt: str = "") -> None:
    for owner in owners:
        assert resource.reserve(owner, resource.units(tokens))
        resource.open(owner, EngineRequest(id=owner.key, cache_salt=salt))


@pytest.mark.parametrize("windows", [(), (None, 5), (1, 7)])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (3, 1)])
def test_mixed_prefill_and_decode_equal_the_reference(windows: tuple[int | None, ...], heads: tuple[int, int]) -> None:
    resource = make(windows=windows, query_heads=heads[0], kv_heads=heads[1])
    run = driver(resource)
    start(resource, A, B, C, D)
    run.step([Row(A, 13), Row(B, 3), Row(C, 1)])
    run.step([Row(A, 1), Row(B, 1), Row(C, 1), Row(D, 21)])
    for _ in range(5):
        run.step([Row(D, 1), Row(A, 1), Row(C, 1), Row(B, 1)])
    run.step([Row(A, 1), Row(C, 1), Row(B, 3), Row(D, 17)])
    run.step([Row(A, 4), Row(C, 4), Row(B, 4), Row(D, 9)])
    resource.check([A, B, C, D])


@pytest.mark.parametrize("frozen", [False, True])
def test_fused_heads_are_attended_to_like_q_k_and_v(frozen: bool) -> None:
    resource, twin = make(windows=(3, None)), make(windows=(3, None))
    rotary, norms = Rotary(8, RopeConfig(theta=100.0)), HeadNorms(torch.rand(8), torch.rand(8), 1e-6)
    for held in (resource, twin):
        start(held, A, B)
    for rows in ([Row(A, 5), Row(B, 2)], [Row(A, 1), Row(B, 1)]):
        views = [held.plan(rows, frozen) for held in (resource, twin)]
        rotation = rotary(views[0].positions, torch.float32)
        for layer in range(2):
            heads = torch.randn(len(views[0].positions), 10, 8)
            q, k = ops.add_rms_norm(heads[:, :6], None, norms.q, 1e-6), heads[:, 6:8]
            q, k = rotation.apply(q), rotation.apply(ops.add_rms_norm(k, None, norms.k, 1e-6))
            wanted = views[1].attend(layer, q, k, heads[:, 8:].clone())
            got = views[0].attend_heads(layer, heads, 6, rotation, norms)
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
        for held in (resource, twin):
            held.commit(rows, frozen)
    assert torch.allclose(resource.memory.data, twin.memory.data, atol=1e-6)


@pytest.mark.parametrize("windows", [(), (4, 9)])
@pytest.mark.parametrize("frozen", [False, True])
def test_bidirectional_steps(frozen: bool, windows: tuple[int, ...]) -> None:
    resource = make(windows=windows)
    run = driver(resource)
    start(resource, A, B, C)
    run.step([Row(A, 6), Row(B, 11)])
    run.step([Row(A, 5), Row(B, 5), Row(C, 5)], causal=False, frozen=frozen)
    run.step([Row(A, 12), Row(B, 2), Row(C, 9)], causal=False, frozen=frozen)
    run.step([Row(A, 1), Row(B, 1), Row(C, 1)])


def test_frozen_causal_steps_forget_their_tokens() -> None:
    resource = make(windows=(None, 6))
    run = driver(resource)
    start(resource, A, B)
    run.step([Row(A, 7), Row(B, 1)])
    used = resource.usage()
    run.step([Row(A, 3), Row(B, 30)], frozen=True)
    run.step([Row(A, 3), Row(B, 3)], frozen=True)
    assert resource.usage() == used
    run.step([Row(A, 1), Row(B, 2)])


def test_softcap_and_scale() -> None:
    run = driver(make(windows=(None, 5)))
    start(run.resource, A, B)  # type: ignore[arg-type]
    run.step([Row(A, 9), Row(B, 2)], softcap=1.5)
    run.step([Row(A, 1), Row(B, 1)], softcap=1.5, scale=0.7)
    run.step([Row(A, 4), Row(B, 4)], softcap=0.9, causal=False)


def test_a_failed_step_can_be_repeated_with_fewer_rows() -> None:
    resource = make()
    run = driver(resource)
    start(resource, A, B)
    run.step([Row(A, 6), Row(B, 5)])
    run.step([Row(A, 3), Row(B, 9)], fail=True)
    run.step([Row(B, 9)])
    run.step([Row(A, 1), Row(B, 1)])
    resource.check([A, B])


def test_a_row_does_not_depend_on_its_companions() -> None:
    alone, among = make(), make()
    torch.manual_seed(0)
    q, k, v = torch.randn(40, 6, 8), torch.randn(40, 2, 8), torch.randn(40, 2, 8)
    results = []
    for resource, others in ((alone, []), (among, [B, C, D])):
        start(resource, A, *others)
        lengths = {B: 17, C: 2, D: 6}
        outs = []
        for step in range(20):
            rows = [Row(A, 1)] + [Row(other, lengths[other] if step == 0 else 1) for other in others]
            total = sum(row.length for row in rows)
            packed = [torch.cat((t[step : step + 1], torch.randn(total - 1, *t.shape[1:]))) for t in (q, k, v)]
            outs.append(resource.plan(rows).attend(0, *packed)[0])
            resource.commit(rows)
        results.append(torch.stack(outs))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)


def test_another_requests_nan_stays_its_own() -> None:
    resource = make()
    start(resource, A, B, C)
    rows = [Row(A, 3), Row(B, 3), Row(C, 7)]
    q, k, v = torch.randn(13, 6, 8), torch.randn(13, 2, 8), torch.randn(13, 2, 8)
    k[:3], v[:3] = float("nan"), float("nan")
    resource.plan(rows).attend(0, q, k, v)
    resource.commit(rows)
    out = resource.plan([Row(o) for o in (A, B, C)]).attend(0, q[3:6], k[3:6], v[3:6])
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()


def test_cached_prefix_is_taken_over_and_salted() -> None:
    resource = make()
    run = driver(resource)
    prompt = list(range(100, 111))
    start(resource, A)
    run.step([Row(A, 11, ids=prompt)])
    run.step([Row(A, 1, ids=[7])])
    past = run.history.pop(A)
    resource.close(A)
    resource.check([])
    assert resource.usage().used == 0
    assert resource.usage().cached == 3

    start(resource, B)
    ids = [*prompt, 7, 8, 9]
    assert resource.match(B, ids) == 12  # the generated token is cached too
    assert resource.match(B, ids[:12]) == 8  # never all of it
    assert resource.match(B, [1, *ids]) == 0
    resource.skip(B, ids[:12])
    run.history[B] = [layer[:, :12] for layer in past]
    run.step([Row(B, 2, ids=ids[12:])])
    run.step([Row(B, 1)])
    start(resource, C, salt="another tenant")
    assert resource.match(C, ids) == 0
    resource.check([B, C])


def test_siblings_share_pages_and_copy_on_write() -> None:
    resource = make()
    run = driver(resource)
    prompt = list(range(10))
    start(resource, A)
    run.step([Row(A, 10, ids=prompt)])
    start(resource, B, C)
    for sibling in (B, C):
        assert resource.match(sibling, prompt, A) == 9
        resource.skip(sibling, prompt[:9], A)
        run.history[sibling] = [layer[:, :9] for layer in run.history[A]]
    assert resource.pool.table(A)[:3] == resource.pool.table(B)
    resource.check([A, B, C])
    run.step([Row(A, 1, ids=[50]), Row(B, 1, ids=[9]), Row(C, 1, ids=[9])])
    assert resource.pool.table(A)[:2] == resource.pool.table(B)[:2]
    assert len({resource.pool.table(owner)[2] for owner in (A, B, C)}) == 3
    for _ in range(4):
        run.step([Row(A), Row(B), Row(C)])
    resource.check([A, B, C])
    resource.close(A)
    run.step([Row(B), Row(C)])
    resource.check([B, C])


def test_a_sibling_that_is_behind_or_different_is_not_shared() -> None:
    resource = make()
    run = driver(resource)
    start(resource, A, B)
    run.step([Row(A, 5, ids=[1, 2, 3, 4, 5])])
    assert resource.match(B, [1, 2, 3, 4, 5, 6, 7], A) == 4
    assert resource.match(B, [1, 2, 3, 4, 5, 6], A) == 5
    assert resource.match(B, [1, 2, 9, 4, 5, 6], A) == 0
    assert resource.match(B, [1, 2, 3, 4, 5, 6], D) == 4


def test_inference_mode_and_normal_mode_share_a_resource() -> None:
    resource = make()
    run = driver(resource)
    start(resource, A, B)
    with torch.inference_mode():
        run.step([Row(A, 5), Row(B, 8)])
        run.step([Row(A), Row(B)])
    run.step([Row(A), Row(B)])
    with torch.inference_mode():
        run.step([Row(A, 3), Row(B, 3)])


def test_growing_past_the_promise_changes_nothing() -> None:
    resource = make()
    start(resource, A, tokens=8)
    start(resource, B, tokens=4)
    with pytest.raises(IntegrityError, match="reserved"):
        resource.plan([Row(A, 8), Row(B, 5)])
    assert not resource.pool.table(A)
    resource.check([A, B])


def test_sizing() -> None:
    assert make(max_owners=3).capacity() == 72
    token = 2 * 2 * 2 * 8 * 4
    assert make(memory=token * 100).capacity() == 24  # and the page of padding rows
    with pytest.raises(SetupError, match=r"max_tokens=96 needs 24 pages.*holds 19 pages.*memory budget"):
        make(memory=token * 80)
    with pytest.raises(SetupError, match="tokens=64"):
        make(tokens=64)
    with pytest.raises(SetupError, match="more than the memory budget"):
        make(tokens=960, memory=token * 100)
    with pytest.raises(SetupError, match="3 windows for 2 layers"):
        make(windows=(1, 2, 3))
    with pytest.raises(SetupError, match="float31"):
        make(dtype="float31")


def test_a_full_pool_says_wait_and_a_session_goes_on() -> None:
    resource = make(tokens=96)
    start(resource, A, tokens=60)
    assert not resource.reserve(B, resource.units(60))
    resource.check([A])
    assert resource.reserve(A, resource.units(90))
    run = driver(resource)
    run.step([Row(A, 10)])
    resource.open(A, EngineRequest(id="later"))
    run.step([Row(A, 70)])
    resource.close(A)
    with pytest.raises(IntegrityError):
        resource.close(A)
    resource.check([])


def test_a_session_does_not_grow_past_what_one_context_may_hold() -> None:
    resource = make(tokens=400)  # the pool could hold it; the context may not
    start(resource, A, tokens=80)
    driver(resource).step([Row(A, 80)])
    with pytest.raises(RequestError, match="holds 80 tokens") as caught:
        resource.reserve(A, resource.units(40))
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert resource.reserve(A, resource.units(16))
    resource.close(A)
    resource.check([])


def test_memory_of_another_dtype_than_the_model() -> None:
    resource = make(dtype="bfloat16")
    start(resource, A, B)
    q, k, v = torch.randn(12, 6, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    rows = [Row(A, 5), Row(B, 7)]
    resource.plan(rows).attend(0, q, k, v)
    resource.commit(rows)
    out = resource.plan([Row(A), Row(B)]).attend(0, q[:2], k[:2], v[:2])
    assert out.dtype == torch.float32
    exact = make()
    start(exact, A, B)
    exact.plan(rows).attend(0, q, k, v)
    exact.commit(rows)
    torch.testing.assert_close(out, exact.plan([Row(A), Row(B)]).attend(0, q[:2], k[:2], v[:2]), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        ("_held", "A holds 6 tokens of 'kv', but 5 by the pool's books"),
        ("_room", "A writes up to 9 tokens of 'kv' into 2 pages"),
        ("_tables", "the page table of A in 'kv' is not the pool's"),
    ],
)
def test_the_second_copy_of_the_books_is_held_against_the_pools(spoil: str, fault: str) -> None:
    resource = make()
    start(resource, A)
    driver(resource).step([Row(A, 5)])
    assert resource.reserve(B, 4)  # its place is another's no longer, and not open yet
    resource.check([A, B])
    getattr(resource, spoil)[resource._lines[A]] += 1
    with pytest.raises(IntegrityError, match=fault.replace("A ", ".*A.* ", 1)):
        resource.check([A, B])


def test_the_place_of_an_owner_that_left_begins_with_nothing() -> None:
    resource = make(max_owners=1)
    start(resource, A)
    driver(resource).step([Row(A, 5)])
    resource.close(A)
    assert resource.reserve(B, 4)
    resource.check([B])
