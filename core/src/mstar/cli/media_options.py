"""Options of ``mstar serve`` about the files of requests: where they may come from, and how large they may be."""

from __future__ import annotations

import argparse
import re

from mstar.cli.commands import Parser
from mstar.cli.options import positive, positive_seconds

__all__ = ["MEDIA_OPTIONS", "media_options"]

MEDIA_OPTIONS = (
    "allow_remote_media",
    "media_hosts",
    "fetch_timeout_s",
    "max_body_bytes",
    "max_files",
    "max_file_bytes",
    "max_decoded_bytes",
    "max_pixels",
    "max_video_pixels",
    "max_video_frames",
    "max_video_s",
    "max_audio_s",
    "media_timeout_s",
    "media_processes",
)
"""Arguments that are the server's options of the same name."""

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKmMgG]i?[bB])?")
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def media_options(parser: Parser) -> None:
    """Add them. What each default is stands in its help, since the server, which has them, is imported when it runs."""
    parser.add_argument(
        "--allow-remote-media",
        action="store_true",
        default=None,
        help="fetch files that requests name by an http or https URL, from public addresses only (default: no)",
    )
    parser.add_argument(
        "--media-host",
        type=_host,
        action="append",
        dest="media_hosts",
        metavar="HOST",
        help="fetch from this host alone (example.com, or *.example.com for all below it); can be repeated",
    )
    for flag, name, kind, metavar, text in (
        ("--fetch-timeout", "fetch_timeout_s", positive_seconds, "SECONDS", "longest fetch (default: 20)"),
        ("--max-body", "max_body_bytes", size, "SIZE", "largest body of a request (default: 64MiB)"),
        ("--max-files", "max_files", positive, "N", "files of one request (default: 64)"),
        (
            "--max-file", "max_file_bytes", size, "SIZE",
            "largest file (default: 64MiB); one that is sent along must fit into --max-body, in JSON as base64",
        ),
        ("--max-decoded", "max_decoded_bytes", size, "SIZE", "what a request's files may decode to (default: 4GiB)"),
        (
            "--max-pixels", "max_pixels", positive, "N",
            "largest image or frame, width × height, sent or asked for (default: 50000000)",
        ),
        (
            "--max-video-pixels", "max_video_pixels", positive, "N",
            "pixels of all frames of a video that are decoded (default: 1073741824)",
        ),
        ("--max-video-frames", "max_video_frames", positive, "N", "frames of a video that are decoded (default: 768)"),
        ("--max-video-seconds", "max_video_s", positive_seconds, "SECONDS", "longest video (default: 7200)"),
        ("--max-audio-seconds", "max_audio_s", positive_seconds, "SECONDS", "longest audio (default: 7200)"),
        ("--media-timeout", "media_timeout_s", positive_seconds, "SECONDS", "longest decoding of a file (default: 60)"),
        (
            "--media-processes", "media_processes", positive, "N",
            "processes that decode files (default: half of the cores, 1 to 4)",
        ),
    ):  # fmt: skip
        parser.add_argument(flag, type=kind, dest=name, metavar=metavar, help=text)


def size(value: str) -> int:
    """A number of bytes, at least 1: ``1000``, ``64MiB`` (powers of 1024), ``1.5GB`` (powers of 1000)."""
    match = _SIZE.fullmatch(value.strip())
    number = 0 if match is None else int(float(match[1]) * _UNITS[(match[2] or "").upper()])
    if number < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a size such as 64MiB or 1.5GB")
    return number


def _host(value: str) -> str:
    if not _HOST.fullmatch(value):
        raise argparse.ArgumentTypeError(f"{value!r} is not a host such as example.com or *.example.com")
    return value.lower()
