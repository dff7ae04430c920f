"""Speech to text on the CPU: M*, faster-whisper and transformers with the same real Whisper base, in float32.

Each runs alone in a process of its own, with two threads, and transcribes the same clips of real English speech
greedily, without timestamps, the language given. One clip at a time is answered one after the other; with eight, eight
are asked for at once: M* runs them as requests, faster-whisper as eight threads on one model, transformers as one batch
of its ``generate``, which is the best that it has.

    python benchmarks/asr_cpu.py               # writes benchmarks/results/asr_cpu.json; some minutes on two cores
    python benchmarks/asr_cpu.py --quick       # one short round each, prints only
    python benchmarks/asr_cpu.py --systems mstar --streams 8

NOTES.md says what each figure means. faster-whisper's rows need: pip install faster-whisper
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import environment, table, write_result

__all__ = ["SYSTEMS", "measure"]

PACKAGES = ("torch", "transformers", "faster-whisper", "ctranslate2", "mstar-core", "mstar-asr")
THREADS = 2
RATE = 16_000
COLUMNS = ("system", "streams", "real time / audio", "CPU time / audio", "peak RSS MB", "same text")

Transcribe = Callable[[Sequence[np.ndarray]], list[str]]
"""Texts of clips that are asked for together."""


# --- the clips and the weights


def _context() -> Any:
    from mstar.settings import Settings
    from mstar.weights.sources import SourceContext

    return SourceContext(cache=Settings.from_env().cache, say=lambda text: print(text, file=sys.stderr))


def clips(streams: int, quick: bool) -> list[list[np.ndarray]]:
    """What is asked for, in groups of *streams* at once: real speech of 10, 11 and 21 s."""
    from mstar_asr.clips import real_speech

    jfk, beckett = (real_speech(name, _context()) for name in ("jfk", "beckett"))
    four = [jfk, beckett, np.concatenate((jfk, beckett)), np.concatenate((beckett, jfk))]
    if quick:
        return [[jfk] * streams]
    return [[clip] for clip in four] if streams == 1 else [(four * streams)[:streams]]


def ctranslate2_folder() -> Path:
    """Whisper base as faster-whisper reads it, out of the same packages."""
    from mstar.spec.model import WeightsRef
    from mstar.weights.package import PackageSource
    from mstar_asr.whisper.spec import WHISPER_BASE

    ref = WHISPER_BASE.weights[0]
    options = {key: value for key, value in ref.options.items() if key != "convert"}
    raw = PackageSource().resolve(WeightsRef(ref.source, ref.id, ref.revision, options), _context())
    folder = raw.parent / f"{raw.name}-joined"
    if not (folder / "model.bin").exists():
        _join(raw, folder)
    return folder


def _join(raw: Path, folder: Path) -> None:
    """Put the pieces of ``model.bin`` together, with the list of tokens that CTranslate2 wants."""
    folder.mkdir(exist_ok=True)
    tokenizer = json.loads((raw / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {**tokenizer["model"]["vocab"], **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
    tokens = [piece for piece, _ in sorted(ids.items(), key=lambda item: item[1])]
    tokens += [f"<|{step * 0.02:.2f}|>" for step in range(1501)]
    (folder / "vocabulary.json").write_text(json.dumps(tokens))
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((raw / name).read_bytes())
    pieces = sorted(raw.glob("model.bin*"))
    (folder / "model.bin").write_bytes(b"".join(piece.read_bytes() for piece in pieces))


# --- the systems: each returns what transcribes


def _mstar(streams: int) -> Transcribe:
    return _mstar_in("float32")


def _mstar_bfloat16(streams: int) -> Transcribe:
    return _mstar_in("bfloat16")


def _mstar_in(dtype: str) -> Transcribe:
    import mstar
    from mstar.spec.tasks import Audio

    model = mstar.load("whisper_base", device="cpu", dtype=dtype, engine={"threads": THREADS})
    knobs = {"language": "en", "temperature": 0.0, "temperature_increment": 0.0}

    def one(samples: np.ndarray) -> str:
        text: str = model.generate(parts=(Audio(samples, RATE),), **knobs).text  # type: ignore[call-overload]
        return text

    def transcribe(samples: Sequence[np.ndarray]) -> list[str]:
        with ThreadPoolExecutor(len(samples)) as pool:
            return list(pool.map(one, samples))

    return transcribe


def _faster_whisper(streams: int) -> Transcribe:
    from faster_whisper import WhisperModel

    model = WhisperModel(str(ctranslate2_folder()), device="cpu", compute_type="float32", cpu_threads=THREADS)

    def one(samples: np.ndarray) -> str:
        segments, _ = model.transcribe(
            samples, language="en", beam_size=1, temperature=0.0, without_timestamps=True,
            condition_on_previous_text=False,
        )  # fmt: skip
        return "".join(segment.text for segment in segments)

    def transcribe(samples: Sequence[np.ndarray]) -> list[str]:
        with ThreadPoolExecutor(len(samples)) as pool:
            return list(pool.map(one, samples))

    return transcribe


def _transformers(streams: int) -> Transcribe:
    import torch
    from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

    from mstar.weights.package import PackageSource
    from mstar_asr.whisper.spec import WHISPER_BASE

    torch.set_num_threads(THREADS)
    folder = PackageSource().resolve(WHISPER_BASE.weights[0], _context())
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def transcribe(samples: Sequence[np.ndarray]) -> list[str]:
        inputs = extractor(list(samples), sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
        with torch.inference_mode():
            ids = model.generate(**inputs, language="en", task="transcribe", do_sample=False, num_beams=1)
        return list(tokenizer.batch_decode(ids, skip_special_tokens=True))

    return transcribe


SYSTEMS: dict[str, Callable[[int], Transcribe]] = {
    "mstar": _mstar,
    "mstar-bfloat16": _mstar_bfloat16,
    "faster-whisper": _faster_whisper,
    "transformers": _transformers,
}


# --- measuring


def run_one(system: str, streams: int, rounds: int, quick: bool) -> dict[str, Any]:
    """In this process: load *system*, warm it up with one clip, measure. Seconds and texts."""
    groups = clips(streams, quick)
    began = time.perf_counter()
    transcribe = SYSTEMS[system](streams)
    start_s = time.perf_counter() - began
    transcribe(groups[0][:1])
    times, busy = [], []
    for _ in range(rounds):
        began, before = time.perf_counter(), _cpu_seconds()
        texts = [transcribe(group) for group in groups]
        times.append(time.perf_counter() - began)
        busy.append(_cpu_seconds() - before)
    audio_s = sum(len(samples) for group in groups for samples in group) / RATE
    return {
        "start_s": start_s,
        "audio_s": audio_s,
        "rounds_s": times,
        "rtf": statistics.median(times) / audio_s,
        "cpu_per_audio": statistics.median(busy) / audio_s,
        "texts": [" ".join(text.split()) for group in texts for text in group],
    }


def _cpu_seconds() -> float:
    """Processor time of this process and its children, so far."""
    own = psutil.Process()
    return sum(one.cpu_times().user + one.cpu_times().system for one in (own, *own.children(recursive=True)))


def measure(system: str, streams: int, rounds: int, quick: bool) -> dict[str, Any]:
    """:func:`run_one` in a fresh process, and the most memory that it and its children had, sampled 20 times a
    second. ``{"system", "streams", "failed": reason}`` if it failed."""
    words = ["--run", system, "--streams", str(streams), "--rounds", str(rounds), *(["--quick"] if quick else [])]
    environ = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "TRANSFORMERS_VERBOSITY": "error"}
    child = subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, env=environ, text=True)
    peak = 0
    process = psutil.Process(child.pid)
    while child.poll() is None:
        peak = max(peak, _resident(process))
        time.sleep(0.05)
    out = child.stdout.read() if child.stdout is not None else ""
    row: dict[str, Any] = {"system": system, "streams": streams}
    if child.returncode:
        return {**row, "failed": f"it ended with status {child.returncode}; its errors are above"}
    return {**row, **json.loads(out.strip().splitlines()[-1]), "peak_rss_mb": peak / 1e6}


def _resident(process: psutil.Process) -> int:
    total = 0
    try:
        for one in (process, *process.children(recursive=True)):
            total += one.memory_info().rss
    except psutil.NoSuchProcess:
        pass  # it ended between the list and the look
    return total


def table_row(row: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, str]:
    if "failed" in row:
        return {**dict.fromkeys(COLUMNS, "–"), "system": row["system"], "streams": str(row["streams"])}
    first = next(other for other in others if other["streams"] == row["streams"] and "texts" in other)
    same = sum(a == b for a, b in zip(row["texts"], first["texts"], strict=True))
    return {
        "system": row["system"],
        "streams": str(row["streams"]),
        "real time / audio": f"{row['rtf']:.3f}",
        "CPU time / audio": f"{row['cpu_per_audio']:.3f}",
        "peak RSS MB": f"{row['peak_rss_mb']:.0f}",
        "same text": f"{same}/{len(row['texts'])}",
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", help=f"from {','.join(SYSTEMS)}", default=",".join(SYSTEMS))
    parser.add_argument("--streams", default="1,8", help="clips at once (default: 1,8)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts (default: 3)")
    parser.add_argument("--quick", action="store_true", help="one round of one clip, to see that it works")
    parser.add_argument("--run", choices=list(SYSTEMS), help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    rounds = 1 if options.quick else options.rounds
    streams = [int(number) for number in options.streams.split(",")]
    if options.run:
        print(json.dumps(run_one(options.run, streams[0], rounds, options.quick)))
        return
    facts = environment(PACKAGES)
    # in turn, so that a busier minute of the machine does not meet one system only
    rows = [measure(name, count, rounds, options.quick) for count in streams for name in options.systems.split(",")]
    table(f"{THREADS} threads", [table_row(row, rows) for row in rows], COLUMNS)
    if not options.quick:
        write_result("asr_cpu", rows, {"threads": THREADS, "rounds": rounds}, facts)


if __name__ == "__main__":
    main()
