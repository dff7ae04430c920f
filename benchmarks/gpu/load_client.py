"""A load generator in a process of its own: a share of the streams of one level (see ``chat_client.py``).

It reads its plan as a line of JSON, says ``ready``, and begins at the next line. Then it prints what its answers' times
were. Clocks of processes on one machine agree (``CLOCK_MONOTONIC``), so the shares can be put together.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chat_client import Answer, Level, run_level

__all__ = ["run_shares"]

FOLDER = Path(__file__).resolve().parent.parent
_STREAMS_EACH = 8


def run_shares(url: str, bodies: Sequence[Mapping[str, Any]], streams: int, timeout: float) -> Level:
    """Send *bodies*, *streams* at a time, from as many processes as keep up with what a fast server sends.

    :raises RuntimeError: a process failed; with its last words.
    """
    count = max(1, -(-streams // _STREAMS_EACH))
    shares = [
        {"url": url, "bodies": bodies[n::count], "streams": len(range(n, streams, count)), "timeout": timeout}
        for n in range(count)
    ]
    command = [sys.executable, "-m", "gpu.load_client"]
    processes = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=FOLDER
        )
        for _ in shares
    ]
    try:
        for process, share in zip(processes, shares, strict=True):
            _tell(process, json.dumps(share))
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"a load generator failed: {process.communicate()[1][-2000:]}")
        for process in processes:
            _tell(process, "go")
        levels = []
        for process in processes:
            out, errors = process.communicate(timeout=timeout + 30)
            if process.returncode:
                raise RuntimeError(f"a load generator failed: {errors[-2000:]}")
            levels.append(json.loads(out))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    answers = [Answer(**answer) for level in levels for answer in level["answers"]]
    began = min(answer.started for answer in answers)
    ended = max(answer.arrivals[-1] for answer in answers)
    return Level(streams, answers, ended - began, sum(level["client_cpu"] for level in levels))


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def main() -> None:
    share = json.loads(sys.stdin.readline())
    print("ready", flush=True)
    sys.stdin.readline()
    level = asyncio.run(run_level(share["url"], share["bodies"], share["streams"], share["timeout"]))
    answers = [dataclasses.asdict(answer) for answer in level.answers]
    print(json.dumps({"answers": answers, "client_cpu": level.client_cpu}))


if __name__ == "__main__":
    main()
