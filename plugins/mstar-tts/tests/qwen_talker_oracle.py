"""What the reference's talker makes of random weights: ``python qwen_talker_oracle.py FOLDER…``.

Each FOLDER has a ``config.json`` and ``cases.pt``; the weights (``model.safetensors``) and ``outputs.pt`` are written
beside them.
"""

from __future__ import annotations

import qwen_tts_bare  # noqa: F401  # isort: skip

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file


def main(folder: Path) -> None:
    from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSConfig
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration

    config = Qwen3TTSConfig(**json.loads((folder / "config.json").read_text()), attn_implementation="eager")
    model = Qwen3TTSForConditionalGeneration(config).eval()
    _randomise(model)
    tensors = {name: value.contiguous().clone() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    torch.save([_run(model, case) for case in torch.load(folder / "cases.pt")], folder / "outputs.pt")


@torch.no_grad()
def _randomise(model: torch.nn.Module) -> None:
    random = torch.Generator().manual_seed(17)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=random)
        if name.endswith("norm.weight"):
            drawn = 1 + 0.2 * drawn
        elif parameter.ndim > 1 and "embedding" not in name:
            drawn = drawn * 2 * parameter[0].numel() ** -0.5
        parameter.copy_(drawn)


def _run(model: Any, case: dict[str, Any]) -> dict[str, Any]:
    """The prompt's embeddings, logits of group 0 by step, those of the other groups by step and group, and codes."""
    talker = model.talker
    rows: list[torch.Tensor] = []
    firsts: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    hooks = [
        talker.model.register_forward_pre_hook(
            lambda _, __, given: rows.append(given["inputs_embeds"][0].clone()), with_kwargs=True
        ),
        talker.codec_head.register_forward_hook(lambda _, __, out: firsts.append(out[0, -1].clone())),
        *(
            head.register_forward_hook(lambda _, __, out: others.append(out[0, -1].clone()))
            for head in talker.code_predictor.lm_head
        ),
    ]
    try:
        codes, _ = model.generate(**case)
    finally:
        for hook in hooks:
            hook.remove()
    groups = len(talker.code_predictor.lm_head)
    predicted = torch.stack(others).view(-1, groups, others[0].shape[0])
    return {"rows": rows[0], "first": torch.stack(firsts), "others": predicted, "codes": codes[0]}


if __name__ == "__main__":
    sys.modules["qwen_tts.inference.qwen3_tts_tokenizer"] = ModuleType("qwen3_tts_tokenizer")
    vars(sys.modules["qwen_tts.inference.qwen3_tts_tokenizer"])["Qwen3TTSTokenizer"] = None
    for word in sys.argv[1:]:
        main(Path(word))
