"""What a window becomes for the engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mstar.nn.model import BuildContext
from mstar.spec.errors import RequestError, WeightsError
from mstar_asr.whisper.alignment import text_that_counts
from mstar_asr.whisper.model import Whisper
from mstar_asr.whisper.request import DETECT, window_prompt, window_request
from mstar_asr.whisper.tokens import WhisperTokens

PIECES = {
    "<|endoftext|>": 50257, "<|startoftranscript|>": 50258, "<|en|>": 50259, "<|haw|>": 50352, "<|translate|>": 50358,
    "<|transcribe|>": 50359, "<|startoflm|>": 50360, "<|startofprev|>": 50361, "<|nocaptions|>": 50362,
    "<|notimestamps|>": 50363,
}  # fmt: skip
BASE = WhisperTokens.of(
    {"decoder_start_token_id": 50258}, {"suppress_tokens": [1], "begin_suppress_tokens": [220]}, PIECES
)
ENGLISH = WhisperTokens.of({}, {"is_multilingual": False}, {name: i - 1 for name, i in PIECES.items()})


def test_tokens_of_an_old_checkpoint_come_from_its_tokenizer() -> None:
    assert BASE.languages == {"en": 50259, "haw": 50352}
    assert (BASE.no_speech, BASE.timestamp_begin, BASE.sot_prev) == (50362, 50364, 50361)
    assert (BASE.suppressed, BASE.suppressed_first) == ((1,), (220,))
    assert BASE.language_of(50352) == "haw"
    assert (ENGLISH.multilingual, ENGLISH.sot, ENGLISH.transcribe) == (False, 50257, None)


def test_a_tokenizer_that_lacks_a_token(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"lacks the token '<\|nospeech\|>'"):
        WhisperTokens.of({}, {}, {name: i for name, i in PIECES.items() if name != "<|nocaptions|>"})
    with pytest.raises(WeightsError, match=r"has no config\.json"):
        WhisperTokens.read(tmp_path)


def test_prompts() -> None:
    assert window_prompt(BASE) == [50258, DETECT, 50359, 50363]
    assert window_prompt(BASE, language="haw", task="translate", timestamps=True) == [50258, 50352, 50358]
    assert window_prompt(BASE, language="en", previous=[7, 8]) == [50361, 7, 8, 50258, 50259, 50359, 50363]
    assert window_prompt(BASE, previous=range(300))[:2] == [50361, 77]  # the last 223 count
    assert window_prompt(ENGLISH, language="en") == [50257, 50362]
    assert window_prompt(ENGLISH, timestamps=True, previous=[5]) == [50360, 5, 50257]


def test_what_a_model_cannot_do_is_refused() -> None:
    with pytest.raises(RequestError, match="'hawaii'; did you mean 'haw'") as refused:
        window_prompt(BASE, language="hawaii")
    assert refused.value.param == "language"
    with pytest.raises(RequestError, match="English only"):
        window_prompt(ENGLISH, task="translate")
    with pytest.raises(RequestError, match="'en' only"):
        window_prompt(ENGLISH, language="de")


def test_the_answer_fits_beside_the_prompt() -> None:
    prompt = window_prompt(BASE, language="en", previous=[4] * 500)
    request = window_request("r", BASE, np.zeros(480_400), prompt, max_tokens=1000, temperature=0.4, seed=3)
    sampling = request.sampling["sampler"]
    assert (len(prompt), sampling.max_tokens, sampling.stop_token_ids) == (228, 219, (50257,))
    assert (sampling.temperature, sampling.seed) == (0.4, 3)
    assert request.inputs["rules"].tolist() == [0, 50, 3]
    assert np.isnan(request.inputs["loudest"]).all()
    free = window_request(
        "r", BASE, np.zeros(480_400), window_prompt(BASE, timestamps=True), max_initial_timestamp=None
    )
    assert free.inputs["rules"].tolist() == [1, -1, 2]


def test_a_language_token_among_the_previous_ones_is_no_start() -> None:
    prompt = [BASE.sot_prev, BASE.sot, 5, BASE.sot, 50259, 50359]
    assert window_request("r", BASE, np.zeros(480_400), prompt).inputs["rules"][2] == 2


T = BASE.timestamp_begin


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ([], []),
        ([5, 6], [5, 6]),
        ([T, 5, 6, T + 50], [5, 6]),  # one segment, which the window's end may have cut
        ([T, 5, T + 50, T + 50, 6, T + 90], [5, 6]),  # ends with a single timestamp: nothing follows it
        ([T, 5, T + 50, T + 50, 6], [5]),  # the second segment is heard again
        ([T, 5, T + 50, T + 50, 6, T + 90, T + 90], [5, 6]),
        ([T, 5, T + 50, T + 50], [5]),
    ],
)
@pytest.mark.parametrize("ended", [False, True])
def test_text_that_counts(answer: list[int], text: list[int], ended: bool) -> None:
    assert text_that_counts([*answer, BASE.eot] if ended else answer, BASE) == text


def test_a_checkpoint_that_contradicts_itself_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    generation = tmp_path / "generation_config.json"
    told = json.loads(generation.read_text())
    generation.write_text(json.dumps({**told, "alignment_heads": [[1, 4]]}))
    with pytest.raises(WeightsError, match="alignment_heads has head 4 of layer 1; the decoder has 2 layers of 4"):
        Whisper(BuildContext(tmp_path, torch.float32, torch.device("cpu")))
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_source_positions": 750}))
    with pytest.raises(WeightsError, match="max_source_positions is 750; Whisper is served with 1500 only"):
        Whisper(BuildContext(tmp_path, torch.float32, torch.device("cpu")))
