"""The linear floor as JSON, measured in a process of its own so that the benchmark's client stays without torch.

python benchmarks/chat_floor.py CONFIG_JSON --batch 1 8 32      # {"dtype": …, "tokens_per_s": {"1": …}}
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["floor"]


def floor(config: Path, batches: Sequence[int], timeout: float = 300.0) -> dict[str, Any]:
    """``{"dtype": str, "threads": int, "tokens_per_s": {batch: float}}`` for the model of *config*.

    :raises RuntimeError: the measuring process failed or took longer than *timeout* seconds.
    """
    command = [sys.executable, __file__, str(config), "--batch", *map(str, batches)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the linear floor took longer than {timeout:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"the linear floor could not be measured:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "tokens_per_s": {int(batch): rate for batch, rate in found["tokens_per_s"].items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a model's config.json")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()

    import torch
    from linear_floor import linear_floor, random_node

    from mstar.nn.config import DecoderConfig
    from mstar.nn.cpu_linear import best_cpu_dtype

    config = DecoderConfig.from_hf(json.loads(options.config.read_text(encoding="utf-8")))
    dtype = best_cpu_dtype()
    seconds = linear_floor(random_node(config, dtype), options.batch)
    rates = {rows: rows / spent for rows, spent in seconds.items()}
    print(json.dumps({"dtype": str(dtype), "threads": torch.get_num_threads(), "tokens_per_s": rates}))


if __name__ == "__main__":
    main()
