"""A loop tells its progress to those who want to hear it, and to no one else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mstar.spec.processor import FramesDelta, ProgressDelta
from mstar.testing.drive import Driver, miniature_registry
from mstar.testing.examples import task_for
from mstar.testing.miniatures import Example, miniature

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("loop")]
ASKED = Example("abc", {"steps": 3, "guidance": 2.0, "size": 2})


def run(*examples: Example, key: str = "mini_denoise") -> list[list[Any]]:
    """What each of *examples*, side by side in one worker, is answered."""
    driver = Driver(miniature(key), miniature_registry())
    for number, example in enumerate(examples):
        driver.submit(f"r{number}", example)
    driver.run()
    answers = []
    for number, example in enumerate(examples):
        name, task = f"r{number}", task_for(driver.spec, example)
        renderer = driver.processor.renderer(task, driver.processor.prepare(task, name))
        answers.append([delta for event in driver.emitted[name] for delta in renderer.feed(event)])
        assert "progress" not in driver.ended[name].usage.output  # type: ignore[union-attr]
    driver.assert_empty()
    return answers


def test_who_does_not_ask_hears_nothing() -> None:
    (deltas,) = run(ASKED)
    assert [type(delta) for delta in deltas] == [FramesDelta]


def test_each_step_is_told() -> None:
    told, _, longer = run(
        replace(ASKED, want=("image", "progress")),
        ASKED,
        replace(ASKED, want=("progress",), knobs={**ASKED.knobs, "steps": 5}),
    )
    assert told[:-1] == [ProgressDelta(step, 3) for step in (1, 2, 3)]
    assert isinstance(told[-1], FramesDelta)
    assert longer[:-1] == [ProgressDelta(step, 5) for step in (1, 2, 3, 4, 5)]


def test_previews_come_with_their_steps() -> None:
    (deltas,) = run(replace(ASKED, want=("image", "preview")))
    *told, picture = deltas
    assert [(delta.step, delta.total) for delta in told] == [(1, 3), (2, 3), (3, 3)]
    np.testing.assert_array_equal(told[-1].preview, picture.frames[0])
    assert (told[0].preview != told[-1].preview).any()


def test_a_video_tells_its_frames() -> None:
    (deltas,) = run(Example("abc", {"frames": 5}, want=("video", "progress")), key="mini_video")
    assert [delta.step for delta in deltas if isinstance(delta, ProgressDelta)] == [1, 2, 3, 4, 5]
