"""The 12 Hz codec and the speaker encoder against the reference, through the loader; pieces against the whole."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mstar.nn.node import Node
from mstar.spec.errors import WeightsError
from mstar.testing.compiling import fresh_compiler
from mstar.testing.sounds import babble
from mstar.weights.loader import load
from mstar_tts.qwen3_tts.codec import Codec, codec_weights
from mstar_tts.qwen3_tts.codec_config import CodecConfig, SpeakerConfig
from mstar_tts.qwen3_tts.codec_decoder import DecoderState
from mstar_tts.qwen3_tts.codec_encoder import ReferenceEncoder, encoder_weights
from mstar_tts.qwen3_tts.codec_tiny import CODEC, speaker_config, speaker_tensors, write_codec
from mstar_tts.qwen3_tts.speaker_encoder import LEAST_SAMPLES, SpeakerEncoder, speaker_weights

sys.path.insert(0, str(Path(__file__).parent))
import qwen_tts_reference

CPU = torch.device("cpu")
CONFIG = CodecConfig.read(CODEC)
SPEAKER = speaker_config(24)
FRAMES = (1, 7, 40)
SAMPLES = (LEAST_SAMPLES, 1920 * 5, 24_000)


class State:
    """A step's view of recurrent state, outside of a worker."""

    def __init__(self, module: Codec, rows: int):
        state = module.decoder.begin(rows, CPU, torch.float32)
        self.values = {name: getattr(state, name) for name in ("done", "lead", "kv", "tail")}

    def read(self, name: str) -> Tensor:
        return self.values[name]

    def write(self, name: str, value: Tensor) -> None:
        assert value.shape == self.values[name].shape
        assert value.dtype == self.values[name].dtype
        self.values[name] = value


class Steps:
    """What a node reads of a step."""

    def __init__(self, lengths: Sequence[int], view: Any = None):
        self.lengths, self._view = lengths, view

    def __getitem__(self, name: str) -> Any:
        assert name == "codec"
        return self._view


def loaded(module: Any, weights: Any, folder: Path) -> Any:
    load(module, weights(module), folder, CPU, torch.float32)
    module.settle()
    return module


def built(kind: type[Node], config: Any) -> Any:
    with torch.device("meta"):
        return kind(config)


@pytest.fixture(scope="module", autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, random = tmp_path_factory.mktemp("codec"), torch.Generator().manual_seed(11)
    write_codec(place, random)
    save_file(speaker_tensors(SPEAKER, random), place / "model.safetensors")
    (place / "config.json").write_text(json.dumps({"speaker_encoder_config": SPEAKER}))
    return place


@pytest.fixture(scope="module")
def codec(folder: Path) -> Codec:
    return loaded(built(Codec, CONFIG), codec_weights, folder)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> ReferenceEncoder:
    return loaded(built(ReferenceEncoder, CONFIG), encoder_weights, folder)


@pytest.fixture(scope="module")
def speaker(folder: Path) -> SpeakerEncoder:
    return loaded(built(SpeakerEncoder, SpeakerConfig.read(SPEAKER)), speaker_weights, folder)


def drawn(rows: int, frames: int, seed: int = 3) -> Tensor:
    return torch.randint(0, CONFIG.codebook_size, (rows, frames, 16), generator=torch.Generator().manual_seed(seed))


def clips() -> list[Tensor]:
    return [torch.from_numpy(babble(samples / 24_000, seed, 24_000)) for seed, samples in enumerate(SAMPLES)]


@pytest.fixture(scope="module")
def reference(folder: Path) -> Mapping[str, list[Tensor]]:
    torch.save({"codes": [drawn(1, frames)[0] for frames in FRAMES], "clips": clips()}, folder / "inputs.pt")
    qwen_tts_reference.run(Path(__file__).parent / "qwen_codec_oracle.py", folder)
    return torch.load(folder / "outputs.pt")  # type: ignore[no-any-return]


def decoded(codec: Codec, codes: Tensor, sizes: Sequence[int] = (), view: State | None = None) -> Tensor:
    """The sound of *codes* ``[rows, C, 16]`` in pieces of *sizes* frames, and one of the rest."""
    view = view or State(codec, len(codes))
    pieces = [*sizes, codes.shape[1] - sum(sizes)]
    step: Any = Steps([1] * len(codes), view)
    return torch.cat([codec(step, piece)["samples"] for piece in codes.split(pieces, 1) if piece.shape[1]], 1)


def test_sound_is_the_references(codec: Codec, reference: Mapping[str, list[Tensor]]) -> None:
    for frames, wanted in zip(FRAMES, reference["sound"], strict=True):
        sound = decoded(codec, drawn(1, frames))[0]
        assert wanted.std() > 0.05
        torch.testing.assert_close(sound, wanted, atol=1e-5, rtol=1e-4)


def test_frames_of_a_clip_are_the_references(encoder: ReferenceEncoder, reference: Mapping[str, list[Tensor]]) -> None:
    packed = encoder(Steps(SAMPLES), torch.cat(clips()))["frames"]
    assert packed.lengths == [-(-samples // 1920) for samples in SAMPLES]
    for frames, wanted in zip(packed.data.split(list(packed.lengths)), reference["frames"], strict=True):
        assert torch.equal(frames, wanted)
    assert len(packed.data.unique()) > 30  # else most codebooks went unused


def test_a_speakers_vector_is_the_references(speaker: SpeakerEncoder, reference: Mapping[str, list[Tensor]]) -> None:
    voices = speaker(Steps(SAMPLES), torch.cat(clips()))["voice"]
    wanted = torch.stack(reference["speaker"])
    assert wanted.std(0).mean() > 1e-3  # else all speakers were one
    torch.testing.assert_close(voices, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sizes", [(1, 3, 8, 16, 25), (1,) * 20, (60,), (2, 50)])
def test_pieces_are_the_whole(codec: Codec, sizes: Sequence[int]) -> None:
    codes = drawn(2, 61)
    whole = decoded(codec, codes)
    pieces = decoded(codec, codes, sizes)
    assert (pieces - whole).abs().max() < 1e-5
    assert whole.std() > 0.05


def test_a_row_is_the_same_alone_and_among_others_at_other_places(codec: Codec) -> None:
    """Rows of a step have different histories: only the number of new frames is common to them."""
    codes = drawn(3, 30)
    alone = [decoded(codec, codes[row : row + 1]) for row in range(3)]
    together = State(codec, 3)
    for row, done in enumerate((0, 5, 22)):
        before = State(codec, 1)
        if done:
            decoded(codec, codes[row : row + 1, :done], view=before)
        for name, value in together.values.items():
            value[row] = before.values[name][0]
    new = torch.stack([codes[row, done : done + 8] for row, done in enumerate((0, 5, 22))])
    sound = decoded(codec, new, view=together)
    for row, done in enumerate((0, 5, 22)):
        torch.testing.assert_close(sound[row], alone[row][0, done * 1920 : (done + 8) * 1920], atol=1e-5, rtol=1e-4)


def test_a_clone_goes_on_from_the_end_of_its_clip(codec: Codec) -> None:
    codes, heard = drawn(2, 50), (37, 4)
    view = State(codec, 2)
    step: Any = Steps(heard, view)
    codec.prime(step, torch.cat([codes[row, :count] for row, count in enumerate(heard)]))
    new = torch.stack([codes[row, count : count + 9] for row, count in enumerate(heard)])
    sound = decoded(codec, new, (1, 3), view)
    for row, count in enumerate(heard):
        whole = decoded(codec, codes[row : row + 1, : count + 9])[0]
        torch.testing.assert_close(sound[row], whole[count * 1920 :], atol=1e-5, rtol=1e-4)
        cold = decoded(codec, codes[row : row + 1, count : count + 9])[0]
        assert (cold - whole[count * 1920 :]).abs().max() > 1e-3


def test_ten_frames_reach_beyond_the_last_at_the_published_sizes() -> None:
    config = CodecConfig.read({"decoder_config": {"codebook_dim": 512}, "encoder_config": {}})
    decoder = built(Codec, config).decoder
    assert decoder.reach() == 10
    shapes = decoder.state_shapes(config.decoder)
    assert shapes["kv"] == (8, 2, 71, 16, 64)
    assert 4 * sum(torch.Size(shape).numel() for shape in shapes.values()) < 5.3e6


def test_codes_that_no_codebook_has_are_the_nearest(codec: Codec) -> None:
    codes = drawn(1, 3)
    codes[0, 1, 0], codes[0, 2, 5] = -1, 2150
    nearest = codes.clamp(0, CONFIG.codebook_size - 1)
    assert torch.equal(decoded(codec, codes), decoded(codec, nearest))


def test_layers_that_are_compiled_say_the_same(codec: Codec, encoder: ReferenceEncoder) -> None:
    assert [name.rpartition(".")[0] for name, _ in codec.regions()] == ["decoder.pre_transformer.layers"] * 2
    assert not list(encoder.regions())
    codes = drawn(2, 9)
    plain = decoded(codec, codes, (1, 3))
    layers = codec.decoder.pre_transformer.layers
    with fresh_compiler():
        compiled = [torch.compile(layer, backend="aot_eager", fullgraph=True) for layer in layers]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codec.decoder.pre_transformer, "_modules", {**codec.decoder.pre_transformer._modules})
            codec.decoder.pre_transformer.layers = torch.nn.ModuleList(compiled)
            sound = decoded(codec, codes, (1, 3))
    torch.testing.assert_close(sound, plain, atol=1e-5, rtol=1e-4)


def test_what_bfloat16_costs(folder: Path, codec: Codec) -> None:
    with torch.device("meta"):
        rounded = Codec(CONFIG, torch.bfloat16)
    loaded(rounded, codec_weights, folder)
    codes = drawn(1, 20)
    state = rounded.decoder.begin(1, CPU, torch.bfloat16)
    sound, after = rounded.decoder(codes, state)
    assert sound.dtype is torch.bfloat16
    assert isinstance(after, DecoderState)
    exact = decoded(codec, codes)
    error = (sound.float() - exact).std() / exact.std()
    assert 1e-4 < error < 0.1
    assert rounded.decoder.pre_transformer.rotary.inverse.dtype is torch.float32
    assert {parameter.dtype for parameter in rounded.parameters()} == {torch.bfloat16}


def test_a_missing_and_a_strange_tensor_stop_the_start(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "speech_tokenizer"
    place.mkdir()
    tensors = load_file(folder / "speech_tokenizer/model.safetensors")
    tensors["decoder.decoder.9.alpha"] = tensors.pop("decoder.decoder.5.alpha")
    save_file(tensors, place / "model.safetensors")
    module = built(Codec, CONFIG)
    with pytest.raises(WeightsError, match=r"decoder\.decoder\.5\.alpha.*\n.*\n.*decoder\.decoder\.9\.alpha"):
        load(module, codec_weights(module), tmp_path, CPU, torch.float32)


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("decoder_config", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("decoder_config", {"upsample_rates": [8, 5, 4]}, "decode_upsample_rate is 1920, but a frame has 640"),
        ("decoder_config", {"codebook_dim": None}, "TypeError"),
        ("encoder_config", {"pad_mode": "reflect"}, "pad_mode 'reflect'"),
        ("encoder_config", {"num_quantizers": 8}, "16 of 8 codes"),
        ("encoder_config", {"upsampling_ratios": [8, 6, 5]}, "encode_downsample_rate is 1920"),
    ],
)
def test_a_config_of_another_codec_is_refused(part: str, change: Mapping[str, Any], words: str) -> None:
    with pytest.raises(WeightsError, match=words):
        CodecConfig.read({**CODEC, part: {**CODEC[part], **change}})


def test_the_benchmark_says_that_a_tiny_codec_is_right(tmp_path: Path) -> None:
    program = Path(__file__).parents[3] / "benchmarks" / "codec_gpu.py"
    if not program.exists():
        pytest.skip("the benchmarks are in a checkout only")
    words = ["--tiny", "--device", "cpu", "--rows", "1", "2", "--out", str(tmp_path / "r.json")]
    done = subprocess.run([sys.executable, str(program), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert len(result["rows"]) == 10
    assert 0 < result["check"]["streamed"] < 1e-4
