"""Solvers of a flow: one step for many requests, each at its own noise level.

What a solver has to remember of a request travels with the request as values of its graph, never in the solver: so
requests at different steps share one call, and any of them can leave.

Sources: diffusers 0.42.1, ``FlowMatchEulerDiscreteScheduler.step`` and ``UniPCMultistepScheduler`` (Zhao et al. 2023,
arXiv:2302.04867: order 2, B2(h) = e^h - 1, data prediction).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["at_step", "clean", "euler", "unipc", "unipc_start"]


def at_step(sigmas: Tensor, index: Tensor) -> Tensor:
    """Each request's noise level before its step *index* ``[rows]``, of its schedule *sigmas* ``[rows, S]``."""
    return sigmas.gather(1, index[:, None])[:, 0]


def _by_row(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *[1] * (like.ndim - 1))


def euler(latent: Tensor, velocity: Tensor, sigmas: Tensor, index: Tensor) -> Tensor:
    """One Euler step: ``latent + (next level - level) * velocity`` in float32, then of *velocity*'s dtype.

    *latent* and *velocity* ``[rows, …]``; *sigmas* float32 ``[rows, S]``; *index* int64 ``[rows]``.
    """
    width = at_step(sigmas, index + 1) - at_step(sigmas, index)
    return (latent.float() + _by_row(width, latent) * velocity).to(velocity.dtype)


def clean(latent: Tensor, velocity: Tensor, sigmas: Tensor, index: Tensor) -> Tensor:
    """What the picture would be if the flow went on straight: ``latent - level * velocity``, float32."""
    return latent.float() - _by_row(at_step(sigmas, index), latent) * velocity.float()


def unipc_start(latent: Tensor) -> Tensor:
    """The state of requests that have made no step: ``[rows, 3, …]`` float32, zeros. It holds the last two predictions
    of the clean picture, newest first, and the sample that the last step began with."""
    return torch.zeros(latent.shape[0], 3, *latent.shape[1:], dtype=torch.float32, device=latent.device)


def unipc(
    latent: Tensor, velocity: Tensor, state: Tensor, sigmas: Tensor, index: Tensor, steps: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of UniPC of order 2 in float32: what the last step predicted is corrected by what the model says now,
    then the next sample is predicted.

    *latent*, *velocity* ``[rows, …]``; *state* as :func:`unipc_start`; *sigmas* float32 ``[rows, S]``; *index* and
    *steps* int64 ``[rows]``. Of order 1 are a request's first and last step, and its first correction.

    :returns: the latent and the state after the step.
    """
    newest, older, last = state.unbind(1)
    level, following = at_step(sigmas, index), at_step(sigmas, index + 1)
    before, earlier = at_step(sigmas, (index - 1).clamp(min=0)), at_step(sigmas, (index - 2).clamp(min=0))
    now = latent.float() - _by_row(level, latent) * velocity.float()
    corrected = _corrected(latent.float(), now, newest, older, last, (level, before, earlier), index)
    ahead = _predicted(corrected, now, newest, (following, level, before), (index > 0) & (index < steps - 1))
    return ahead, torch.stack((now, newest, corrected), 1)


def _signal(level: Tensor) -> Tensor:
    """Half the logarithm of the ratio of signal to noise."""
    return torch.log(1 - level) - torch.log(level)


def _weights(from_level: Tensor, to_level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``h`` negated, ``phi_1 = e^-h - 1`` and ``phi_2 = phi_1 / -h - 1`` of a step between two noise levels."""
    step = -(_signal(to_level) - _signal(from_level))
    phi_1 = torch.expm1(step)
    return step, phi_1, phi_1 / step - 1


def _ratio(level: Tensor, earlier: Tensor, to_level: Tensor) -> Tensor:
    """How far back the noise level *earlier* lies of *level*, in steps from *level* to *to_level* (negative)."""
    return (_signal(earlier) - _signal(level)) / (_signal(to_level) - _signal(level))


def _predicted(
    sample: Tensor, now: Tensor, newest: Tensor, levels: tuple[Tensor, Tensor, Tensor], second: Tensor
) -> Tensor:
    following, level, before = levels
    _, phi_1, _ = _weights(level, following)
    plain = _by_row(following / level, sample) * sample - _by_row((1 - following) * phi_1, sample) * now
    back = _ratio(level, before, following)
    slope = (newest - now) / _by_row(back, sample)
    bent = plain - _by_row((1 - following) * phi_1 * 0.5, sample) * slope
    # the last step goes to noise level 0, where the terms of order 2 are not defined
    return torch.where(_by_row(second, sample), bent, plain)


def _corrected(
    latent: Tensor,
    now: Tensor,
    newest: Tensor,
    older: Tensor,
    last: Tensor,
    levels: tuple[Tensor, Tensor, Tensor],
    index: Tensor,
) -> Tensor:
    level, before, earlier = levels
    step, phi_1, phi_2 = _weights(before, level)
    scale = 1 - level
    plain = _by_row(level / before, last) * last - _by_row(scale * phi_1, last) * newest
    change = now - newest
    first = plain - _by_row(scale * phi_1 * 0.5, last) * change
    # order 2: the two coefficients solve a system of two equations, one for each known prediction
    back = _ratio(before, earlier, level)
    b_1, b_2 = phi_2 / phi_1, (phi_2 / step - 0.5) * 2 / phi_1
    r_1 = (b_1 - b_2) / (1 - back)
    r_2 = b_1 - r_1
    slope = (older - newest) / _by_row(back, last)
    bent = plain - _by_row(scale * phi_1, last) * (_by_row(r_1, last) * slope + _by_row(r_2, last) * change)
    corrected = torch.where(_by_row(index > 1, last), bent, first)
    return torch.where(_by_row(index > 0, last), corrected, latent)
