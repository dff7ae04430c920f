"""What plugin authors and our own tests share: the conformance suite, sample requests, a hand-driven worker.

The names below are imported when they are asked for: every pytest run of an environment with mstar-core imports this
package, and most have nothing to do with M*.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mstar.testing.conformance import FamilyConformance, PluginConformance, VariantConformance
    from mstar.testing.drive import Driver
    from mstar.testing.examples import Example

__all__ = ["Driver", "Example", "FamilyConformance", "PluginConformance", "VariantConformance"]

_HOMES = {
    "Driver": "mstar.testing.drive",
    "Example": "mstar.testing.examples",
    "FamilyConformance": "mstar.testing.conformance",
    "PluginConformance": "mstar.testing.conformance",
    "VariantConformance": "mstar.testing.conformance",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
