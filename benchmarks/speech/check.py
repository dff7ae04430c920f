"""Whether what is measured is right, before it is: lengths, seeds, and the codec against float32 on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speech.streams import RATE, Speaker, run_streams, until

__all__ = ["check"]

TOLERANCE = 2e-2
"""Relative, of the same sound made twice."""
EXACT, ROUNDED = 2e-3, 0.3
"""Relative, of a codec's sound against the CPU's: in float32, where a fault shows; and with TensorFloat-32, whose ten
bits a network of random weights makes more of than a trained one."""


def check(speaker: Speaker, seconds: float) -> dict[str, Any]:
    """:raises AssertionError: something is wrong."""
    seconds = min(seconds, 2.0)
    run_streams(speaker, 2, seconds, 1)
    once, again = (_sound(speaker, seconds) for _ in range(2))
    found: dict[str, Any] = {"audio_s": len(once) / RATE}
    if len(once) != len(again):
        raise AssertionError(f"one seed, two lengths: {len(once)} and {len(again)} samples")
    found["repeated"] = float(np.linalg.norm(once - again) / max(1e-9, np.linalg.norm(once)))
    if speaker.family.steps_per_s and not seconds - 0.1 <= len(once) / RATE <= seconds + 0.1:
        raise AssertionError(f"{len(once) / RATE:.2f} s of sound instead of {seconds:.2f}: codes were left out")
    if found["repeated"] > TOLERANCE:
        raise AssertionError(f"one seed, two sounds: {found['repeated']:.2g} apart")
    codec: Any = speaker.worker.engine.nodes.get("codec")
    if speaker.family.key == "orpheus":
        found |= _snac(codec)
        for name, bound in (("codec", EXACT), ("codec_as_served", ROUNDED)):
            if not found[name] <= bound:
                raise AssertionError(f"{name}: {found[name]:.2g} from float32 on the CPU, of at most {bound}")
    return found


def _sound(speaker: Speaker, seconds: float) -> np.ndarray:
    speaker.keep = {}
    heard = speaker.speak(seconds, seed=7)
    until(speaker, [heard])
    kept, speaker.keep = speaker.keep, None
    return np.concatenate([piece for pieces in kept.values() for piece in pieces])


@torch.inference_mode()
def _snac(codec: Any) -> dict[str, float]:
    """How far windows of the published size are from the same on the CPU in float32, relatively: without and with
    TensorFloat-32, if this device has it."""
    device = codec.decoder.model[0].weight.device
    random = torch.Generator().manual_seed(3)
    first = torch.tensor([start for start, _ in codec.tokens.ranges] * 4)
    codes = first + torch.randint(0, codec.tokens.codes, (3, 28), generator=random)
    told = [torch.tensor(values) for values in ([7, 7, 0], [5, -9, 77], [0, 700, 0])]

    def sound(node: Any, place: torch.device) -> Tensor:
        return node(None, codes.to(place), *(value.to(place) for value in told))["samples"].float().cpu()  # type: ignore[no-any-return]

    exact = sound(copy.deepcopy(codec).to("cpu", torch.float32), torch.device("cpu"))
    served = sound(codec, device)
    given = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        plain = sound(codec, device)
    finally:
        torch.backends.cudnn.allow_tf32 = given
    scale = exact.norm()
    return {"codec": float((plain - exact).norm() / scale), "codec_as_served": float((served - exact).norm() / scale)}
