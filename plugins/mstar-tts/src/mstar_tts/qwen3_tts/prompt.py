"""How a text, a speaker and a clip become the rows that the talker reads.

A row is one position: the id of a text token and the codes of a frame, whose embeddings are added. Reference:
``Qwen3TTSForConditionalGeneration.generate`` of qwen_tts 0.1.1, whose order is kept:

::

    text   instruction  role   pad … pad      bos   │ text …
    codec                      think … voice  pad   │ bos, pad or frames …

Behind the bar the text is either all there (each token beside a codec pad, then codec bos), or it *streams*: one token
beside each frame, the first with codec bos, the others from a queue while frames are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mstar_tts.qwen3_tts.config import TTSConfig

__all__ = ["FRAME", "NONE", "VOICE", "Prompt", "Words", "fill", "lay_out"]

NONE = -1
"""No code: nothing is added to the text's embedding."""
VOICE = -2
"""In the column of group 0: the vector of the request's voice stands here."""
FRAME = -3
"""In the column of group 0: a frame of the clip will stand here (:func:`fill`)."""

Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Words:
    """Token ids of what a request says.

    :param role: what opens the assistant's turn. :param text: to be spoken; not empty. :param instruct: how, the whole
        turn of it; may be empty. :param said: in the clip, where its frames are in the prompt.
    """

    role: Sequence[int]
    text: Sequence[int]
    instruct: Sequence[int] = ()
    said: Sequence[int] = ()


@dataclass(frozen=True)
class Prompt:
    """:param rows: int64 ``[T, 1 + groups]``: text id, codes. :param queue: int64 ``[Q]``, text ids for the frames to
    come, one each; behind it every frame gets the pad."""

    rows: Ids
    queue: Ids


def lay_out(
    config: TTSConfig,
    words: Words,
    *,
    language: int | None = None,
    speaker: int | None = None,
    frames: int = 0,
    streaming: bool = False,
) -> Prompt:
    """The rows of one request.

    :param language: its id; ``None``: the model finds out. :param speaker: id of a built-in one, :data:`VOICE` for the
        request's own voice, ``None`` for none. :param frames: of the clip that the prompt repeats (in-context cloning).
    """
    ids, pad = config.codec, config.tts_pad
    tag: tuple[int, ...] = (ids.nothink, ids.think_bos, ids.think_eos)
    if language is not None:
        tag = (ids.think, ids.think_bos, language, ids.think_eos)
    head = [*tag, *([] if speaker is None else [speaker]), ids.pad]
    rows = [(word, NONE) for word in (*words.instruct, *words.role)]
    rows += zip([pad] * (len(head) - 1) + [config.tts_bos], head, strict=True)
    said = [*words.said, *words.text, config.tts_eos]
    codes = [ids.bos, *[FRAME] * frames]
    queue: list[int] = []
    if not streaming:
        rows += [(word, ids.pad) for word in said] + [(pad, code) for code in codes]
    else:
        beside = [*said, *[pad] * (len(codes) - len(said))]
        rows += zip(beside, codes, strict=False)
        queue = said[len(codes) :]
    laid = np.full((len(rows), 1 + config.groups), NONE, np.int64)
    laid[:, :2] = rows
    return Prompt(laid, np.array(queue, np.int64))


def fill(rows: Ids, frames: Ids) -> Ids:
    """*rows* with *frames* ``[F, groups]`` in place of their F rows of :data:`FRAME`."""
    filled = rows.copy()
    filled[rows[:, 1] == FRAME, 1:] = frames
    return filled
