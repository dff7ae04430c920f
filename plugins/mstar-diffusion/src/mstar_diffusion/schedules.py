"""When a request's denoise steps are: noise levels from 1 to 0, by the scheduler's published configuration.

A schedule is made on the API side and travels with its request, padded to one length, so requests with different
numbers of steps share the denoiser's steps. No torch.

Source: diffusers 0.42.1, ``FlowMatchEulerDiscreteScheduler.set_timesteps``; ``compute_empirical_mu`` of its FLUX.2
pipeline for the shift by size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mstar.spec.errors import SetupError
from mstar_diffusion.knobs import MOST_STEPS

__all__ = ["FlowSchedule", "empirical_shift", "padded"]

_PLAIN = {
    "num_train_timesteps": 1000,
    "invert_sigmas": False,
    "shift_terminal": None,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
"""Keys of a published ``scheduler_config.json`` that must have these values, or be absent."""


@dataclass(frozen=True)
class FlowSchedule:
    """Flow matching with Euler steps.

    :param shift: moves noise levels towards 1: ``shift * s / (1 + (shift - 1) * s)``. :param dynamic: they are moved by
        a number that depends on the picture instead (:meth:`sigmas`), whatever *shift* says.
    """

    shift: float = 1.0
    dynamic: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> FlowSchedule:
        """From ``scheduler_config.json``. Raises :class:`SetupError` for a scheduler of another kind."""
        kind = config.get("_class_name", "FlowMatchEulerDiscreteScheduler")
        if kind != "FlowMatchEulerDiscreteScheduler":
            raise SetupError(f"scheduler_config.json: {kind} is not supported; FlowMatchEulerDiscreteScheduler is")
        for key, value in _PLAIN.items():
            if (config.get(key) or value) != value:
                raise SetupError(f"scheduler_config.json: {key} {config[key]!r} is not supported; {value!r} is")
        return cls(float(config.get("shift", 1.0)), bool(config.get("use_dynamic_shifting", False)))

    def sigmas(self, steps: int, mu: float = 0.0) -> NDArray[np.float32]:
        """float32 ``[steps + 1]``: the noise levels before each step and after the last, falling from 1 to 0.

        :param mu: of a dynamic schedule: levels become ``e^mu / (e^mu + 1/s - 1)``.
        """
        even: NDArray[np.float32] = np.linspace(1.0, 1 / steps, steps).astype(np.float32)
        if self.dynamic:
            levels = math.exp(mu) / (math.exp(mu) + (1 / even - 1))
        else:
            levels = self.shift * even / (1 + (self.shift - 1) * even)
        return np.append(levels, 0).astype(np.float32)


def padded(sigmas: NDArray[np.float32]) -> NDArray[np.float32]:
    """*sigmas* with zeros behind, as long as the longest schedule: float32 ``[MOST_STEPS + 1]``."""
    return np.pad(sigmas, (0, MOST_STEPS + 1 - len(sigmas)))


def empirical_shift(tokens: int, steps: int) -> float:
    """FLUX.2's ``mu``, fitted by its authors over the picture's *tokens* and the number of *steps*."""
    at_200 = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return at_200
    at_10 = 8.73809524e-05 * tokens + 1.89833333
    slope = (at_200 - at_10) / 190.0
    return slope * steps + at_200 - 200.0 * slope
