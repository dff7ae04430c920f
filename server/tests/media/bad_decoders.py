"""Decoders that misbehave, for the pool's tests: what a process of the pool loads instead of the real ones."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from mstar_server.media.decoders import DECODERS as REAL
from mstar_server.media.output import ArrayRef, Decoded


def _kill(fd, job, output):
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang(fd, job, output):
    time.sleep(1000)


def _slow(fd, job, output):
    time.sleep(0.2)
    return REAL["image"](fd, job, output)


def _eat(fd, job, output):
    return np.ones(3 << 30, np.uint8).sum()


def _raise(fd, job, output):
    raise ZeroDivisionError("in a library")


def _missing(fd, job, output):
    raise ModuleNotFoundError("No module named 'av'", name="av")


def _lie(fd, job, output):
    return Decoded(frames=ArrayRef("uint8", (1000, 1000, 3), 0))


DECODERS = {**REAL, "audio": _kill, "video": _hang, "frames": _eat, "mask": _missing}
RAISING = {**REAL, "mask": _raise}
LYING = {**REAL, "mask": _lie}
SLOW = {**REAL, "mask": _slow}
