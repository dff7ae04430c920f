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


def load(key: str, **options: Any) -> Local:
    """Load a model into this process. See :func:`mstar.runtime.local.load` for the options."""
    from mstar.runtime.local import load as load_local

    return load_local(key, **options)
