"""How pictures are decoded: together as far as memory goes, channels last, captured where that is cheap."""

from __future__ import annotations

import math
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers_pipelines import KINDS, model_of, node_of, step
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mstar.nn import ops
from mstar.testing.compiling import fresh_compiler
from mstar_diffusion.vae import blocks
from mstar_diffusion.vae.blocks import Decoder, doubled
from mstar_diffusion.vae.nodes import VaeDecoder
from mstar_diffusion.z_image.model import ZImage


def on_meta(folder: Path) -> tuple[VaeDecoder, list[int]]:
    """A decoder that is nowhere, as on a GPU but for the numbers, and the rows of each decode from now on."""
    node: VaeDecoder = model_of(folder, ZImage).on_meta("vae_decoder")
    seen: list[int] = []
    node.decoder.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    return node, seen


def latents(rows: int, side: int = 8) -> Tensor:
    return torch.empty(rows, 4, side, side, device="meta")


@pytest.mark.parametrize(
    ("fits", "together"), [(math.inf, [5]), (5.0, [5]), (4.9, [4, 1]), (2.5, [2, 2, 1]), (1.0, [1] * 5)]
)
def test_as_many_as_fit_into_memory(z_image: Path, fits: float, together: list[int]) -> None:
    node, seen = on_meta(z_image)
    picture = node.decode(latents(5), fits * node.bytes_of(latents(1)))
    assert (seen, tuple(picture.shape)) == (together, (5, 3, 64, 64))


@pytest.mark.parametrize(("tiling", "tiled"), [("auto", True), ("always", True), ("never", False)])
def test_tiles_where_not_one_fits(z_image: Path, tiling: Any, tiled: bool) -> None:
    """Two tiles by two, of one picture after the other; as small as a tile, it is decoded whole."""
    node, seen = on_meta(z_image)
    node.tiling, node.tile = tiling, 48
    room = 0.9 * node.bytes_of(latents(1))
    assert node.decode(latents(2), room).shape == (2, 3, 64, 64)
    assert seen == [1] * (8 if tiled else 2)
    seen.clear()
    assert node.decode(latents(2, 6), 0).shape == (2, 3, 48, 48)
    assert seen == [1, 1]


def test_a_captured_step_keeps_little_and_asks_the_device_nothing(
    z_image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = node_of(z_image, ZImage, "vae_decoder")
    tokens = torch.randn(1, 4, 4, 16, generator=torch.Generator().manual_seed(1))
    plain = node.forward(step(), tokens)["image"]
    asked = []

    def room(latent: Tensor) -> float:
        asked.append(latent)
        return 7.9 * node.bytes_of(latent)

    monkeypatch.setattr(node, "room", room)
    on_lane = step()
    on_lane.lane = SimpleNamespace(trial=True)
    with pytest.raises(RuntimeError, match=r"1 of 64 x 64 pixels would hold .* of memory"):
        node.forward(on_lane, tokens)
    assert asked
    asked.clear()
    on_lane.lane.trial = False
    assert torch.equal(node.forward(on_lane, tokens)["image"], plain)
    assert not asked


class Held(TorchDispatchMode):
    """Bytes of the tensors that operations made and nobody has let go of."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not any(isinstance(x, Tensor) and _same(x, made) for x in args):
            size = made.untyped_storage().nbytes()
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(made.untyped_storage(), self._gone, size)
        return made

    def _gone(self, size: int) -> None:
        self.now -= size


def _same(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.parametrize("widths", [(16, 32, 64, 64), (12, 24, 48, 48), (32, 32), (8, 64, 64), (64, 16, 8), (8,)])
def test_what_a_decode_holds_is_known(monkeypatch: pytest.MonkeyPatch, widths: tuple[int, ...]) -> None:
    """With a norm that is one operation, as the fused one is; beside maps there are a few numbers a channel."""
    monkeypatch.setattr(ops, "group_norm", lambda x, *more: torch.clone(x))
    decoder = Decoder(3, 4, widths, 2, 4, attention=False).requires_grad_(False)
    latent = torch.randn(1, 4, 16, 16)
    with Held() as held:
        picture = decoder(latent)
    pixels = picture.shape[2] * picture.shape[3]
    assert held.most / 4 / pixels == pytest.approx(decoder.numbers_at_peak(), rel=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_channels_stay_last(request: pytest.FixtureRequest, kind: str) -> None:
    """As weights and pictures are on a GPU: no convolution has to turn its input, and the picture is the same."""
    node = node_of(request.getfixturevalue(kind), KINDS[kind], "vae_decoder")
    latent = node.latents(torch.randn(2, 6, 4, 16, generator=torch.Generator().manual_seed(2)))
    right = node.whole(latent)
    node.to(memory_format=torch.channels_last)
    turned = []

    def look(module: nn.Module, args: tuple[Tensor]) -> None:
        turned.append(args[0].is_contiguous(memory_format=torch.channels_last))

    for module in node.decoder.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(look)
    got = node.whole(latent.contiguous(memory_format=torch.channels_last))
    assert len(turned) > 10
    assert all(turned)
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_biases_may_be_added_behind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """As on a GPU, where norms and sums take them along: the picture is the same."""
    node = node_of(request.getfixturevalue(kind), KINDS[kind], "vae_decoder")
    latent = node.latents(torch.randn(1, 6, 4, 16, generator=torch.Generator().manual_seed(2)))
    right, asked = node.whole(latent), []
    monkeypatch.setattr(blocks, "_folds_biases", lambda x: asked.append(x) or True)
    torch.testing.assert_close(node.whole(latent), right, rtol=1e-4, atol=1e-5)
    assert len(asked) > 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("channels", [1, 3, 4, 24])
@pytest.mark.parametrize("last", [False, True])
def test_pictures_are_doubled(dtype: torch.dtype, channels: int, last: bool) -> None:
    x = torch.randn(2, channels, 3, 5, generator=torch.Generator().manual_seed(4)).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    got, right = doubled(x), F.interpolate(x, scale_factor=2.0, mode="nearest")
    assert torch.equal(got, right)
    assert got.stride() == right.stride()


@pytest.mark.parametrize("last", [False, True])
def test_a_decoder_can_be_compiled(z_image: Path, last: bool) -> None:
    """Traced as ever, whatever the order in memory, though no machine code is made."""
    node = node_of(z_image, ZImage, "vae_decoder")
    latent = node.latents(torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(3)))
    right = node.decoder(latent)
    if last:
        node.to(memory_format=torch.channels_last)
        latent = latent.contiguous(memory_format=torch.channels_last)
    with fresh_compiler(), torch.inference_mode():
        compiled = torch.compile(node.decoder.forward, dynamic=True, backend="aot_eager")
        torch.testing.assert_close(compiled(latent), right, rtol=1e-4, atol=1e-5)
