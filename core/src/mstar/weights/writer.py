"""Writing a safetensors file tensor by tensor, so that a converter never holds a whole checkpoint in memory.

Format: https://github.com/huggingface/safetensors#format (u64 header length, JSON header, data without gaps). The
library's own writers want all tensors at once.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

__all__ = ["write_safetensors"]

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def write_safetensors(
    file: Path,
    layout: Mapping[str, tuple[str, Sequence[int]]],
    data: Iterable[bytes],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write *file*: *layout* is tensor name → (safetensors dtype such as ``"BF16"``, shape), *data* their little-endian
    row-major bytes in the same order, produced one at a time.

    :raises ValueError: when *data* does not fit *layout*.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    sizes, end = [], 0
    for name, (dtype, shape) in layout.items():
        sizes.append(prod(shape) * _ITEM_BYTES[dtype])
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + sizes[-1]]}
        end += sizes[-1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of eight bytes
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for (name, _), size, content in zip(layout.items(), sizes, data, strict=True):
            if len(content) != size:
                raise ValueError(f"{name}: {len(content)} bytes of data, the layout says {size}")
            out.write(content)
