"""The miniatures' descriptions and closed forms. No torch: this is what a plugin's light module looks like."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from mstar.spec.canvas import Canvas, Lengths, Sizes
from mstar.spec.model import Ability, LiveInput
from mstar.spec.tasks import Image
from mstar.testing.miniatures.common import FPS, RATE, VOCAB, Example, Miniature, MiniKnobs, decode, encode

__all__ = ["MINIATURES", "VOCAB"]

PRIME = 97  # modulus of the hybrid's recurrence
HYBRID_LAYERS = 2
BLANK = 4  # the transducer's blanks: multiples of this
STEPS_PER_CALL = 5
TAPS = (1.0, 0.5, 0.25)  # the codec's filter, newest code first
FRAME = 4  # samples a code; items a chunk of the duplex stream
CODEBOOKS = 3
PADS = 2  # frames that the talker adds after its input has ended
WINDOW = 4
CONTROLS = 3
CHUNK = 4
SOUND = 1000  # samples that go with each of them
FLICKER = 16  # how much brighter each frame is than the last
LOUDNESS = 1 / 512  # of speech and of chats with sound, so that no sample leaves -1…1
PIECE = 24  # characters that the speaking miniature takes at once
HUSH = VOCAB  # the label of silence
LABEL_S = 0.02  # seconds a label
HOP = 40  # samples in which the live transcriber sees one level
HOPS = 4  # of them a label
PATCHES = 2  # of a picture, to an embedding
PAUSE = 5  # labels of silence that end a word


Size = tuple[int, int]  # width and height


# --- closed forms
# --------------------------------------------------------------------------------------------------------


def continue_sum(ids: list[int], count: int, extra: int = 0) -> list[int]:
    """Each token is the sum of all before it, plus their number, plus *extra*, modulo the vocabulary."""
    context, out = list(ids), []
    for _ in range(count):
        out.append((sum(context) + len(context) + extra) % VOCAB)
        context.append(out[-1])
    return out


def hybrid_answer(ids: list[int], count: int) -> list[int]:
    """Sum of the context, plus in each layer, where ids are shifted by its number, the state of ``s ← 2s + id mod 97``
    and the token that came after the last one when that came before."""
    context, out = list(ids), []
    for _ in range(count):
        token = sum(context)
        for layer in range(HYBRID_LAYERS):
            state, follower = 0, {}
            shifted = [(each + layer) % VOCAB for each in context]
            for before, each in zip([-1, *shifted], shifted, strict=False):
                state = (2 * state + each) % PRIME
                follower[before] = each
            token += state + follower.get(shifted[-1], 0)
        out.append(token % VOCAB)
        context.append(out[-1])
    return out


def planner_answer(ids: list[int]) -> list[int]:
    out = [sum(ids) % VOCAB]
    while out[-1] % 7 and len(out) < 13:
        out.append(out[-1] * 2 % VOCAB if out[-1] % 2 else (out[-1] + 5) % VOCAB)
    return out


def ctc_answer(frames: np.ndarray) -> list[int]:
    padded = np.append(frames, frames[-1]) if len(frames) % 2 else frames
    return [int(v) for v in np.rint(padded.reshape(-1, 2).mean(1))]


def spoken(text: str, rate: int = 8000, pause_s: float = 0.5) -> np.ndarray:
    """float32 samples in which *mini_ctc* hears *text*: a level a character, 20 ms each; a line break is a pause."""
    size, levels = round(LABEL_S * rate), []
    for char in text:
        level = 0.0 if char == "\n" else (encode(char)[0] + 1) / (2 * VOCAB)
        levels.append(np.full(round(pause_s * rate) if char == "\n" else size, level, dtype=np.float32))
    return np.concatenate(levels)


def scribe_answer(samples: np.ndarray) -> str:
    """What *mini_scribe* hears in samples as :func:`spoken` makes them: the level in the middle of each label."""
    heard = [int(np.rint(level * 2 * VOCAB)) - 1 for level in samples[HOP * HOPS // 2 :: HOP * HOPS]]
    words = "".join("\n" if label < 0 else decode([label]) for label in heard)
    return re.sub("\n+", " ", words.strip("\n"))


def picture_size(letter: int) -> int:
    """Embeddings of the picture that stands for a capital letter's id; 0 for what is text."""
    return 1 + letter % 4 if decode([letter]).isupper() else 0


def look_answer(ids: list[int], count: int) -> list[int]:
    """A picture is its letter, as often as it has embeddings."""
    return continue_sum([token for token in ids for _ in range(picture_size(token) or 1)], count)


def embed_answer(ids: list[int]) -> np.ndarray:
    return np.array([len(ids), sum(ids), ids[0], ids[-1]], dtype=np.float32)


def transducer_answer(frames: list[int]) -> list[int]:
    out, last = [], 0
    for frame in frames:
        token = (frame + last) % VOCAB
        if token % BLANK:
            out.append(token)
            last = token
    return out


def fir_answer(codes: list[int]) -> np.ndarray:
    padded = np.concatenate([np.zeros(len(TAPS) - 1), np.array(codes, dtype=np.float64)])
    filtered = sum(tap * padded[len(TAPS) - 1 - i : len(padded) - i] for i, tap in enumerate(TAPS))
    return np.repeat(np.asarray(filtered, dtype=np.float32), FRAME)


def voice_ids(voice: str | None, sample: np.ndarray | None = None) -> list[int]:
    """What stands before the text: the first letters of the voices that are blended, or a sample's length."""
    if sample is not None:
        return [len(sample) % VOCAB]
    return [] if voice is None else [encode(name)[0] for name in voice.split("+")]


def speech_answer(text: str, count: int = 16, voice: str | None = None, sample: np.ndarray | None = None) -> np.ndarray:
    """The sound of *text* in one piece."""
    codes = continue_sum([*voice_ids(voice, sample), *encode(text)], count)
    sound: np.ndarray = fir_answer(codes) * np.float32(LOUDNESS)
    return sound


def omni_speech(text: str, count: int = 16, voice: str | None = None) -> tuple[str, np.ndarray]:
    """What is said to a chat of one message, and its sound."""
    tokens = continue_sum([*voice_ids(voice), *encode(text)], count)
    sound: np.ndarray = fir_answer(talker_answer(tokens)) * np.float32(LOUDNESS)
    return decode(tokens), sound


def talker_answer(tokens: list[int]) -> list[int]:
    """The sum of each frame's codebooks, over the thinker's tokens and the pads after them."""
    state, sums = 0, []
    for hidden in [*tokens, *[0] * PADS]:
        codes = [(hidden + state) % VOCAB]
        for depth in range(1, CODEBOOKS):
            codes.append((codes[-1] * 2 + depth) % VOCAB)
        state = codes[-1]
        sums.append(sum(codes))
    return sums


def duplex_answer(heard: np.ndarray) -> dict[str, Any]:
    sums = np.cumsum(heard.astype(np.float32), dtype=np.float32)
    ends = [min(i + FRAME, len(heard)) - 1 for i in range(0, len(heard), FRAME)]
    return {"audio": sums, "text": decode(int(np.rint(abs(sums[end]))) % VOCAB for end in ends)}


def denoise_answer(prompt: list[int], negative: list[int], latent: np.ndarray, steps: int, scale: float) -> np.ndarray:
    x = latent.astype(np.float64)
    for _ in range(steps):
        cond = x * 0.5 - sum(prompt) / VOCAB
        uncond = x * 0.5 - 0.5 * sum(negative) / VOCAB
        x = x - (uncond + scale * (cond - uncond)) / steps
    picture: np.ndarray = np.rint(x.clip(0, 255))
    return picture


def video_answer(canvas: np.ndarray, frames: int) -> dict[str, Any]:
    """Each frame is brighter than the last; the sound is a sawtooth of 200 Hz."""
    shown = (canvas[None].astype(np.int64) + FLICKER * np.arange(frames)[:, None, None, None]) % 256
    sound = np.arange(frames * SOUND) % 40 / 80 - 0.25
    return {"video": shown.astype(np.float32), "audio": sound.astype(np.float32)}


def rollout_answer(drive: float, windows: int, start: float = 0.0) -> np.ndarray:
    rows, x = [], start
    for index in range(windows):
        x = x * 0.5 + drive + index
        rows.append([x] * 3)
    return np.array(rows, dtype=np.float32)


def world_answer(controls: np.ndarray) -> np.ndarray:
    return np.stack([controls[max(0, i + 1 - WINDOW) : i + 1].mean(0) for i in range(len(controls))])


def unified_answer(ids: list[int], count: int, canvas: np.ndarray, steps: int) -> dict[str, Any]:
    out = continue_sum(ids, count)
    context = [*ids, *out[:-1]]  # the last token is never fed back
    expected = (sum(context) + len(canvas)) / (len(context) + len(canvas))
    x = canvas.astype(np.float64)
    for _ in range(steps + 1):
        x = x * 0.5 + expected
    return {"text": decode(out), "pixels": x}


# --- knobs and requests
# --------------------------------------------------------------------------------------------------


class DenoiseKnobs(MiniKnobs):
    steps: int = Field(4, ge=1, le=32, description="Denoise steps.")
    guidance: float = Field(2.0, ge=0, le=10, description="Guidance scale; `0` is none.")
    size: int = Field(2, ge=1, le=8, description="Side of the picture in pixels.")


class VideoKnobs(MiniKnobs):
    frames: Literal[1, 5, 9, 13, 17, 21, 25, 29, 33] = Field(5, description="Length where no seconds are given.")


class RolloutKnobs(MiniKnobs):
    windows: int = Field(3, ge=1, le=64, description="Windows to roll forward.")
    drive: float = Field(1.0, ge=-8, le=8, description="The action of every window.")


class UnifiedKnobs(MiniKnobs):
    steps: int = Field(2, ge=1, le=16, description="Refinements of the canvas.")
    points: int = Field(3, ge=1, le=9, description="Points of the canvas.")


class CtcKnobs(MiniKnobs):
    window_seconds: float | None = Field(None, gt=0, le=40, description="Longest clip and window, in seconds.")


def latent_for(text: str, size: Size, seed: int = 0, images: Sequence[np.ndarray] = ()) -> np.ndarray:
    """A start latent ``[height, width, 3]`` that depends on the text, the seed and the colours of *images*."""
    count = size[0] * size[1] * 3
    latent = (np.arange(count, dtype=np.float32) * 7 + len(text) + seed % 16).reshape(size[1], size[0], 3) % 32
    for image in images:
        latent += image.reshape(-1, 3).mean(0, dtype=np.float64).astype(np.float32) / 8
    return latent


def picture_of(text: str, size: Size, seed: int = 0, images: Sequence[np.ndarray] = ()) -> np.ndarray:
    """A video's first frame ``[height, width, 3]``: the first of *images*, of the video's size, else two areas whose
    colours depend on the text and the seed."""
    width, height = size
    if images:
        rows, columns = (np.arange(n) * len(a) // n for n, a in ((height, images[0]), (width, images[0][0])))
        return images[0][rows][:, columns].astype(np.float32)
    base = 8 * (len(text) + seed % 16) + 64 * np.arange(3)
    area = 32 * (np.arange(width) >= width // 2)
    return np.broadcast_to((base + area[:, None]) % 256, (height, width, 3)).astype(np.float32)


def canvas_for(points: int) -> np.ndarray:
    return (np.arange(points * 3, dtype=np.float32) * 3 % 16).reshape(points, 3)


def frames_for(text: str) -> np.ndarray:
    """Two frames a character, around its id."""
    ids = np.repeat(np.array(encode(text), dtype=np.float32), 2)
    return ids + np.where(np.arange(len(ids)) % 2, 0.25, -0.25).astype(np.float32)


def _text(rng: random.Random, longest: int = 40) -> str:
    return "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, longest)))


def _text_example(rng: random.Random) -> Example:
    knobs = {"max_tokens": rng.randint(1, 20)}
    if rng.random() < 0.5:  # one token in sixty-four: some of these answers end early
        knobs["stop_token"] = rng.randrange(VOCAB)
    return Example(_text(rng), knobs)


def _look_example(rng: random.Random) -> Example:
    example = _text_example(rng)
    text = "".join(rng.choice("ABCDE") if rng.random() < 0.3 else char for char in example.text)
    return Example(text, example.knobs)


def _plain_example(rng: random.Random) -> Example:
    return Example(_text(rng))


def _items(rng: random.Random, shape: tuple[int, ...]) -> np.ndarray:
    count = int(np.prod(shape))
    return np.array([rng.randint(-8, 8) for _ in range(count)], dtype=np.float32).reshape(shape)


def _appends(rng: random.Random, stream: str, shape: tuple[int, ...], most: int) -> Example:
    pieces = [(stream, _items(rng, (rng.randint(1, most), *shape))) for _ in range(rng.randint(1, 5))]
    return Example(appends=tuple(pieces))


def _said(rng: random.Random) -> Example:
    """A few words, cut anywhere, as a client's microphone would."""
    samples = spoken("\n".join(_text(rng, 6) for _ in range(rng.randint(1, 2))), RATE, pause_s=0.2)
    ends = [0, *sorted(rng.sample(range(1, len(samples)), rng.randint(0, 4))), len(samples)]
    return Example(appends=tuple(("audio", samples[a:b]) for a, b in itertools.pairwise(ends)))


def joined(example: Example) -> np.ndarray:
    """All that the client sends, as one array."""
    return np.concatenate([items for _, items in example.appends])


def _denoise_example(rng: random.Random) -> Example:
    knobs = {"steps": rng.randint(1, 8), "guidance": float(rng.randint(0, 4)), "size": rng.choice([1, 2, 2, 3])}
    return Example(_text(rng, 12), knobs)


def _video_example(rng: random.Random) -> Example:
    return Example(_text(rng, 12), {"frames": rng.choice([1, 5, 9])})


def _count(example: Example) -> int:
    count: int = example.knobs.get("max_tokens", 16)
    return count


def _stopped(tokens: list[int], example: Example) -> list[int]:
    """*tokens* up to and with the first stop token."""
    stop = example.knobs.get("stop_token")
    return tokens[: tokens.index(stop) + 1] if stop in tokens else tokens


def _sums(example: Example) -> list[int]:
    return _stopped(continue_sum(encode(example.text), _count(example)), example)


def _speech(example: Example) -> Mapping[str, Any]:
    return {"audio": fir_answer(_sums(example))}


def _omni(example: Example) -> Mapping[str, Any]:
    tokens = _sums(example)
    return {"text": decode(tokens), "audio": fir_answer(talker_answer(tokens))}


def _denoise(example: Example) -> Mapping[str, Any]:
    k = DenoiseKnobs(**example.knobs)
    ids = encode(example.text)
    latent = latent_for(example.text, (k.size, k.size), k.seed or 0, pictures(example.parts))
    return {"image": denoise_answer(ids, [1], latent, k.steps, k.guidance)[None]}


def _video(example: Example) -> Mapping[str, Any]:
    k = VideoKnobs(**example.knobs)
    return video_answer(picture_of(example.text, VIDEO_SIZE, k.seed or 0, pictures(example.parts)), k.frames)


def pictures(parts: Sequence[Any]) -> list[np.ndarray]:
    """The pixels of the images among *parts*."""
    return [part.pixels for part in parts if isinstance(part, Image)]


def _unified(example: Example) -> Mapping[str, Any]:
    k = UnifiedKnobs(**example.knobs)
    return unified_answer(encode(example.text), _count(example), canvas_for(k.points), k.steps)


VIDEO_SIZE = (16, 16)  # where a request names none
_PICTURES = Sizes(multiple=2, min_side=2, max_side=512, max_pixels=65536)
_MODELS = "mstar.testing.miniatures."
_PROCESSORS = "mstar.testing.miniatures.processors:"
_TEXT = {"text": "text"}
_LANGUAGE: tuple[Ability, ...] = ("generate", "chat", "completion")

MINIATURES = (
    Miniature(
        "mini_chat",
        "shape 1: autoregressive text with paged KV and prefix reuse",
        _MODELS + "text:Chat",
        _TEXT,
        _text_example,
        lambda e: {"text": decode(_sums(e))},
        abilities=_LANGUAGE,
    ),
    Miniature(
        "mini_look",
        "shape 1: text with pictures among it, encoded in pieces and kept by content",
        _MODELS + "looking:Look",
        _TEXT,
        _look_example,
        lambda e: {"text": decode(_stopped(look_answer(encode(e.text), _count(e)), e))},
        abilities=_LANGUAGE,
        prepare=_PROCESSORS + "LookProcessor",
    ),
    Miniature(
        "mini_seq2seq",
        "shape 2: encoder, then decoder with write-once cross-attention",
        _MODELS + "text:Seq2Seq",
        _TEXT,
        _text_example,
        lambda e: {"text": decode(_stopped(continue_sum([0], _count(e), sum(encode(e.text))), e))},
        prepare=_PROCESSORS + "Seq2SeqProcessor",
    ),
    Miniature(
        "mini_ctc",
        "shape 3: encoder and CTC head without state",
        _MODELS + "speech:Ctc",
        _TEXT,
        _plain_example,
        lambda e: {"text": decode(ctc_answer(frames_for(e.text)))},
        knobs=CtcKnobs,
        abilities=("generate", "transcription", "translation"),
        prepare="mstar.testing.miniatures.hearing:HearingProcessor",
    ),
    Miniature(
        "mini_embed",
        "shape 3: encoder that gives one vector for the whole text",
        _MODELS + "speech:Embed",
        {"vector": "embedding"},
        _plain_example,
        lambda e: {"vector": embed_answer(encode(e.text))[None]},
        abilities=("generate", "embedding"),
    ),
    Miniature(
        "mini_transducer",
        "shape 4: transducer with state slots, many steps an iteration",
        _MODELS + "speech:Transducer",
        _TEXT,
        _plain_example,
        lambda e: {"text": decode(transducer_answer(encode(e.text)))},
        prepare=_PROCESSORS + "IdFramesProcessor",
    ),
    Miniature(
        "mini_scribe",
        "shape 4: live transcription, clocked by the client's stream",
        _MODELS + "listening:Scribe",
        _TEXT,
        _said,
        lambda e: {"text": scribe_answer(joined(e))},
        abilities=("generate", "transcription", "realtime"),
        inputs=("audio",),
        feeds=(LiveInput("audio", "audio", rate=RATE, description="What is to be written down."),),
        prepare="mstar.testing.miniatures.hearing:ScribeProcessor",
    ),
    Miniature(
        "mini_tts",
        "shape 5: language model → codec, streamed in a window ramp",
        _MODELS + "speech:Tts",
        {"audio": "audio"},
        _text_example,
        _speech,
        abilities=("generate", "speech"),
        inputs=("text", "audio"),
        prepare=_PROCESSORS + "SpeechProcessor",
    ),
    Miniature(
        "mini_omni",
        "shape 6: thinker → talker with a depth loop → codec",
        _MODELS + "speech:Omni",
        {"text": "text", "audio": "audio"},
        _text_example,
        _omni,
        abilities=("generate", "chat"),
        prepare=_PROCESSORS + "VoiceProcessor",
    ),
    Miniature(
        "mini_duplex",
        "shape 7: full duplex, clocked by the client's stream",
        _MODELS + "speech:Duplex",
        {"text": "text", "audio": "audio"},
        lambda rng: _appends(rng, "audio_in", (), 11),
        lambda e: duplex_answer(joined(e)),
        feeds=(LiveInput("audio_in", "audio", rate=RATE, description="What the model hears."),),
        abilities=("generate", "realtime"),
        prepare=_PROCESSORS + "DuplexProcessor",
    ),
    Miniature(
        "mini_hybrid",
        "shape 8: recurrent and attention layers in one node",
        _MODELS + "text:Hybrid",
        _TEXT,
        _text_example,
        lambda e: {"text": decode(_stopped(hybrid_answer(encode(e.text), _count(e)), e))},
        abilities=_LANGUAGE,
    ),
    Miniature(
        "mini_denoise",
        "shape 9: denoise loop with guidance branches and per-request step counts",
        _MODELS + "worlds:Denoise",
        {"image": "image"},
        _denoise_example,
        _denoise,
        knobs=DenoiseKnobs,
        abilities=("generate", "image", "image_edit"),
        prepare=_PROCESSORS + "DenoiseProcessor",
        tolerance=1.0,
        inputs=("text", "image"),
        told=("preview", "progress"),
        canvas=Canvas(_PICTURES, references=4, masks=True),
    ),
    Miniature(
        "mini_video",
        "shape 10: a video with sound, rolled forward frame by frame",
        _MODELS + "video:Clip",
        {"video": "video", "audio": "audio"},
        _video_example,
        _video,
        knobs=VideoKnobs,
        abilities=("generate", "video"),
        prepare=_PROCESSORS + "VideoProcessor",
        inputs=("text", "image"),
        told=("progress",),
        canvas=Canvas(_PICTURES, Lengths(FPS, max_frames=33, first=1, step=4), references=1),
    ),
    Miniature(
        "mini_rollout",
        "shape 10: windowed rollout with a session that is resumed",
        _MODELS + "worlds:Rollout",
        {"state": "state"},
        lambda rng: Example(knobs={"windows": rng.randint(1, 9), "drive": float(rng.randint(-4, 4))}),
        lambda e: {"state": rollout_answer(e.knobs["drive"], e.knobs["windows"])},
        knobs=RolloutKnobs,
        prepare=_PROCESSORS + "LiveProcessor",
        tolerance=1e-5,
    ),
    Miniature(
        "mini_world",
        "shape 11: interactive world with rolling KV and a control per frame",
        _MODELS + "worlds:World",
        {"frames": "state"},
        lambda rng: _appends(rng, "controls", (CONTROLS,), 4),
        lambda e: {"frames": world_answer(joined(e))},
        feeds=(LiveInput("controls", "state", (CONTROLS,), 10, ("forward", "right", "up")),),
        prepare=_PROCESSORS + "LiveProcessor",
        tolerance=1e-5,
    ),
    Miniature(
        "mini_policy",
        "shape 12: observation → action chunk, pipelined",
        _MODELS + "worlds:Policy",
        {"actions": "action"},
        lambda rng: _appends(rng, "observations", (3,), 4),
        lambda e: {"actions": joined(e)[:, None, :] * np.arange(1, CHUNK + 1, dtype=np.float32)[None, :, None]},
        feeds=(LiveInput("observations", "state", (3,)),),
        prepare=_PROCESSORS + "LiveProcessor",
    ),
    Miniature(
        "mini_unified",
        "shape 13: understanding and generation walks on one node",
        _MODELS + "worlds:Unified",
        {"text": "text", "pixels": "state"},
        lambda rng: Example(
            _text(rng), {"max_tokens": rng.randint(1, 8), "steps": rng.randint(1, 5), "points": rng.randint(1, 9)}
        ),
        _unified,
        knobs=UnifiedKnobs,
        prepare=_PROCESSORS + "UnifiedProcessor",
        tolerance=1e-4,
    ),
    Miniature(
        "mini_planner",
        "shape 14: walks chosen by the previous walk's output",
        _MODELS + "text:Planner",
        _TEXT,
        _plain_example,
        lambda e: {"text": decode(planner_answer(encode(e.text)))},
    ),
)
