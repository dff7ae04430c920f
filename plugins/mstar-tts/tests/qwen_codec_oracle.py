"""What the reference's codec and speaker encoder make of random weights: ``python qwen_codec_oracle.py FOLDER``.

FOLDER has the checkpoint, as :mod:`mstar_tts.qwen3_tts.codec_tiny` writes it, and ``inputs.pt``; ``outputs.pt`` is
written beside them.
"""

from __future__ import annotations

import qwen_tts_bare  # noqa: F401  # isort: skip

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def main(folder: Path) -> None:
    from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Config
    from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Model

    inputs = torch.load(folder / "inputs.pt")
    config = json.loads((folder / "speech_tokenizer/config.json").read_text())
    codec = Qwen3TTSTokenizerV2Model(Qwen3TTSTokenizerV2Config(**config)).eval()
    codec.load_state_dict(load_file(folder / "speech_tokenizer/model.safetensors"))
    codec.config.decoder_config._attn_implementation = "eager"
    out = {"transformer_in": [], "sound": [], "frames": [], "speaker": []}
    for codes in inputs["codes"]:
        out["sound"].append(codec.decoder(codes.T[None])[0, 0])
    for clip in inputs["clips"]:
        mask = torch.ones(1, len(clip), dtype=torch.int64)
        out["frames"].append(codec.encode(clip[None], mask).audio_codes[0])
    _speakers(folder, inputs["clips"], out["speaker"])
    torch.save(out, folder / "outputs.pt")


def _speakers(folder: Path, clips: list[torch.Tensor], out: list[torch.Tensor]) -> None:
    from qwen_tts.core.models.configuration_qwen3_tts import Qwen3TTSSpeakerEncoderConfig
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSSpeakerEncoder, mel_spectrogram

    config = json.loads((folder / "config.json").read_text())["speaker_encoder_config"]
    encoder = Qwen3TTSSpeakerEncoder(Qwen3TTSSpeakerEncoderConfig(**config)).eval()
    tensors = load_file(folder / "model.safetensors")
    prefix = "speaker_encoder."
    encoder.load_state_dict({name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)})
    for clip in clips:
        mel = mel_spectrogram(
            clip[None],
            n_fft=1024,
            num_mels=config["mel_dim"],
            sampling_rate=24_000,
            hop_size=256,
            win_size=1024,
            fmin=0,
            fmax=12_000,
        )
        out.append(encoder(mel.transpose(1, 2))[0])


if __name__ == "__main__":
    with torch.inference_mode():
        main(Path(sys.argv[1]))
