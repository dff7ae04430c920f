"""PNG files of pictures: how long libraries take on one core, and how large their files are.

    python benchmarks/image_files.py                                   # what the server needs is enough
    python benchmarks/image_files.py --pictures FOLDER --out FILE.json # photographs too

Beside the server's own (:mod:`mstar_server.media.encode.png`) each library that can be imported is measured: Pillow,
PyAV, OpenCV, imagecodecs, pyoxipng. Pictures are of 1024 x 1024: ``noise``, which is what models with random weights
make; ``texture``: gradients, structure of all sizes and grain; and those of ``--pictures``, scaled. Ways take turns,
and the best of ``--rounds`` counts. Every file is read back and compared.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))

from common import environment, table

from mstar_server.media.encode.images import png

SIDE = 1024
PACKAGES = ("isal", "pillow", "av", "opencv-python-headless", "imagecodecs", "pyoxipng")
Way = Callable[[np.ndarray], bytes]


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pictures", type=Path, help="a folder of pictures")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    pictures = {"noise": _noise(), "texture": _texture(), **_photographs(args.pictures)}
    rows = measure(pictures, ways(), args.rounds)
    if args.out is not None:
        args.out.write_text(json.dumps({"environment": environment(PACKAGES), "results": rows}, indent=2) + "\n")
    shown = [
        {"way": row["way"], **{name: f"{row[f'{name} ms']:.0f}, {row[f'{name} share']:.2f}" for name in pictures}}
        for row in rows
    ]
    table("milliseconds of a core, and bytes as a share of the pixels'", shown, ["way", *pictures])
    return 0


def measure(pictures: Mapping[str, np.ndarray], ways: Mapping[str, Way], rounds: int) -> list[dict[str, Any]]:
    """For each of *ways*, and of each of *pictures*: milliseconds of CPU time, and the file's share of the pixels'
    bytes. Raises :class:`ValueError` for a way that loses something."""
    rows: dict[str, dict[str, Any]] = {name: {"way": name} for name in ways}
    for number in range(rounds):
        for name, encode in ways.items():
            for picture, pixels in pictures.items():
                began = time.process_time()
                data = encode(pixels)
                ms = (time.process_time() - began) * 1e3
                if not number and not np.array_equal(np.asarray(Image.open(io.BytesIO(data))), pixels):
                    raise ValueError(f"{name}: the file of {picture!r} is of another picture")
                row = rows[name]
                row[f"{picture} ms"] = min(ms, row.get(f"{picture} ms", ms))
                row[f"{picture} share"] = len(data) / pixels.nbytes
    return list(rows.values())


def ways() -> dict[str, Way]:
    found: dict[str, Way] = {"the server's": png}
    for level, kind in ((1, "default"), (6, "default"), (1, "huffman")):
        found[f"Pillow {level} {kind}"] = _pillow(level, kind)
    for module, maker in (("av", _av), ("cv2", _cv2), ("imagecodecs", _imagecodecs), ("oxipng", _oxipng)):
        try:
            library: Any = import_module(module)
        except ImportError:
            continue  # the table has no row of it
        found |= maker(library)
    return found


def _pillow(level: int, kind: str) -> Way:
    def encode(pixels: np.ndarray) -> bytes:
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "PNG", compress_level=level, compress_type={"default": 0, "huffman": 2}[kind])
        return out.getvalue()

    return encode


def _av(av: Any) -> dict[str, Way]:
    def way(options: Mapping[str, str]) -> Way:
        def encode(pixels: np.ndarray) -> bytes:
            encoder = av.CodecContext.create("png", "w")
            encoder.height, encoder.width = pixels.shape[:2]
            encoder.pix_fmt, encoder.time_base, encoder.options = "rgb24", Fraction(1), options
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            return b"".join(bytes(packet) for part in (frame, None) for packet in encoder.encode(part))

        return encode

    filters = ("none", "sub", "up", "avg", "paeth", "mixed")
    kinds = [(name, 1) for name in filters] + [("avg", level) for level in (2, 4, 6)] + [("mixed", 0)]
    return {f"FFmpeg {name} {level}": way({"pred": name, "compression_level": str(level)}) for name, level in kinds}


def _cv2(cv2: Any) -> dict[str, Way]:
    cv2.setNumThreads(1)

    def way(*options: int) -> Way:
        return lambda pixels: cv2.imencode(".png", np.ascontiguousarray(pixels[..., ::-1]), options)[1].tobytes()

    huffman = (cv2.IMWRITE_PNG_STRATEGY, cv2.IMWRITE_PNG_STRATEGY_HUFFMAN_ONLY)
    average = (cv2.IMWRITE_PNG_FILTER, cv2.IMWRITE_PNG_FILTER_AVG)
    level = (cv2.IMWRITE_PNG_COMPRESSION, 1)
    return {"OpenCV 1": way(*level), "OpenCV huffman avg": way(*level, *huffman, *average)}


def _imagecodecs(codecs: Any) -> dict[str, Way]:
    kinds = codecs.PNG

    def way(strategy: str, filter_: str) -> Way:
        how = {"strategy": kinds.STRATEGY[strategy], "filter": kinds.FILTER[filter_]}
        return lambda pixels: bytes(codecs.png_encode(pixels, level=1, **how))

    choices = [(strategy, name) for strategy in ("DEFAULT", "HUFFMAN_ONLY") for name in ("AVG", "PAETH")]
    return {f"imagecodecs {strategy.lower()} {name.lower()}": way(strategy, name) for strategy, name in choices}


def _oxipng(oxipng: Any) -> dict[str, Way]:
    kept = ("bit_depth", "color_type", "palette", "grayscale")
    plain = {f"{name}_reduction": False for name in kept}

    def encode(pixels: np.ndarray) -> bytes:
        raw = oxipng.RawImage(pixels.tobytes(), *pixels.shape[1::-1], color_type=oxipng.ColorType.rgb())
        how = {"filter": [oxipng.RowFilter.Average], "deflate": oxipng.Deflaters.libdeflater(1)}
        return bytes(raw.create_optimized_png(level=0, **how, **plain))

    return {"oxipng avg libdeflate 1": encode}


def _noise() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


def _texture() -> np.ndarray:
    """Gradients, and structure of each size, the less the smaller; grain."""
    random = np.random.default_rng(1)
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    total = 98 + 60 * np.stack([x, y, 1 - x], -1) + random.normal(size=(SIDE, SIDE, 1)) * 1.5
    for octave in range(2, 10):
        small = random.normal(size=(3, 2**octave, 2**octave)).astype(np.float32)
        planes = [np.asarray(Image.fromarray(plane).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for plane in small]
        total += np.stack(planes, -1) * 60 / 2 ** (0.9 * octave)
    return total.clip(0, 255).astype(np.uint8)


def _photographs(folder: Path | None) -> dict[str, np.ndarray]:
    files = [] if folder is None else sorted(file for file in folder.iterdir() if file.is_file())
    size, how = (SIDE, SIDE), Image.Resampling.LANCZOS
    return {file.stem: np.asarray(Image.open(file).convert("RGB").resize(size, how)) for file in files}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
