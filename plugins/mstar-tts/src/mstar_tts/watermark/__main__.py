"""``python -m mstar_tts.watermark detect --detector FILE [--message 0xBEEF] SOUND…``: which sounds carry the mark.

Ends with status 0 when all do, with 1 when one does not, with 2 when something cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mstar.spec.errors import MstarError
from mstar_tts.watermark.options import message_bits

__all__ = ["main"]


def main(words: list[str] | None = None) -> int:
    """Run the command of *words* (default: the process's). Returns its status."""
    parser = _parser()
    given = parser.parse_args(words)
    if given.method == "audioseal" and given.detector is None:
        parser.error("--detector is missing: detector_streaming.pth of facebook/audioseal")
    if given.method == "perth" and given.message is not None:
        parser.error("--message: PerTh's mark carries none")
    from mstar_tts.watermark.detect import AudioSealListener, Listener, PerthListener

    try:
        if given.method == "perth":
            listener: Listener = PerthListener(given.detector, given.device)
        else:
            listener = AudioSealListener(given.detector, given.device)
        verdicts = []
        for file in given.sounds:
            found = listener.hear_file(file)
            verdicts.append(found.verdict(given.threshold, given.message))
            said = f", message {''.join(map(str, found.bits))}" if found.bits else ""
            print(f"{file}: {'marked' if verdicts[-1] else 'not marked'}, score {found.score:.3f}{said}")
    except MstarError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if all(verdicts) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mstar_tts.watermark")
    detect = parser.add_subparsers(required=True).add_parser("detect", help="say whether sounds carry a mark")
    detect.add_argument("sounds", nargs="+", type=Path, help="files of sound, a few seconds long at least")
    detect.add_argument("--method", choices=("audioseal", "perth"), default="audioseal", help="whose mark")
    detect.add_argument(
        "--detector",
        type=Path,
        help="detector_streaming.pth of facebook/audioseal; of PerTh the weights, if resemble-perth is not installed",
    )
    detect.add_argument("--message", type=_message, help="the deployment's message; without it the score alone counts")
    detect.add_argument("--threshold", type=float, default=0.5, help="least score of a marked sound (default 0.5)")
    detect.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    return parser


def _message(text: str) -> tuple[int, ...]:
    try:
        bits = set(text) <= {"0", "1"} and len(text) == 16
        return message_bits(text if bits else int(text, 0))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


if __name__ == "__main__":
    sys.exit(main())
