"""A plugin for tests: workers as processes whose silence is noticed within seconds, not within a minute."""

from __future__ import annotations

from typing import Any

import mstar
from mstar.cluster.processes import ProcessesExecutor


class Impatient(ProcessesExecutor):
    def __init__(self, *arguments: Any):
        super().__init__(*arguments, silence_limit_s=8.0)


@mstar.hookimpl
def mstar_executors() -> dict[str, str]:
    return {"impatient": "tests.impatient:Impatient"}
