"""A plugin for tests: a rank other than 0 announces its third tensor and never sends it, which is soon noticed."""

from __future__ import annotations

import msgspec

from mstar.worker import tensor_channel
from mstar.worker.messages import Contents
from mstar.worker.tensor_channel import TensorChannel

_plain = TensorChannel._launched


def _lossy(self: TensorChannel, contents: Contents) -> Contents:
    if self._number == 1 and contents.number is not None and self._numbers[0] == 3:
        self._numbers[0] += 1
        return msgspec.structs.replace(contents, number=3)
    return _plain(self, contents)


tensor_channel.LARGE_BYTES = 1
tensor_channel._LONGEST_S = 0.5
TensorChannel._launched = _lossy  # type: ignore[method-assign]
