"""Attention within windows: the faster kernel where it is right, and the other one where it is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mstar.nn import windows
from mstar.nn.windows import attend_windows

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def parts(rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Views, as of one projection."""
    q, k, v = torch.randn(rows, 9, 3, 2, 8, generator=torch.Generator().manual_seed(rows)).permute(2, 0, 3, 1, 4)
    return q, k, v


def offered(monkeypatch: pytest.MonkeyPatch, kernel: Attend) -> list[int]:
    """As if the device had *kernel*; the rows of its calls."""
    calls: list[int] = []

    def called(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(q.shape[0])
        return kernel(q, k, v)

    monkeypatch.setattr(windows, "_able", lambda q: True)
    monkeypatch.setattr(windows, "_cudnn", called)
    monkeypatch.setattr(windows, "_right", {})
    return calls


def test_without_a_gpu_torch_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*given: Tensor) -> Tensor:
        raise AssertionError

    monkeypatch.setattr(windows, "_cudnn", never)
    q, k, v = (x.to(torch.bfloat16) for x in parts())
    assert torch.equal(attend_windows(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_a_kernel_that_is_right_is_tried_once_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = offered(monkeypatch, F.scaled_dot_product_attention)
    for rows in (2, 3):
        q, k, v = parts(rows)
        assert torch.equal(attend_windows(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert calls == [1, 2, 3]  # one window for the check


def missing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError("no execution plan\nsupports it")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (missing, "RuntimeError: no execution plan"),
        (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), "it differs by"),
        (lambda q, k, v: q * float("nan"), "it differs by nan"),
    ],
)
def test_a_kernel_that_is_not_right_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernel: Attend, reason: str
) -> None:
    calls = offered(monkeypatch, kernel)
    q, k, v = parts()
    with caplog.at_level(logging.WARNING, "mstar.nn.windows"):
        for _ in range(2):
            assert torch.equal(attend_windows(q, k, v), F.scaled_dot_product_attention(q, k, v))
    assert calls == [1]
    (said,) = caplog.messages
    assert reason in said


def test_a_caller_that_rules_cudnn_out_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    on_cuda: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda", 0))
    assert windows._able(on_cuda)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)  # as attention over rows of any length has it
    try:
        assert windows._able(on_cuda)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert not windows._able(on_cuda)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        assert windows._able(on_cuda)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="there is no such GPU"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("positions", "dim"), [(1500, 64), (4608, 128)])  # Whisper's, FLUX.2's at 1024 x 1024
def test_on_a_gpu_a_capture_holds_what_plain_calls_found_right(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, positions: int, dim: int
) -> None:
    monkeypatch.setattr(windows, "_right", {})
    fused = torch.randn(3, positions, 3, 4, dim, device="cuda").to(dtype)
    attend_windows(*fused.permute(2, 0, 3, 1, 4))
    assert list(windows._right.values()) == [True]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend_windows(*fused.permute(2, 0, 3, 1, 4))
    fused.normal_()
    graph.replay()
    exact = F.scaled_dot_product_attention(*fused.float().permute(2, 0, 3, 1, 4))
    assert (got.float() - exact).abs().max() <= 2e-2 * exact.abs().max()
