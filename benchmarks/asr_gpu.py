"""Speech to text on a GPU: Whisper's shapes against transformers' batched ``generate`` and what the device allows.

    python benchmarks/asr_gpu.py --out FILE.json                                  # both large shapes
    python benchmarks/asr_gpu.py --shapes tiny --device cpu --out FILE.json       # does it work? no figures

Random weights at the published shapes; every clip is 30 s of noise and gets 110 tokens, what half a minute of English
has (3 words a second, 1.25 tokens a word), whatever the model would say. Ours is given samples, transformers finished
spectrograms: making them is not counted there. The floors are the encoder's operations at the rate of a large product,
and for each decode step the decoder's weights and the batch's cross keys and values at copy bandwidth, measured in the
same run. NOTES.md says what each figure means.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import environment, table
from gpu.check import compare
from gpu.engine import Loop
from gpu.floors import copy_bandwidth, gemm_rate
from gpu.report import write
from gpu.timeline import profile_steps
from msgspec import structs

from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.settings import Settings
from mstar_asr.whisper.request import CONTEXT, WINDOW, window_prompt, window_request
from mstar_asr.whisper.tokens import WhisperTokens

CLIP_S = 30.0
TOKENS = 110
POSITIONS = 1500
WARM, FEW = 7, 16
"""Rounds before those that count: steps outside of loops are captured when they have come six times, and a round of
many clips has many of them."""
CHECKED = 3
"""Clips whose answers are compared with float32's."""
LANGUAGES = 100


@dataclass(frozen=True)
class Shape:
    """A published configuration. :param clips: how many at once are measured."""

    key: str
    hidden: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    mels: int = 128
    clips: Sequence[int] = (1, 16, 64, 128)
    tokens: int = TOKENS

    @property
    def ffn(self) -> int:
        return 4 * self.hidden

    @property
    def vocab(self) -> int:
        return 51_866

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "activation_function": "gelu",
            "d_model": self.hidden,
            "num_mel_bins": self.mels,
            "encoder_layers": self.encoder_layers,
            "decoder_layers": self.decoder_layers,
            "encoder_attention_heads": self.heads,
            "decoder_attention_heads": self.heads,
            "encoder_ffn_dim": self.ffn,
            "decoder_ffn_dim": self.ffn,
            "max_source_positions": POSITIONS,
            "max_target_positions": 448,
            "scale_embedding": False,
            "vocab_size": self.vocab,
            "bos_token_id": 50257,
            "eos_token_id": 50257,
            "pad_token_id": 50256,
            "decoder_start_token_id": 50258,
            "tie_word_embeddings": True,
            "init_std": 0.02,
        }

    # --- floors -------------------------------------------------------------------------------------------------------
    def encoder_flops(self) -> float:
        """Of one clip: convolutions, products, attention, and the decoder's keys and values of it."""
        d, layers = self.hidden, self.encoder_layers
        convolutions = 2 * 3 * (3000 * self.mels * d + POSITIONS * d * d)
        products = layers * 2 * POSITIONS * (4 * d * d + 2 * d * self.ffn)
        attention = layers * 4 * POSITIONS * POSITIONS * d
        cross = self.decoder_layers * 2 * 2 * POSITIONS * d * d
        return float(convolutions + products + attention + cross)

    def step_bytes(self, clips: int) -> float:
        """What a decode step of *clips* rows must read in 16 bits."""
        d = self.hidden
        weights = self.decoder_layers * (6 * d * d + 2 * d * self.ffn) + self.vocab * d
        return 2.0 * (weights + clips * self.decoder_layers * 2 * POSITIONS * d)


SHAPES = {
    "large-v3-turbo": Shape("whisper_large_v3_turbo", 1280, 20, 32, 4),
    "large-v3": Shape("whisper_large", 1280, 20, 32, 32),
    "tiny": Shape("whisper_large_v3_turbo", 64, 2, 2, 2, clips=(1, 3), tokens=12),
}


def publish(shape: Shape, folder: Path, device: str, dtype: torch.dtype) -> None:
    """A checkpoint in the published layout."""
    import transformers

    config = transformers.WhisperConfig(**shape.config())
    torch.manual_seed(1)
    with torch.device(device):
        model = transformers.WhisperForConditionalGeneration(config).to(dtype)
    model.generation_config = _generation(transformers)
    model.save_pretrained(folder)
    del model
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": shape.mels}))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": _pieces()}))


def _codes() -> list[str]:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES as KNOWN

    return list(KNOWN)[:LANGUAGES]


def _generation(transformers: Any) -> Any:
    return transformers.GenerationConfig(
        bos_token_id=50257, eos_token_id=50257, pad_token_id=50257, decoder_start_token_id=50258,
        is_multilingual=True, lang_to_id={f"<|{code}|>": 50259 + n for n, code in enumerate(_codes())},
        task_to_id={"translate": 50359, "transcribe": 50360}, no_timestamps_token_id=50364, prev_sot_token_id=50362,
        suppress_tokens=[1, 2, 7], begin_suppress_tokens=[220, 50257], max_length=448, return_timestamps=False,
        alignment_heads=[[1, 0]],
    )  # fmt: skip


def _pieces() -> list[dict[str, Any]]:
    names = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in _codes())]
    names += ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    names += [f"<|{n * 0.02:.2f}|>" for n in range(1501)]
    return [{"id": 50257 + n, "content": name, "special": n < 108} for n, name in enumerate(names)]


def clips(count: int) -> list[np.ndarray]:
    """Noise of 30 s, with its reflection at either end, as a spectrogram has it."""
    draw = np.random.default_rng(0)
    return [np.pad((0.1 * draw.standard_normal(WINDOW)).astype(np.float32), CONTEXT, "reflect") for _ in range(count)]


# --- ours -------------------------------------------------------------------------------------------------------------
class Ours:
    """The engine in this process. *options*: of its deployment, beside what a round needs."""

    def __init__(self, shape: Shape, folder: Path, device: str, dtype: str, options: Mapping[str, Any] | None = None):
        registry = Registry(load_plugins(Settings(plugins=(), extra_plugins=("mstar_asr.plugin",))))
        needed = {"device": device, "dtype": dtype, "max_concurrent_requests": max(shape.clips)}
        self.shape, self.loop = shape, Loop(registry, shape.key, folder, {**(options or {}), **needed})
        self.tokens = WhisperTokens.read(folder)
        self.prompt = window_prompt(self.tokens, language="en")
        self.sounds = clips(max(shape.clips))

    def round(self, count: int) -> dict[str, float]:
        """*count* clips at once, to the last one's end. Seconds, of all and to the first token of the median clip."""
        loop, began = self.loop, time.perf_counter()
        names = [self._ask(sound) for sound in self.sounds[:count]]
        first: dict[str, float] = {}
        while not loop.ended.issuperset(names):
            loop.step()
            now = time.perf_counter()
            for name in names:
                if name not in first and loop.tokens[name]:
                    first[name] = now - began
        spent = time.perf_counter() - began
        if any(len(loop.tokens[name]) != self.shape.tokens for name in names):
            raise AssertionError("an answer has not the tokens that were forced")
        loop.cancel_all()
        return {"seconds": spent, "first_token_s": statistics.median(first.values())}

    def answers(self, count: int) -> list[tuple[np.ndarray, list[int]]]:
        """(samples, answer) of *count* clips at once."""
        names = [self._ask(sound) for sound in self.sounds[:count]]
        self.loop.run_to_end(names)
        found = [(s, self.loop.tokens[n]) for s, n in zip(self.sounds, names, strict=False)]
        self.loop.cancel_all()
        return found

    def _ask(self, sound: np.ndarray) -> str:
        request = window_request(self.loop.name(), self.tokens, sound, self.prompt, max_tokens=self.shape.tokens)
        sampling = {name: structs.replace(params, ignore_eos=True) for name, params in request.sampling.items()}
        return self.loop.ask(structs.replace(request, sampling=sampling))

    def rounds(self, count: int, times: int, after: Callable[[], None]) -> None:
        for _ in range(times):
            self.round(count)
            after()


# --- is it right? -----------------------------------------------------------------------------------------------------
class Reference:
    """transformers' logits of whole answers, with what the checkpoint forbids left out; see ``gpu.check``."""

    def __init__(self, shape: Shape, folder: Path, device: str, prompt: Sequence[int]):
        import transformers

        self._features = transformers.WhisperFeatureExtractor(feature_size=shape.mels)
        load = transformers.WhisperForConditionalGeneration.from_pretrained
        self._models = [
            load(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
            for dtype in (torch.float32, torch.bfloat16)
        ]
        self._prompt, self._device, self._tokens = list(prompt), device, WhisperTokens.read(folder)

    @torch.inference_mode()
    def logits(self, sound: np.ndarray, answer: Sequence[int]) -> list[torch.Tensor]:
        """float32 ``[len(answer), vocab]``: exact, and as bfloat16 has them."""
        clip = sound[CONTEXT:-CONTEXT]
        found = self._features(clip, sampling_rate=16_000, return_tensors="pt")["input_features"].to(self._device)
        ids = torch.tensor([[*self._prompt, *answer[:-1]]], device=self._device)
        both = []
        for model in self._models:
            said = model(found.to(model.dtype), decoder_input_ids=ids, use_cache=False).logits
            said = said[0, len(self._prompt) - 1 :].float()
            said[:, list(self._tokens.suppressed)] = -torch.inf
            said[0, list(self._tokens.suppressed_first)] = -torch.inf
            both.append(said)
        return both


# --- transformers -----------------------------------------------------------------------------------------------------
def theirs(shape: Shape, folder: Path, device: str, dtype: torch.dtype) -> dict[int, float]:
    """Seconds of ``generate`` for a batch of each size; features are there."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    load = transformers.WhisperForConditionalGeneration.from_pretrained
    model = load(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    found = {}
    for count in shape.clips:
        features = torch.randn(count, shape.mels, 2 * POSITIONS, device=device, dtype=dtype)
        options = {
            "language": "en", "task": "transcribe", "return_timestamps": False,
            "max_new_tokens": shape.tokens, "min_new_tokens": shape.tokens,
        }  # fmt: skip
        with torch.inference_mode():
            model.generate(features[: min(count, 2)], **{**options, "max_new_tokens": 4, "min_new_tokens": 4})
            _wait(device)
            began = time.perf_counter()
            model.generate(features, **options)
            _wait(device)
        found[count] = time.perf_counter() - began
        print(f"  transformers, {count} clips: {found[count]:.2f} s", flush=True)
    return found


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


# --- all --------------------------------------------------------------------------------------------------------------
def measure(
    shape: Shape, device: str, repeats: int, peer: bool, result: dict[str, Any], save: Callable[[], None]
) -> None:
    """Fill *result*, which *save* writes after each part."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        publish(shape, folder, device, dtype)
        small = device == "cpu"
        target = torch.device(device)
        copy, rate = copy_bandwidth(target, 1 << 22 if small else 1 << 30), gemm_rate(target, 256 if small else 8192)
        result.update(copy_bytes_per_s=copy, gemm_flops_per_s=rate)
        ours = Ours(shape, folder, device, str(dtype).removeprefix("torch."))
        result.update(ready_s=ours.loop.load_s, phases=ours.loop.phases)
        reference = Reference(shape, folder, device, ours.prompt)
        result["check"] = compare(reference, ours.answers(CHECKED), shape.tokens)
        print(f"  check: {result['check']}", flush=True)
        save()
        del reference
        rows: list[dict[str, Any]] = []
        result["rows"] = rows
        for count in shape.clips:
            for _ in range(WARM if count <= FEW else 2):
                ours.round(count)
            taken = [ours.round(count) for _ in range(repeats)]
            seconds = statistics.median(one["seconds"] for one in taken)
            encode, decode = count * shape.encoder_flops() / rate, shape.tokens * shape.step_bytes(count) / copy
            rows.append(
                {
                    "clips": count,
                    "seconds": seconds,
                    "audio_s_per_s": count * CLIP_S / seconds,
                    "first_token_s": statistics.median(one["first_token_s"] for one in taken),
                    "encoder_floor_s": encode,
                    "decoder_floor_s": decode,
                    "of_floor": (encode + decode) / seconds,
                }
            )
            print(f"  ours, {count} clips: {seconds:.3f} s, {rows[-1]['of_floor']:.0%} of the floor", flush=True)
            save()
            if device != "cpu":
                rows[-1]["timeline"] = profile_steps(partial(ours.rounds, count), 1, 1)
                rows[-1]["idle_share"] = rows[-1]["timeline"]["idle_share"]
                save()
        ours.loop.close()
        del ours
        gc.collect()
        if peer:
            for count, seconds in theirs(shape, folder, device, dtype).items():
                row = next(row for row in rows if row["clips"] == count)
                row.update(transformers_s=seconds, over_transformers=seconds / row["seconds"])
                save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="large-v3-turbo,large-v3", help="of " + ", ".join(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="without transformers")
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    result: dict[str, Any] = {"environment": environment(("torch", "transformers", "flashinfer-python")), "shapes": {}}
    for name in words.shapes.split(","):
        print(name, flush=True)
        found = result["shapes"].setdefault(name, {})
        with contextlib.suppress(KeyboardInterrupt):
            measure(
                SHAPES[name], words.device, words.repeats, not words.no_peer, found, lambda: write(words.out, result)
            )
    write(words.out, result)
    for name, found in result["shapes"].items():
        columns = ("clips", "seconds", "audio_s_per_s", "first_token_s", "of_floor", "idle_share", "over_transformers")
        table(f"{name}, {words.device}", found.get("rows", []), columns)


if __name__ == "__main__":
    main()
