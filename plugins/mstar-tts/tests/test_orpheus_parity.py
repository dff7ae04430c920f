"""Orpheus and SNAC against their reference implementations, from checkpoints in the published layouts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.nn.model import BuildContext
from mstar.nn.sampling import stream_key
from mstar.processing.tokenizer import TextTokenizer
from mstar.runtime.local import Local
from mstar.weights.loader import load
from mstar_tts.noise import normal
from mstar_tts.orpheus.codec import Codec
from mstar_tts.orpheus.model import Orpheus
from mstar_tts.orpheus.spec import OrpheusOptions
from mstar_tts.orpheus.tiny import SNAC_CONFIG, write_orpheus
from mstar_tts.orpheus.tokens import FRAME, LEVELS
from mstar_tts.snac.decoder import margins

sys.path.insert(0, str(Path(__file__).parent))
from orpheus_serving import local

snac = pytest.importorskip("snac", reason="needs pip install --no-deps snac==1.2.1 einops")
CPU = torch.device("cpu")
KEYS = torch.tensor([5, -77, 123_456_789])
SAMPLES = 2048


class Reference:
    """``snac.SNAC``, whose noise is ours: that of a key, counted from a sample."""

    def __init__(self, folder: Path):
        self.model = snac.SNAC.from_pretrained(str(folder))

    def decode(self, frames: Tensor, key: Tensor, before: int = 0) -> Tensor:
        """*frames*: codes ``[n, 7]`` from 0. *before*: frames that came before them. ``[n * 2048]``."""
        levels = [frames[:, list(level)].reshape(1, -1) for level in LEVELS]
        keys, drawn = iter(range(4)), torch.randn

        def noise(shape: tuple[int, ...], **kinds: Any) -> Tensor:
            block, count = next(keys), shape[-1]
            own = key[None] ^ (stream_key(0, "snac", str(block)) - (1 << 63))
            return normal(own, count, torch.tensor([before * count // len(frames)])).view(shape)

        torch.randn = noise  # type: ignore[assignment]
        try:
            with torch.inference_mode():
                sound: Tensor = self.model.decode(levels)[0, 0]
        finally:
            torch.randn = drawn
        return sound


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Orpheus whose SNAC has been written by the reference."""
    folder = tmp_path_factory.mktemp("orpheus")
    write_orpheus(folder)
    torch.manual_seed(3)
    model = snac.SNAC(**SNAC_CONFIG)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("alpha"):
                parameter.uniform_(0.5, 2)
            elif name.endswith("original0"):
                parameter.mul_(torch.empty_like(parameter).uniform_(0.8, 1.5))
    torch.save(model.state_dict(), folder / "snac" / "pytorch_model.bin")
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder / "snac")


def codec_of(folder: Path, **options: Any) -> Codec:
    model = Orpheus(BuildContext(folder, torch.float32, CPU, OrpheusOptions(**options)))
    with torch.device("meta"):
        node = model.build("codec")
    load(node, model.weights("codec"), folder, CPU, torch.float32)
    model.loaded("codec", node)
    assert isinstance(node, Codec)
    return node


@pytest.fixture(scope="module")
def codec(folder: Path) -> Codec:
    codec = codec_of(folder)
    codec.frames = {}  # all of any window
    return codec


def decode(codec: Codec, frames: Tensor, key: Tensor, offset: list[int], left: list[int]) -> Tensor:
    """*frames* ``[rows, n, 7]`` from 0."""
    places = torch.arange(FRAME) * codec.tokens.codes
    ids = (frames + places + codec.tokens.first_code).flatten(1)
    told = (torch.tensor(left) * FRAME, key, torch.tensor(offset) * FRAME)
    with torch.inference_mode():
        return codec(None, ids, *told)["samples"]  # type: ignore[no-any-return]


def drawn(rows: int, frames: int) -> Tensor:
    return torch.randint(0, 16, (rows, frames, FRAME), generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_the_codec(codec: Codec, reference: Reference, count: int) -> None:
    frames = drawn(3, count)
    got = decode(codec, frames, KEYS, [0, 5, 2], [0, 0, 0])
    wanted = torch.stack([reference.decode(f, k, b) for f, k, b in zip(frames, KEYS, (0, 5, 2), strict=True)])
    assert wanted.std() > 0.05
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_part_of_a_window_is_what_it_is_in_the_whole(codec: Codec, folder: Path, size: int) -> None:
    frames, left = drawn(3, 9), [0, 3, 9 - size]
    whole = decode(codec, frames, KEYS, [1, 1, 1], [0, 0, 0])
    windows = {"chunk_frames": (size,), "left_frames": 3, "ahead_frames": 6 - size}  # of nine frames
    part = decode(codec_of(folder, **windows), frames, KEYS, [1, 1, 1], left)
    wanted = torch.stack([row[at * SAMPLES : (at + size) * SAMPLES] for row, at in zip(whole, left, strict=True)])
    torch.testing.assert_close(part, wanted, rtol=1e-4, atol=1e-6)
    assert part.shape == (3, size * SAMPLES)
    last = decode(codec_of(folder, **windows), frames, KEYS, [1, 1, 1], [8, 8, 8])  # one is left
    torch.testing.assert_close(last[:, :SAMPLES], whole[:, -SAMPLES:], rtol=1e-4, atol=1e-6)


def test_margins_are_what_a_sample_depends_on(codec: Codec) -> None:
    """A code changes nothing beyond them, and something just within."""
    reach = margins(codec.config)[0]  # of SNAC's own frames, four to a frame of codes
    frames = drawn(1, 16)
    other = frames.clone()
    other[0, 8, 6] = (other[0, 8, 6] + 1) % 16  # the last quarter of frame 8
    changed = (decode(codec, frames, KEYS[:1], [0], [0]) != decode(codec, other, KEYS[:1], [0], [0]))[0].nonzero()[:, 0]
    hop = SAMPLES // 4
    assert 35 * hop - (reach + 1) * hop <= changed.min() < 35 * hop - (reach - 3) * hop
    assert 36 * hop + (reach - 3) * hop < changed.max() <= 36 * hop + (reach + 1) * hop


# --- the whole model ----------------------------------------------------------------------------------------------
TEXT = "Hello there, <laugh> you."


class Written:
    """What the reference writes for a text, greedily."""

    def __init__(self, folder: Path, codec: Codec, count: int):
        transformers = pytest.importorskip("transformers")
        model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer, tokens = TextTokenizer(folder), codec.tokens
        custom = tokens.custom
        self.prompt = [
            *(custom + 3, *tokenizer.encode(f"tara: {TEXT}"), tokenizer.id_of("<|eot_id|>")),
            *(custom + 4, custom + 5, custom + 1),
        ]
        answer = model.generate(
            torch.tensor([self.prompt]),
            do_sample=False,
            max_new_tokens=count,
            repetition_penalty=1.3,
            eos_token_id=custom + 2,
            pad_token_id=0,
        )[0, len(self.prompt) :].tolist()
        self.ended = answer[-1] == custom + 2
        codes: list[int] = []
        for token in answer:
            code = token - custom - 10 - len(codes) % FRAME * tokens.codes
            if 0 <= code < tokens.codes:
                codes.append(code)
        whole = len(codes) // FRAME * FRAME
        self.tokens, self.frames = answer, torch.tensor(codes[:whole]).view(-1, FRAME)


@pytest.fixture(scope="module")
def written(folder: Path, codec: Codec) -> Written:
    return Written(folder, codec, 90)


def spoken(model: Local, **knobs: Any) -> np.ndarray:
    sounds = model.generate(TEXT, temperature=0.0, seed=4, max_tokens=90, **knobs).outputs["audio"]
    return np.concatenate([sound.samples for sound in sounds])  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[Local]:
    with local(folder, left_frames=3, ahead_frames=3) as model:
        yield model


def test_speech(folder: Path, exact: Local, written: Written, reference: Reference) -> None:
    """Prompt, penalties over prompt and answer, codes, and the sound of all of them, in windows that have all they
    need."""
    assert len(written.frames) > 4
    key = torch.tensor(stream_key(4, "orpheus") - (1 << 63))
    whole = reference.decode(written.frames, key)
    torch.testing.assert_close(torch.from_numpy(spoken(exact)), whole, rtol=1e-4, atol=2e-5)


def test_published_windows(folder: Path, written: Written, reference: Reference) -> None:
    """28 tokens, 7 further each time: what the reference makes of each window, its edges included."""
    key = torch.tensor(stream_key(4, "orpheus") - (1 << 63))
    parts = []
    for frame in range(len(written.frames)):
        begin = max(0, frame - 1)
        sound = reference.decode(written.frames[begin : frame + 3], key, begin)
        parts.append(sound[(frame - begin) * SAMPLES :][:SAMPLES])
    wanted = torch.cat(parts)
    with local(folder) as model:
        got = torch.from_numpy(spoken(model))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5)
    whole = reference.decode(written.frames, key)
    apart = ((got - whole).norm() / whole.norm()).item()  # a codec of random weights, whose whole reach counts
    assert 1e-4 < apart < 0.05
