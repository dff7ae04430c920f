"""Every node against diffusers 0.42.1, by the family's own loader: bit for bit, but for the text encoder, whose
attention and norms are M*'s fused ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers_pipelines import KINDS, TAPS, node_of, pipeline, step
from torch import Tensor

from mstar_diffusion.dit.patches import channels_last, from_channels_last
from mstar_diffusion.flux2.model import Flux2Klein
from mstar_diffusion.noise import normal, normal_by_point
from mstar_diffusion.schedules import FlowSchedule, empirical_shift, padded
from mstar_diffusion.vae.nodes import to_pixels
from mstar_diffusion.z_image.model import ZImage

WORDS = ("a cat", "a small red bird under the moon, painted in oil, and some more words behind it so that it is long")


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def points(latent: Tensor) -> Tensor:
    """``[1, C, h, w]`` as ``[1, h, w, C]``."""
    return latent.permute(0, 2, 3, 1)


# --- denoisers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words", [1, 31, 32, 40])
@pytest.mark.parametrize(("height", "width"), [(4, 6), (8, 8), (6, 14)])
def test_z_image_denoiser(z_image: Path, words: int, height: int, width: int) -> None:
    """With captions and pictures that fill 32 tokens, and that do not."""
    node = node_of(z_image, ZImage, "dit")
    latent, caption = drawn(1, 4, height, width), drawn(words, 32, seed=4)
    context = torch.nn.functional.pad(caption, (0, 0, 0, -words % 32))[None]
    prompt = node.prepare(step(), context, torch.tensor([words]))["prompt"]
    for level in (1.0, 0.7, 0.3):
        time = (1000 - torch.tensor([level]) * 1000) / 1000
        right = pipeline(z_image).transformer([latent[0][:, None]], time, [caption], return_dict=False)[0][0]
        sigmas, index = torch.tensor([[level, 0.0]]), torch.tensor([0])
        got = node.velocity(step(), channels_last(latent), prompt, sigmas, index)["velocity"]
        assert torch.equal(got, channels_last(-right[:, 0][None]))
    assert right.std() > 0.1


@pytest.mark.parametrize("references", [(), ((2, 4),), ((2, 4), (4, 2), (2, 2), (6, 3))])
def test_flux2_denoiser(flux2: Path, references: tuple[tuple[int, int], ...]) -> None:
    """With no reference to four, of different sizes."""
    pipe, node = pipeline(flux2), node_of(flux2, Flux2Klein, "dit")
    latent, context = drawn(1, 16, 3, 5), drawn(1, 24, 96, seed=4)
    seen = [drawn(1, 16, *size, seed=5 + i) for i, size in enumerate(references)]
    packed = torch.cat([pipe._pack_latents(x) for x in (latent, *seen)], 1)
    ids = pipe._prepare_latent_ids(latent)
    ids = torch.cat([ids, pipe._prepare_image_ids(seen)], 1) if seen else ids
    prompt = node.prepare(step(), context, torch.tensor([24]))["prompt"]
    conditions = {f"condition_{i}": points(x) for i, x in enumerate(seen)}
    for level, following in ((1.0, 0.6), (0.6, 0.0)):
        time = torch.tensor([level]) * 1000 / 1000
        right = pipe.transformer(packed, context, time, ids, pipe._prepare_text_ids(context), return_dict=False)[0]
        right = right[:, :15].unflatten(1, (3, 5))
        sigmas = torch.tensor([[level, following]])
        got = node.step(step(), points(latent), prompt, sigmas, torch.tensor([0]), **conditions)
        moved = points(latent) + (torch.tensor(following) - torch.tensor(level)) * right
        assert torch.equal(got["latent"], moved)
        assert torch.equal(got["clean"], points(latent) - torch.tensor(level) * right)
    assert right.std() > 0.1


# --- text -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words", WORDS)
def test_hidden_states_z_image(z_image: Path, words: str) -> None:
    pipe, node = pipeline(z_image), node_of(z_image, ZImage, "text_encoder")
    (right,) = pipe.encode_prompt(words, do_classifier_free_guidance=False)[0]
    ids = _ids(pipe, words, thinking=True)
    filled = torch.nn.functional.pad(ids, (0, -len(ids) % 32), value=pipe.tokenizer.pad_token_id)
    got = node.forward(step(), filled[None], torch.tensor([len(ids)]))["context"]
    torch.testing.assert_close(got[0, : len(ids)], right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("words", WORDS)
def test_hidden_states_flux2(flux2: Path, words: str) -> None:
    """Those of the padding too: the denoiser sees them."""
    pipe, node = pipeline(flux2), node_of(flux2, Flux2Klein, "text_encoder")
    right = pipe.encode_prompt(words, text_encoder_out_layers=TAPS)[0]
    ids = _ids(pipe, words, thinking=False)
    filled = torch.nn.functional.pad(ids, (0, 512 - len(ids)), value=pipe.tokenizer.pad_token_id)
    got = node.forward(step(), filled[None], torch.tensor([len(ids)]))["context"]
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


def _ids(pipe: object, words: str, thinking: bool) -> Tensor:
    text = pipe.tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        [{"role": "user", "content": words}], tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    return torch.tensor(pipe.tokenizer(text).input_ids)  # type: ignore[attr-defined]


# --- autoencoders -----------------------------------------------------------------------------------------------------
def test_z_image_decoder(z_image: Path) -> None:
    pipe, node = pipeline(z_image), node_of(z_image, ZImage, "vae_decoder")
    latent = drawn(1, 4, 8, 12)
    config = pipe.vae.config
    right = pipe.vae.decode(latent / config.scaling_factor + config.shift_factor, return_dict=False)[0]
    tokens = channels_last(latent)
    assert torch.equal(from_channels_last(tokens), latent)
    assert torch.equal(node.decode(node.latents(tokens)), right)
    image = node.forward(step(), tokens)["image"]
    assert torch.equal(image, torch.from_numpy(_as_pixels(pipe, right)))


def test_flux2_decoder_and_encoder(flux2: Path) -> None:
    pipe = pipeline(flux2)
    decoder, encoder = (node_of(flux2, Flux2Klein, name) for name in ("vae_decoder", "vae_encoder"))
    latent = drawn(1, 16, 4, 6)
    mean, deviation = pipe.vae.bn.running_mean, torch.sqrt(pipe.vae.bn.running_var + pipe.vae.config.batch_norm_eps)
    unpacked = pipe._unpatchify_latents(latent * deviation.view(1, -1, 1, 1) + mean.view(1, -1, 1, 1))
    right = pipe.vae.decode(unpacked, return_dict=False)[0]
    assert torch.equal(decoder.decode(decoder.latents(points(latent))), right)
    pixels = torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    image = pipe.image_processor.preprocess(torch_to_pil(pixels), height=64, width=96, resize_mode="crop")
    encoded = pipe._encode_vae_image(image, None)
    (condition,) = encoder.forward(step(), [pixels])["condition"]
    assert torch.equal(condition[None], points(encoded))


def torch_to_pil(pixels: Tensor) -> object:
    from PIL import Image

    return Image.fromarray(pixels.numpy())


def _as_pixels(pipe: object, picture: Tensor) -> np.ndarray:
    array = pipe.image_processor.postprocess(picture, output_type="np")  # type: ignore[attr-defined]
    return (array * 255).round().astype(np.uint8)


def test_pixels_are_rounded_as_pillow_images_are(z_image: Path) -> None:
    picture = drawn(1, 3, 8, 8) * 2
    assert to_pixels(picture).numpy().tobytes() == _as_pixels(pipeline(z_image), picture).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_join_without_a_seam(request: pytest.FixtureRequest, kind: str) -> None:
    """A picture in tiles is the whole one, but for what a tile does not see; where one tile is enough, exactly it."""
    node = node_of(request.getfixturevalue(kind), KINDS[kind], "vae_decoder")
    latent = node.latents(drawn(1, 8, 10, 16))
    whole = node.decode(latent)
    node.tiling, node.tile = "always", 96
    tiled = node.decode(latent)
    assert tiled.shape == whole.shape
    assert not torch.equal(tiled, whole)
    assert (tiled - whole).abs().mean() < 0.3 * whole.std()
    node.tile = 160
    assert torch.equal(node.decode(latent), whole)


# --- schedules and noise ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [1, 4, 8, 50])
@pytest.mark.parametrize("kind", KINDS)
def test_schedules(request: pytest.FixtureRequest, kind: str, steps: int) -> None:
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    scheduler = pipeline(request.getfixturevalue(kind)).scheduler
    for tokens in (16, 4096, 4300, 4301, 16384):
        mu = compute_empirical_mu(tokens, steps)
        assert empirical_shift(tokens, steps) == pytest.approx(mu, rel=1e-12)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        ours = FlowSchedule.read(scheduler.config).sigmas(steps, mu)
        np.testing.assert_array_equal(ours, scheduler.sigmas.numpy())
        assert padded(ours).shape == (101,)


def test_published_schedules() -> None:
    turbo = FlowSchedule(shift=3.0).sigmas(8)
    np.testing.assert_allclose(turbo, [1, 0.9545, 0.9, 0.8333, 0.75, 0.6429, 0.5, 0.3, 0], atol=1e-4)
    klein = FlowSchedule(dynamic=True).sigmas(4, empirical_shift(4096, 4))
    np.testing.assert_allclose(klein, [1, 0.96738, 0.90814, 0.76720, 0], atol=1e-5)


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**40 + 5, 2**63 - 1])
@pytest.mark.parametrize("shape", [(16,), (17,), (3, 7, 5), (16, 32, 32), (2, 33_003)])
def test_noise_is_pytorchs(seed: int, shape: tuple[int, ...]) -> None:
    right = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed)).numpy()
    np.testing.assert_allclose(normal(shape, seed), right, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [(128, 4, 4), (16, 96, 80), (5, 300, 256), (8, 5, 5), (3, 2, 8)])
def test_noise_with_channels_last_is_the_same(shape: tuple[int, int, int]) -> None:
    """In pieces of some channels, of one, and where a group of numbers lies across channels."""
    np.testing.assert_array_equal(normal_by_point(shape, 7), np.moveaxis(normal(shape, 7), 0, -1))
