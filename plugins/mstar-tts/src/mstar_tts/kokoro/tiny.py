"""A tiny random Kokoro in the published layout: what tests and the conformance suite serve."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mstar.nn.node import Node
from mstar.weights.names import WeightMap
from mstar_tts.kokoro.config import KokoroConfig
from mstar_tts.kokoro.convert import FILE, PARTS
from mstar_tts.kokoro.nodes import FrameHalf, TextHalf

__all__ = ["CONFIG", "write_kokoro"]

_SYMBOLS = (
    ';:,.!?—…"()“” \u0303ʣʥʦʨᵝꭧAIOQSTWYᵊabcdefhijklmnopqrstuvwxyzɑɐɒæβɔɕçɖðʤəɚɛɜɟɡɥɨɪʝɯɰŋɳɲɴøɸθœ'
    "ɹɾɻʁɽʂʃʈʧʊʋʌɣɤχʎʒʔˈˌːʰʲ↓→↗↘ᵻ"
)
_VOICES = ("af_bella", "af_heart", "bm_daniel", "ff_siwis", "jf_alpha")

CONFIG: dict[str, Any] = {
    "vocab": {symbol: number for number, symbol in enumerate(_SYMBOLS, 1)},
    "n_token": 178,
    "hidden_dim": 16,
    "style_dim": 8,
    "n_layer": 2,
    "n_mels": 8,
    "max_dur": 4,
    "dropout": 0.0,
    "text_encoder_kernel_size": 5,
    "plbert": {
        "hidden_size": 16,
        "embedding_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 512,
        "num_hidden_layers": 2,
    },
    "istftnet": {
        "upsample_rates": [2, 4],
        "upsample_kernel_sizes": [4, 8],
        "upsample_initial_channel": 16,
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3, 5]],
        "gen_istft_n_fft": 20,
        "gen_istft_hop_size": 5,
        "decoder_width": 16,
        "decoder_text_width": 4,
    },
}


def write_kokoro(folder: Path, config: Mapping[str, Any] = CONFIG) -> None:
    """Write ``kokoro-v1_0.pth``, its *config* and five voices, one of them in torch's format, to *folder*."""
    random = torch.Generator().manual_seed(7)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.save(_state_dicts(config, random), folder / FILE)
    (folder / "voices").mkdir()
    for name in _VOICES:
        pack = torch.randn(510, 1, 2 * config["style_dim"], generator=random)
        if name == "bm_daniel":
            torch.save(pack, folder / "voices" / f"{name}.pt")
        else:
            (folder / "voices" / f"{name}.bin").write_bytes(pack.numpy().astype("<f4").tobytes())


def _state_dicts(given: Mapping[str, Any], random: torch.Generator) -> dict[str, dict[str, Tensor]]:
    config = KokoroConfig.read(given)
    with torch.device("meta"):
        nodes: tuple[Node, ...] = (TextHalf(config, (64,), False), FrameHalf(config, 64, torch.float32, False))
    content: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
    for node in nodes:
        shapes = {name: parameter.shape for name, parameter in node.named_parameters()}
        for place in WeightMap.from_module(node).placements:
            shape = list(shapes[place.target])
            if place.rows is not None:
                shape[0] = place.rows
            part, _, name = place.published.partition(".")
            content[part][f"module.{name}"] = _values(place.published, shape, random)
            if "duration_proj" in name and name.endswith("bias"):  # about three frames a phoneme, as speech has
                share = min(0.5, 3 / config.max_duration)
                content[part][f"module.{name}"] += math.log(share / (1 - share))
    return content


def _values(name: str, shape: list[int], random: torch.Generator) -> Tensor:
    """Values like a trained model's: norms around one, a pitch that can be heard, a spectrum that does not explode."""
    drawn = torch.randn(shape, generator=random)
    if name.endswith("F0_proj.bias"):
        return drawn + 150
    if "alpha" in name or name.endswith((".gamma", "weight_g", "LayerNorm.weight", "layer_norm.weight")):
        return (1 + 0.2 * drawn) * (0.1 if "conv_post" in name else 1.0)
    if len(shape) == 1:
        return 0.1 * drawn
    spread = drawn[0].numel() ** -0.5
    return drawn * (0.02 if "noise_convs" in name else 10 * spread if "F0_proj" in name else spread)


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    write_kokoro(Path(sys.argv[1]))
