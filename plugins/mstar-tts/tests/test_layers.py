"""Kokoro's layers: padding changes nothing, kernels are the plain operations, transforms are torch's."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from mstar.nn.ops import cpu_kernels_fault
from mstar_tts.kokoro import ops
from mstar_tts.kokoro.layers import BiLSTM, Conv, Upsample, keep
from mstar_tts.kokoro.prosody import align
from mstar_tts.kokoro.spectrum import Spectrum
from mstar_tts.noise import normal

LENGTHS = torch.tensor([130, 1, 77])


@pytest.fixture(autouse=True)
def _settled() -> None:
    torch.manual_seed(1)


def filled(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.requires_grad_(False)


@pytest.mark.skipif(cpu_kernels_fault() is not None, reason="numba kernels do not work here")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_the_fused_norms_are_the_plain_ones(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = (torch.randn(3, 130, 24) * 2 + 3).to(dtype)
    scale, shift, alpha = torch.rand(3, 24) + 0.5, torch.randn(3, 24), torch.rand(24) * 5 + 0.1
    fused = ops.adain_leaky(x, LENGTHS, scale, shift), ops.adain_snake(x, LENGTHS, scale, shift, alpha)
    monkeypatch.setattr(ops, "_kernels", lambda x: None)
    wide = x.float()
    plain = ops.adain_leaky(wide, LENGTHS, scale, shift), ops.adain_snake(wide, LENGTHS, scale, shift, alpha)
    for one, other in zip(fused, plain, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.float(), other, atol=tolerance, rtol=tolerance)


def test_the_norm_is_torchs_over_valid_frames() -> None:
    x, scale, shift = torch.randn(3, 130, 8), torch.rand(3, 8), torch.randn(3, 8)
    y = ops.adaptive_norm(x, LENGTHS, scale, shift)
    for row, length in enumerate(LENGTHS.tolist()):
        if length > 1:
            alone = nn.functional.instance_norm(x[row : row + 1, :length].mT).mT * scale[row] + shift[row]
            torch.testing.assert_close(y[row : row + 1, :length], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kernel", "stride", "dilation"), [(3, 1, 1), (11, 1, 5), (12, 6, 1), (1, 1, 1)])
def test_convolutions_with_their_weight_norm(kernel: int, stride: int, dilation: int) -> None:
    conv = Conv(6, 4, kernel, stride=stride, dilation=dilation)
    filled(conv)
    weight = torch._weight_norm(conv.weight_v, conv.weight_g, 0)
    x = torch.randn(2, 50, 6)
    wanted = nn.functional.conv1d(x.mT, weight, conv.bias, stride, conv.padding, dilation).mT
    conv.settle(torch.float32)
    assert {name for name, _ in conv.named_parameters()} == {"weight", "bias"}
    torch.testing.assert_close(conv(x), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(cpu_kernels_fault() is not None, reason="numba kernels do not work here")
@pytest.mark.parametrize("length", [1, 2, 31, 64, 257])
@pytest.mark.parametrize(("kernel", "dilation"), [(7, 1), (7, 3), (7, 5), (11, 1), (11, 3), (11, 5)])
def test_convolutions_of_many_taps_with_fewer_products(kernel: int, dilation: int, length: int) -> None:
    conv = Conv(64, 64, kernel, dilation=dilation)
    filled(conv)
    weight = torch._weight_norm(conv.weight_v, conv.weight_g, 0) / 30
    conv.weight_g.div_(30)
    x = torch.randn(2, length, 64)
    wanted = nn.functional.conv1d(x.mT, weight, conv.bias, 1, conv.padding, dilation).mT
    conv.settle(torch.float32)
    assert conv.fast is not None
    torch.testing.assert_close(conv(x), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kernel", "rate"), [(20, 10), (12, 6), (4, 2), (6, 2)])
def test_upsampling_is_a_transposed_convolution(kernel: int, rate: int) -> None:
    up = Upsample(6, 4, kernel, rate)
    filled(up)
    weight = torch._weight_norm(up.weight_v, up.weight_g, 0)
    x = torch.randn(2, 9, 6)
    wanted = nn.functional.conv_transpose1d(x.mT, weight, up.bias, rate, (kernel - rate) // 2).mT
    up.settle(torch.float32)
    torch.testing.assert_close(up(x), wanted, atol=1e-5, rtol=1e-5)


def test_the_lstm_of_padded_rows_is_torchs_of_each_alone() -> None:
    lstm, torchs = BiLSTM(5, 4), nn.LSTM(5, 4, bidirectional=True, batch_first=True)
    filled(lstm)
    torchs.load_state_dict(lstm.state_dict())
    x = torch.randn(3, 130, 5)
    y = lstm(x, LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        alone = torchs(x[row : row + 1, :length])[0][0].detach()
        torch.testing.assert_close(y[row, :length], alone, atol=1e-6, rtol=1e-5)
        assert not y[row, length:].any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_an_lstms_weights_lie_as_cudnn_reads_them() -> None:
    """It warns of others, and warnings are errors."""
    lstm = BiLSTM(5, 4)
    filled(lstm)
    wanted = lstm(x := torch.randn(3, 130, 5), LENGTHS)
    lstm.cuda().settle(torch.float32)
    torch.testing.assert_close(lstm(x.cuda(), LENGTHS.cuda()).cpu(), wanted, atol=1e-5, rtol=1e-5)


def test_transforms_of_padded_rows_are_torchs_of_each_alone() -> None:
    spectrum, lengths = Spectrum(20, 5), torch.tensor([400, 25, 300])
    sound = keep(torch.randn(3, 400, 1), lengths)[:, :, 0]
    both = spectrum(sound, lengths)
    back = spectrum.inverse(both[:, :, :11].contiguous(), both[:, :, 11:].contiguous(), lengths // 5 + 1)
    for row, length in enumerate(lengths.tolist()):
        mine = sound[row, :length]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = torch.stft(mine, 20, 5, window=torch.hann_window(20), return_complex=True).T
        frames = len(wanted)
        torch.testing.assert_close(both[row, :frames, :11], wanted.abs(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(both[row, 1:frames, 11:], wanted[1:].angle(), atol=1e-4, rtol=1e-5)
        assert not both[row, frames:].any()
        torch.testing.assert_close(back[row, :length], mine, atol=1e-5, rtol=1e-5)


def test_noise_is_normal_and_follows_from_key_and_place() -> None:
    keys = torch.tensor([1, -(2**63), 2**63 - 1])
    drawn = normal(keys, 60_001)
    assert drawn.shape == (3, 60_001)
    assert drawn.isfinite().all()
    assert drawn.mean().abs() < 0.01
    assert abs(drawn.std() - 1) < 0.01
    assert abs((drawn.abs() > 1.96).double().mean() - 0.05) < 0.003
    correlations: Tensor = torch.corrcoef(torch.cat([drawn, drawn.roll(1, 1)]))
    assert (correlations - torch.eye(6)).abs().max() < 0.02
    assert torch.equal(normal(keys[1:2], 100)[0], drawn[1, :100])


def test_aligning_does_not_ask_the_device() -> None:
    """How many frames there are is said; a device without numbers could not tell."""
    features, frames = torch.randn(3, 2), torch.tensor([2, 0, 1])
    spread = align(features, frames, 3, 5)
    assert torch.equal(spread, torch.stack([features[0], features[0], features[2], *torch.zeros(2, 2)]))
    assert align(features.to("meta"), frames.to("meta"), 3, 5).shape == (5, 2)
