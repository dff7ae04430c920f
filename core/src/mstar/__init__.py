"""M*: one runtime for every kind of generative multimodal model.

``mstar.load("smollm2")`` gives a model to talk to from Python; ``mstar serve smollm2`` serves it. Importing this
package is cheap: nothing here imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mstar.hookspecs import hookimpl

if TYPE_CHECKING:
    from mstar.runtime.local import Local

__all__ = ["hookimpl", "load"]
__version__ = "0.1.0"


def load(
    key: str,
    *,
    weights: str | None = None,
    config: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    **options: Any,
) -> Local:
    """Load a model into this process and return it when it is ready.

    :param weights: a folder in the published layout, or ``HUB_ID[@REVISION]``. :param config: a deployment file.
    :param device: ``cpu``, ``cuda`` or ``cuda:N``. :param dtype: ``float32``, ``bfloat16`` or ``float16``.
    :param options: ``executor`` and every field of the deployment file; see :func:`mstar.runtime.local.load`.
    """
    from mstar.runtime.local import load as load_local

    return load_local(key, weights=weights, config=config, device=device, dtype=dtype, **options)
