"""What a running engine's steps cost, measured: a miniature that chats."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.runtime.service import open_service
from mstar.settings import Settings
from mstar.simulate.cost import fit
from mstar.simulate.measure import ask, measure, random_text


def test_prompts_and_decoding_are_timed() -> None:
    async def run() -> None:
        settings = Settings(extra_plugins=("mstar.testing.miniatures",))
        service = open_service("mini_chat", settings, {"executor": "inline"}, Registry(load_plugins(settings)))
        await service.start()
        told: list[tuple[int, int]] = []
        try:
            one = await ask(service, random_text(20, 0), 5)
            assert len(one.times) == 5
            assert one.prompt >= 20
            assert list(one.times) == sorted(one.times)
            samples = await measure(
                service, longest=64, streams=4, step_tokens=32, tell=lambda *done: told.append(done)
            )
        finally:
            await service.stop()
        prompts = [sample for sample in samples if sample.requests]
        decodes = [sample for sample in samples if not sample.requests]
        assert [step.tokens for step in prompts[-1].steps][:2] == [32, 32]
        assert {sample.steps[0].rows for sample in decodes} <= {1, 2, 4}
        assert 1 in {sample.steps[0].rows for sample in decodes}
        contexts = [step.context for step in decodes[0].steps]
        assert [b - a for a, b in pairwise(contexts)] == [1] * (len(contexts) - 1)
        assert told[-1][0] == told[-1][1] == len(told)
        assert fit(samples).samples == len(samples)

    asyncio.run(run())
