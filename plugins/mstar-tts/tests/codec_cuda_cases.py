"""The codec's Triton kernels against plain torch in float32, from the same rounded inputs.

Run by ``test_codec_cuda.py`` in Triton's interpreter, on the CPU; on a machine with a GPU ``pytest`` of this file runs
them there.
"""

from __future__ import annotations

import os

import pytest
import torch

from mstar_tts import codec_cuda, codec_ops

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# Of the largest value. The interpreter cuts bfloat16 off where a GPU rounds to nearest.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 1023), (1, 5, 1024), (3, 2, 2500), (2, 4, 0)])
def test_snake(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(1)
    x = (torch.randn(shape) * 3).to(DEVICE, dtype)
    frequency, gain = ((torch.rand(shape[1]) * 4 + 0.2).to(DEVICE, dtype) for _ in range(2))
    got = codec_cuda.snake(x, frequency, gain)
    exact = codec_ops.plain_snake(x.float(), frequency.float(), gain.float())
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), exact, rtol=ROUNDING[dtype], atol=10 * ROUNDING[dtype])


def test_snake_of_a_signal_that_lies_strided() -> None:
    x = torch.randn(2, 40, 6).to(DEVICE).transpose(1, 2)[:, :, 3:]
    frequency, gain = torch.rand(6).to(DEVICE) + 0.5, torch.rand(6).to(DEVICE) + 0.5
    exact = codec_ops.plain_snake(x, frequency, gain)
    torch.testing.assert_close(codec_cuda.snake(x, frequency, gain), exact, rtol=1e-5, atol=1e-5)
