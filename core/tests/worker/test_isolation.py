"""What one request, or one plugin, does wrong does not reach the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mstar.resources.base import Owner
from mstar.spec.errors import RequestError
from mstar.spec.request import Done, Failed, Push
from mstar.testing.drive import Driver
from mstar.testing.miniatures import Example, Miniature, miniature
from mstar.testing.miniatures.common import decode

DUPLEX = miniature("mini_duplex")
SPOKEN = Example(appends=(("audio_in", np.ones(8, dtype=np.float32)),))


pytestmark = pytest.mark.usefixtures("loop")


def assert_right(mini: Miniature, example: Example, got: Any) -> None:
    for stream, want in mini.expected(example).items():
        if isinstance(want, str):
            assert decode(got.get(stream, [])) == want
        else:
            np.testing.assert_allclose(got[stream], want, rtol=1e-5, atol=mini.tolerance)


def test_data_that_is_no_tensor_fails_the_request_that_sent_it() -> None:
    driver = Driver(DUPLEX)
    for name in ("bad", "good"):
        driver.worker.submit(driver.prepare(name, Example()).request)
    driver.worker.step()
    driver.worker.push(Push(id="bad", stream="audio_in", data=np.array(["no", "numbers"])))
    driver.worker.push(Push(id="good", stream="audio_in", data=SPOKEN.appends[0][1], end=True))
    driver.run()
    end = driver.ended["bad"]
    assert isinstance(end, Failed)
    assert (end.status, end.param) == (400, "audio_in")
    assert_right(DUPLEX, SPOKEN, driver.result("good"))
    driver.assert_empty()


def test_a_resource_that_raises_at_admission_leaves_nothing_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(miniature("mini_chat"))
    last = driver.worker.resources["sampler"]

    def refuse(owner: Owner, units: int) -> bool:
        raise RequestError("not this one", code="refused")

    with monkeypatch.context() as patch:
        patch.setattr(last, "reserve", refuse)
        driver.submit("bad", Example("hello"))
        driver.run()
    end = driver.ended["bad"]
    assert isinstance(end, Failed)
    assert end.code == "refused"
    driver.worker.check()
    driver.submit("good", Example("hello"))
    driver.run()
    assert isinstance(driver.ended["good"], Done)
    driver.assert_empty()
