"""What requests share, and what they do not: steps, memory, ends."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from served_attention import Served
from torch import Tensor

from mstar.engine.graphs import GraphRunner, Recorder
from mstar.nn.node import Sampled
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.spec.errors import MstarError, RequestError, SetupError
from mstar.spec.request import Failed
from mstar.spec.tasks import Image
from mstar.testing import Driver, Example
from mstar.testing.compiling import fresh_compiler
from mstar_diffusion.flux2.names import native_names
from mstar_diffusion.vae.nodes import VaeDecoder

EXTRA = () if importlib.metadata.entry_points(group="mstar.plugins", name="diffusion") else ("mstar_diffusion.plugin",)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(load_plugins(Settings(extra_plugins=EXTRA)))


def ask(seed: int, steps: int, size: tuple[int, int] = (64, 64), **more: Any) -> Example:
    knobs = {"seed": seed, "num_inference_steps": steps, "width": size[0], "height": size[1]}
    parts = more.pop("parts", ())
    return Example(f"a cat with {seed} tails", {**knobs, **more}, parts=parts)


def painted(width: int, height: int, seed: int = 0) -> Image:
    return Image(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


MIXED: Mapping[str, list[Example]] = {
    "z_image_turbo": [
        ask(1, 4),
        ask(2, 2),
        ask(3, 3, (80, 64)),
        ask(4, 3, guidance_scale=2.0, negative_prompt="a dog"),
        ask(5, 2, guidance_scale=1.5),
    ],
    "flux2_klein": [
        ask(1, 4),
        ask(2, 2),
        ask(3, 3, (80, 64)),
        ask(4, 3, parts=(painted(64, 64),)),
        ask(5, 2, parts=(painted(64, 64, 1),)),
        ask(6, 2, parts=(painted(96, 64), painted(64, 80))),
    ],
}


def watch(driver: Driver) -> list[tuple[str, str, int]]:
    """Node, entry and rows of each step from now on."""
    seen: list[tuple[str, str, int]] = []
    inner = driver.worker.engine._on_step

    def told(node: str, entry: str, rows: int, tokens: int, seconds: float) -> None:
        seen.append((node, entry, rows))
        assert inner is not None
        inner(node, entry, rows, tokens, seconds)

    driver.worker.engine._on_step = told
    return seen


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("key", MIXED)
def test_a_picture_is_the_same_in_any_batch(
    registry: Registry, folder_of: Callable[[str], Path], key: str, lookahead: bool
) -> None:
    """Bit for bit, whatever the others' sizes, steps, guidance and references; they join at different times."""
    driver = Driver(key, registry, folder_of(key), engine={"lookahead": lookahead})
    for i, example in enumerate(MIXED[key]):
        driver.submit(f"alone{i}", example)
        driver.run()
    seen = watch(driver)
    for i, example in enumerate(MIXED[key]):
        driver.submit(f"r{i}", example)
        for _ in range(2):
            driver.worker.step()
            driver.take()
    driver.run()
    for i in range(len(MIXED[key])):
        np.testing.assert_array_equal(driver.result(f"r{i}")["image"], driver.result(f"alone{i}")["image"])
    assert max(rows for node, entry, rows in seen if (node, entry) == ("dit", "step")) >= 2, "steps were shared"
    driver.assert_empty()


def test_pictures_of_one_size_are_decoded_together(registry: Registry, z_image: Path) -> None:
    driver = Driver("z_image_turbo", registry, z_image)
    seen = watch(driver)
    for i in range(3):
        driver.submit(f"r{i}", ask(i, 2))
    driver.submit("wide", ask(3, 2, (80, 64)))
    driver.run()
    assert sorted(rows for node, entry, rows in seen if (node, entry) == ("vae_decoder", "forward")) == [1, 3]
    driver.submit("alone", ask(1, 2))
    driver.run()
    np.testing.assert_array_equal(driver.result("r1")["image"], driver.result("alone")["image"])
    driver.assert_empty()


def test_a_picture_that_is_no_numbers_fails_alone(
    registry: Registry, z_image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver("z_image_turbo", registry, z_image)
    driver.submit("alone", ask(1, 2))
    driver.run()
    plain = VaeDecoder.decode

    def poisoned(node: VaeDecoder, latent: Tensor, room: float) -> Tensor:
        picture = plain(node, latent, room)
        assert len(picture) == 2
        picture[0, 1, 3, 5] = torch.nan
        return picture

    monkeypatch.setattr(VaeDecoder, "decode", poisoned)
    driver.submit("wrong", ask(2, 2))
    driver.submit("right", ask(1, 2))
    driver.run()
    end = driver.ended["wrong"]
    assert isinstance(end, Failed)
    assert (end.status, end.code) == (500, "numerical_error")
    np.testing.assert_array_equal(driver.result("right")["image"], driver.result("alone")["image"])
    driver.assert_empty()


def test_no_more_rows_than_the_deployment_says(registry: Registry, z_image: Path) -> None:
    driver = Driver("z_image_turbo", registry, z_image, model_kwargs={"max_batch_size": 2, "capture_batch_sizes": [1]})
    seen = watch(driver)
    for i in range(5):
        driver.submit(f"r{i}", ask(i, 2))
    driver.run()
    assert max(rows for node, _, rows in seen if node in ("dit", "vae_decoder")) == 2
    assert len([end for end in driver.ended.values() if not isinstance(end, Failed)]) == 5


@pytest.mark.parametrize("at", range(4))
def test_a_cancelled_request_runs_no_further_step(registry: Registry, flux2: Path, at: int) -> None:
    driver = Driver("flux2_klein", registry, flux2)
    driver.submit("gone", ask(1, 50, parts=(painted(64, 64),)))
    driver.submit("stays", ask(2, 3))
    for _ in range(3 + 2 * at):
        driver.worker.step()
        driver.take()
    driver.cancel("gone")
    seen = watch(driver)
    driver.run()
    assert len([entry for node, entry, _ in seen if (node, entry) == ("dit", "step")]) <= 3
    driver.submit("alone", ask(2, 3))
    driver.run()
    np.testing.assert_array_equal(driver.result("stays")["image"], driver.result("alone")["image"])
    driver.assert_empty()


def test_who_looks_sees_each_step_and_costs_nobody_else(registry: Registry, z_image: Path) -> None:
    driver = Driver("z_image_turbo", registry, z_image)
    seen = watch(driver)
    driver.submit("blind", ask(1, 4))
    driver.run()
    assert not [entry for _, entry, _ in seen if entry == "preview"]
    example = ask(1, 4)
    driver.submit("looks", Example(example.text, example.knobs, want=("image", "progress", "preview")))
    driver.run()
    result = driver.result("looks")
    assert result["progress"].reshape(-1, 2).tolist() == [[1, 4], [2, 4], [3, 4], [4, 4]]
    assert result["preview"].shape == (4, 64, 64, 3)
    np.testing.assert_array_equal(result["image"], driver.result("blind")["image"])
    # behind the last step nothing is left of the noise: what was seen last is the picture
    np.testing.assert_array_equal(result["preview"][-1], result["image"][0])


# --- captured steps ---------------------------------------------------------------------------------------------------
class Again(Recorder):
    """As a CUDA graph: the same tensors are read again, and the same outputs are filled."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        outputs = function()

        def replay() -> None:
            self.replays += 1
            for port, value in function().items():
                mine, new = (one.ids if isinstance(one, Sampled) else one for one in (outputs[port], value))
                mine.copy_(new)

        return outputs, replay


CAPTURES = {
    "z_image_turbo": {"capture_text_tokens": [32]},
    "flux2_klein": {},
}


@pytest.mark.parametrize("key", MIXED)
def test_captured_steps(
    registry: Registry, folder_of: Callable[[str], Path], key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the sizes that the deployment names, before the first request; the pictures are those of plain steps."""
    options = {"capture_sizes": [[64, 80], [64, 64]], "capture_batch_sizes": [1, 2], **CAPTURES[key]}
    driver = Driver(key, registry, folder_of(key), model_kwargs=options)
    for i, example in enumerate(MIXED[key]):
        driver.submit(f"plain{i}", example)
        driver.run()
    recorder = Again()
    runner = GraphRunner(driver.worker.config.deployment.engine, recorder, "cpu", worth=2)
    driver.worker.engine.runner = runner
    driver.worker.engine.prepare(driver.worker.plan, 16, 512, lambda done, total: None)
    kinds = 2 if key == "z_image_turbo" else 3  # denoising, for flux2 edits of one reference too, and decoding
    reading = 2  # the text encoder, and what the denoiser makes of it: of prompts of one length here
    assert len(runner._lanes) == (kinds * len(options["capture_sizes"]) + reading) * len(options["capture_batch_sizes"])
    before = runner.captured
    for i, example in enumerate(MIXED[key]):
        driver.submit(f"r{i}", example)
    driver.run()
    assert recorder.replays > 4
    for i in range(len(MIXED[key])):
        np.testing.assert_array_equal(driver.result(f"r{i}")["image"], driver.result(f"plain{i}")["image"])
    assert not runner.faults, caplog.text
    for i, example in enumerate(MIXED[key][:2]):
        driver.submit(f"again{i}", example)
    captured = runner.captured
    driver.run()
    assert captured > before, "other entries and sizes are captured when they come again"
    driver.assert_empty()


# --- attention by the engine ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("key", MIXED)
def test_attention_by_a_backend_of_the_engine(
    registry: Registry, folder_of: Callable[[str], Path], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pictures are those of PyTorch's attention in the node, and steps are captured with it."""
    Served.instead(monkeypatch)
    plain = Driver(key, registry, folder_of(key))
    options = {"capture_sizes": [[64, 64]], "capture_batch_sizes": [1, 2], "attention_backend": "flashinfer"}
    driver = Driver(key, registry, folder_of(key), model_kwargs={**options, **CAPTURES[key]})
    for i, example in enumerate(MIXED[key]):
        for one in (plain, driver):
            one.submit(f"r{i}", example)
            one.run()
        np.testing.assert_array_equal(driver.result(f"r{i}")["image"], plain.result(f"r{i}")["image"])
    assert not Served.asked
    recorder = Again()
    runner = driver.worker.engine.runner = GraphRunner(driver.worker.config.deployment.engine, recorder, "cpu", worth=2)
    driver.worker.engine.prepare(driver.worker.plan, 16, 512, lambda done, total: None)
    driver.submit("again", MIXED[key][0])
    driver.run()
    np.testing.assert_array_equal(driver.result("again")["image"], plain.result("r0")["image"])
    assert Served.asked
    assert recorder.replays > 4
    assert not runner.faults
    for one in (plain, driver):
        one.assert_empty()


def test_where_flashinfer_does_not_run_the_start_says_why(registry: Registry, flux2: Path) -> None:
    with pytest.raises(SetupError, match="flashinfer: it runs on CUDA only"):
        Driver("flux2_klein", registry, flux2, model_kwargs={"attention_backend": "flashinfer"})


# --- compiled layers --------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("key", "exact", "attention"),
    [
        ("z_image_turbo", ["norms"], "sdpa"),
        ("z_image_turbo", False, "sdpa"),
        ("flux2_klein", False, "sdpa"),
        ("flux2_klein", False, "flashinfer"),
    ],
)
def test_layers_can_be_compiled(
    registry: Registry,
    folder_of: Callable[[str], Path],
    key: str,
    exact: Any,
    attention: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced and guarded as ever, though no machine code is made, which takes minutes."""
    real = torch.compile

    def without_codegen(function: Any, *, dynamic: bool, options: Any) -> Any:
        return real(function, dynamic=dynamic, backend="aot_eager")

    plain = Driver(key, registry, folder_of(key))
    monkeypatch.setattr(torch, "compile", without_codegen)
    monkeypatch.setattr("mstar.worker.machine.compiler_fault", lambda device: None)
    options = {"compile_exact_ops": exact, "vae_compile": False, "attention_backend": attention}
    Served.instead(monkeypatch)
    with fresh_compiler():
        driver = Driver(key, registry, folder_of(key), engine={"compile": True}, model_kwargs=options)
        for example in (ask(1, 1), ask(2, 1, (80, 64))):
            for one in (plain, driver):
                one.submit(str(example.knobs), example)
                one.run()
            got, want = (one.result(str(example.knobs))["image"].astype(int) for one in (driver, plain))
            assert np.abs(got - want).max() <= 1
        assert not torch._dynamo.config.allow_unspec_int_on_nn_module, "sizes are constants of the compiled code"
        if not exact and attention == "sdpa":  # each kind of block in one piece, and once for all blocks and sizes
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if key == "flux2_klein" else 1)


def test_what_shall_not_be_seen_is_bounded_by_what_the_encoder_reads(registry: Registry, z_image: Path) -> None:
    driver = Driver("z_image_turbo", registry, z_image)
    fits = driver.prepare("fits", ask(1, 2, guidance_scale=2.0, negative_prompt="a dog"))
    assert 2 < fits.request.inputs["negative_length"] <= 512
    with pytest.raises(RequestError, match=r"'negative_prompt' has [0-9]+ tokens, .* reads 512: shorten it") as caught:
        driver.prepare("long", ask(1, 2, guidance_scale=2.0, negative_prompt="a dog and " * 500))
    assert (caught.value.param, caught.value.code) == ("negative_prompt", "context_length_exceeded")


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_picture_of_no_words_is_refused(registry: Registry, z_image: Path, text: str) -> None:
    with pytest.raises(RequestError, match="'text' is empty") as caught:
        Driver("z_image_turbo", registry, z_image).prepare("none", Example(text, {"num_inference_steps": 2}))
    assert caught.value.param == "text"


@pytest.mark.parametrize(
    ("parts", "named"), [((painted(48, 64),), "parts[0]"), ((painted(64, 64), painted(64, 576)), "parts[1]")]
)
def test_a_picture_that_is_no_reference_is_named_as_it_was_sent(
    registry: Registry, flux2: Path, parts: tuple[Image, ...], named: str
) -> None:
    with pytest.raises(RequestError, match=r"is too (small|long)") as caught:
        Driver("flux2_klein", registry, flux2).prepare("odd", ask(1, 1, parts=parts))
    assert caught.value.param == named
    assert repr(named) in caught.value.message


@pytest.mark.parametrize("sides", [{"width": 8192}, {"height": 8192}, {"width": 4096, "height": 4096}])
def test_too_large_a_picture_is_refused_with_the_sides_that_fit(
    registry: Registry, z_image: Path, sides: dict[str, int]
) -> None:
    driver = Driver("z_image_turbo", registry, z_image)
    with pytest.raises(RequestError, match=r"'width' [0-9]+ and 'height' [0-9]+$") as caught:
        driver.prepare("large", Example("a cat", {"num_inference_steps": 1, **sides}))
    assert caught.value.param in sides, "there is no 'size' where sides are named"
    words = caught.value.message.split()
    near = {"width": int(words[-4]), "height": int(words[-1])}
    assert driver.prepare("near", Example("a cat", {"num_inference_steps": 1, **near})).request.inputs["latent"].size


# --- checkpoints ------------------------------------------------------------------------------------------------------
def as_single_file(folder: Path, into: Path) -> None:
    """*folder* with its denoiser in the authors' names, in one file."""
    shutil.copytree(folder, into)
    file = into / "transformer" / "diffusion_pytorch_model.safetensors"
    published: dict[str, Tensor] = load_file(file)
    file.unlink()
    found = {}
    for name, native in native_names(2, 2).items():
        whole = torch.cat([published.pop(f"{part}.weight") for part in native.published])
        whole = torch.cat(whole.chunk(2)[::-1]) if native.swapped else whole
        found[f"{name}.{'scale' if name.endswith('norm') else 'weight'}"] = whole
    assert not published
    save_file(found, into / "flux-2-klein-4b.safetensors")


def test_the_authors_single_file(registry: Registry, flux2: Path, tmp_path: Path) -> None:
    as_single_file(flux2, tmp_path / "native")
    pictures = []
    for folder in (flux2, tmp_path / "native"):
        driver = Driver("flux2_klein", registry, folder)
        driver.submit("r", MIXED["flux2_klein"][3])
        driver.run()
        pictures.append(driver.result("r")["image"])
    np.testing.assert_array_equal(*pictures)


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("transformer/config.json", {"guidance_embeds": True}, "guidance_embeds True is not supported"),
        ("transformer/config.json", {"num_attention_hats": 3}, "did you mean 'num_attention_heads'"),
        ("transformer/config.json", {"joint_attention_dim": 64}, "joint_attention_dim 64"),
        ("scheduler/scheduler_config.json", {"use_karras_sigmas": True}, "use_karras_sigmas True is not supported"),
        ("scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler"}, "DDIMScheduler is not supported"),
        ("vae/config.json", {"act_fn": "gelu"}, "act_fn 'gelu' is not supported"),
        ("model_index.json", {"is_distilled": False}, "is_distilled is false"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused(
    registry: Registry, flux2: Path, tmp_path: Path, part: str, change: dict[str, Any], words: str
) -> None:
    import json

    folder = tmp_path / "other"
    shutil.copytree(flux2, folder)
    config = json.loads((folder / part).read_text())
    (folder / part).write_text(json.dumps({**config, **change}))
    with pytest.raises(SetupError) as caught:
        Driver("flux2_klein", registry, folder)
    assert words in str(caught.value)


def test_the_9b_asks_for_consent(flux2: Path, tmp_path: Path) -> None:
    import mstar

    settings = Settings(extra_plugins=EXTRA, config=tmp_path)
    with pytest.raises(MstarError, match="mstar license accept flux2_klein_9b"):
        mstar.load("flux2_klein_9b", weights=str(flux2), device="cpu", settings=settings)
