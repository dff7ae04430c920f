"""Word errors of Whisper base: M* and faster-whisper with the same real weights, over 40 sentences that espeak-ng says.

Each sentence is a clip of its own; then all of them are one clip of some three minutes, with pauses. Both are in
float32 and greedy, with the reference's fallback to higher temperatures. M* is asked as its server asks it.

    python benchmarks/asr_words.py            # writes benchmarks/results/asr_words.json; some minutes on two cores
    python benchmarks/asr_words.py --quick    # eight sentences, prints only

It needs espeak-ng (Debian's package) and, for the other rows, pip install faster-whisper.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from common import environment, table, write_result

from mstar.processing.resampling import resample
from mstar.processing.speech.transcript import TranscriptBuilder
from mstar.spec.tasks import Audio, TranscriptionTask
from mstar.testing.word_errors import word_errors, words

__all__ = ["SENTENCES"]

RATE = 16_000
THREADS = 2
LIMIT = 0.5
"""Points of word error rate that M* may be worse by."""
VOICES = ("en-us", "en-gb", "en-us+f3", "en-gb+m3")
SENTENCES = (
    "The weather in the mountains changes very quickly in autumn.",
    "Please leave the keys on the kitchen table before you go.",
    "Our neighbours planted three apple trees behind the house.",
    "The train to the coast was late again this morning.",
    "She opened the window and listened to the rain.",
    "Nobody knows who painted the small picture in the hall.",
    "We walked along the river until the sun went down.",
    "The doctor asked him to breathe slowly and count to ten.",
    "A good teacher can explain a difficult idea with simple words.",
    "They sold the old farm and moved to the city.",
    "The library is closed on Sundays and public holidays.",
    "My brother repairs watches in a shop near the station.",
    "It takes about an hour to bake fresh bread at home.",
    "The children built a castle out of wet sand.",
    "He forgot his umbrella in the restaurant last night.",
    "The market sells cheese, honey and warm winter coats.",
    "Could you tell me where the nearest hospital is?",
    "The captain told the sailors to lower the boats.",
    "I would rather read a book than watch television.",
    "Her grandmother taught her how to play the violin.",
    "The museum bought a letter that the king had written.",
    "Heavy snow closed the road between the two villages.",
    "We need more chairs for the meeting on Thursday.",
    "The dog slept in front of the fire all evening.",
    "Scientists discovered a new kind of frog in the forest.",
    "Turn left at the bridge and follow the narrow street.",
    "The baker gets up at four o'clock every day.",
    "Someone has taken my bicycle from the garden.",
    "The actors practised the last scene again and again.",
    "Fresh water is more precious than gold in the desert.",
    "The teacher wrote the answer on the board.",
    "They promised to send the money before the end of the month.",
    "A strong wind pushed the little boat towards the rocks.",
    "The engineers tested the new engine for three weeks.",
    "I have never seen such a beautiful garden before.",
    "The farmer counted his sheep and locked the gate.",
    "You should always wash your hands before dinner.",
    "The newspaper printed a long story about the election.",
    "He learned to swim when he was five years old.",
    "The old clock in the tower strikes every hour.",
)

Hear = Callable[[np.ndarray], str]


def spoken(sentence: str, number: int) -> np.ndarray:
    """float32 at 16 kHz."""
    voice, speed = VOICES[number % len(VOICES)], str(140 + number % 5 * 10)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "said.wav"
        subprocess.run(["espeak-ng", "-v", voice, "-s", speed, "-w", str(file), sentence], check=True)
        samples, rate = soundfile.read(file, dtype="float32")
    return resample(samples, rate, RATE)


# --- the systems


@contextmanager
def mstar(chunked: bool) -> Iterator[Hear]:
    from mstar.plugins import load_plugins
    from mstar.registry import Registry
    from mstar.runtime.service import open_service
    from mstar.settings import Settings
    from mstar_asr.whisper.spec import WhisperKnobs
    from mstar_server.openai.transcribing import WindowRun, heard

    settings = Settings.from_env()
    overrides = {"device": "cpu", "dtype": "float32", "executor": "inline", "engine": {"threads": THREADS}}
    loop = asyncio.new_event_loop()
    service = open_service("whisper_base", settings, overrides, Registry(load_plugins(settings)))
    loop.run_until_complete(service.start())

    async def transcribe(samples: np.ndarray) -> str:
        task = TranscriptionTask(knobs=WhisperKnobs(), audio=Audio(samples, RATE), language="en", chunked=chunked)
        run = WindowRun(service, service.processor.windows(task), "r")  # type: ignore[arg-type]
        builder = TranscriptBuilder(len(samples) / RATE)
        async for _ in heard(run, builder):
            pass
        return builder.result().text

    try:
        yield lambda samples: loop.run_until_complete(transcribe(samples))
    finally:
        loop.run_until_complete(service.stop())
        loop.close()


@contextmanager
def faster_whisper(beams: int) -> Iterator[Hear]:
    from asr_cpu import ctranslate2_folder
    from faster_whisper import WhisperModel

    model = WhisperModel(str(ctranslate2_folder()), device="cpu", compute_type="float32", cpu_threads=THREADS)

    def transcribe(samples: np.ndarray) -> str:
        segments, _ = model.transcribe(samples, language="en", beam_size=beams, best_of=1)
        return "".join(segment.text for segment in segments)

    yield transcribe


SYSTEMS: dict[str, Callable[[], Any]] = {
    "mstar": lambda: mstar(False),
    "mstar, chunked": lambda: mstar(True),
    "faster-whisper": lambda: faster_whisper(1),
    "faster-whisper, 5 beams": lambda: faster_whisper(5),
}


def measure(name: str, clips: Sequence[np.ndarray], sentences: Sequence[str]) -> dict[str, Any]:
    pause = np.zeros(RATE, np.float32)
    whole = np.concatenate([part for clip in clips for part in (clip, pause)])
    said = [words(sentence) for sentence in sentences]
    with SYSTEMS[name]() as hear:
        began = time.perf_counter()
        heard = [words(hear(clip)) for clip in clips]
        long = words(hear(whole))
        seconds = time.perf_counter() - began
    wrong = [{"said": " ".join(a), "heard": " ".join(b)} for a, b in zip(said, heard, strict=True) if a != b]
    total = sum(map(len, said))
    print(f"{name}: {seconds:.0f} s", flush=True)
    return {
        "system": name,
        "words": total,
        "clips_wer": round(100 * sum(word_errors(a, b) for a, b in zip(said, heard, strict=True)) / total, 2),
        "long_wer": round(100 * word_errors([word for part in said for word in part], long) / total, 2),
        "long_seconds": round(len(whole) / RATE, 1),
        "seconds": round(seconds, 1),
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="eight sentences; write nothing")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    asked = parser.parse_args()
    sentences = SENTENCES[:8] if asked.quick else SENTENCES
    facts = environment(("torch", "faster-whisper", "ctranslate2", "mstar-core", "mstar-asr"))
    clips = [spoken(sentence, number) for number, sentence in enumerate(sentences)]
    results = [measure(name, clips, sentences) for name in asked.systems]
    table("word errors in per cent", results, ("system", "words", "clips_wer", "long_wer", "seconds"))
    found = {r["system"]: r for r in results}
    if {"mstar", "faster-whisper"} <= set(found):
        worse = {kind: found["mstar"][kind] - found["faster-whisper"][kind] for kind in ("clips_wer", "long_wer")}
        print(
            f"worse than faster-whisper by {worse['clips_wer']:.2f} and {worse['long_wer']:.2f} points; limit {LIMIT}"
        )
    if not asked.quick:
        settings = {"threads": THREADS, "dtype": "float32", "voices": VOICES, "sentences": len(sentences)}
        write_result("asr_words", results, settings, facts)


if __name__ == "__main__":
    main()
