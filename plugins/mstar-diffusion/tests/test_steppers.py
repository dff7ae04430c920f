"""Solvers against diffusers' schedulers, with requests at different steps in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_diffusion.guidance import away_from, towards
from mstar_diffusion.steppers import at_step, euler, unipc, unipc_start


def flow(sample: Tensor, level: float) -> Tensor:
    """A made-up model's velocity."""
    return torch.sin(sample * 3) * (0.5 + level) + sample.roll(1, -1) * 0.3


def schedule(scheduler: Any) -> Tensor:
    return torch.nn.functional.pad(scheduler.sigmas.float(), (0, 12 - len(scheduler.sigmas)))


def unipc_scheduler(steps: int, shift: float) -> Any:
    from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, solver_order=2, solver_type="bh2"
    )
    scheduler.set_timesteps(steps)
    return scheduler


def walked(scheduler: Any, start: Tensor) -> list[Tensor]:
    """The reference's samples, from *start* ``[1, …]`` to the end."""
    samples = [start]
    for index, time in enumerate(scheduler.timesteps):
        velocity = flow(samples[-1], float(scheduler.sigmas[index]))
        samples.append(scheduler.step(velocity, time, samples[-1], return_dict=False)[0])
    return samples


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_unipc_with_requests_at_different_steps(shift: float) -> None:
    """One joins at each step, with another number of steps; all take the reference's way."""
    counts = (1, 2, 3, 5, 8)
    schedulers = [unipc_scheduler(count, shift) for count in counts]
    starts = [torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(i)) for i in range(len(counts))]
    ways = [walked(scheduler, start) for scheduler, start in zip(schedulers, starts, strict=True)]
    latents, states = [*starts], [unipc_start(start) for start in starts]
    sigmas = torch.stack([schedule(scheduler) for scheduler in schedulers])
    for moment in range(max(i + count for i, count in enumerate(counts))):
        running = [i for i, count in enumerate(counts) if 0 <= moment - i < count]
        if not running:
            continue
        index = torch.tensor([moment - i for i in running])
        latent = torch.cat([latents[i] for i in running])
        levels = at_step(sigmas[running], index)
        velocity = torch.cat([flow(x[None], float(s)) for x, s in zip(latent, levels, strict=True)])
        steps = torch.tensor([counts[i] for i in running])
        moved, state = unipc(latent, velocity, torch.cat([states[i] for i in running]), sigmas[running], index, steps)
        for row, i in enumerate(running):
            latents[i], states[i] = moved[row : row + 1], state[row : row + 1]
            torch.testing.assert_close(latents[i], ways[i][moment - i + 1], rtol=1e-4, atol=1e-5)
    assert all(latent.isfinite().all() for latent in latents)


def test_euler_is_the_references() -> None:
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(5)
    start = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    way, latent, sigmas = walked(scheduler, start), start, schedule(scheduler)[None].expand(2, -1)
    for index in range(5):
        velocity = flow(latent, float(scheduler.sigmas[index]))
        latent = euler(latent, velocity, sigmas, torch.full((2,), index))
        assert torch.equal(latent, way[index + 1])


def test_euler_keeps_the_velocitys_dtype_and_adds_in_float32() -> None:
    latent = torch.full((1, 8), 1.0, dtype=torch.bfloat16)
    velocity = torch.full((1, 8), 1.0, dtype=torch.bfloat16)
    sigmas = torch.tensor([[1.0, 0.7501, 0.0]])
    moved = euler(latent, velocity, sigmas, torch.tensor([0]))
    assert moved.dtype is torch.bfloat16
    assert torch.equal(moved, torch.full((1, 8), 1 + (0.7501 - 1)).bfloat16())


def test_guidance_by_row() -> None:
    cond, uncond = torch.tensor([[3.0], [3.0]]), torch.tensor([[1.0], [1.0]])
    assert away_from(cond, uncond, torch.tensor([0.0, 2.0])).tolist() == [[3.0], [7.0]]
    assert towards(cond, uncond, torch.tensor([1.0, 2.0])).tolist() == [[3.0], [5.0]]
