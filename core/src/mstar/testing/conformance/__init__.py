"""The contract of plugins and models, as tests (promise P14).

``pytest --mstar-plugin NAME`` runs all of it on a plugin. A family's own tests take it in by subclassing::

    from mstar.testing import FamilyConformance

    class TestConformance(FamilyConformance):
        key = "smollm2"

What is checked, and how a check is satisfied: ``docs/conformance.md``.
"""

from __future__ import annotations

from typing import ClassVar

from mstar.testing.conformance.answers import AnswerChecks
from mstar.testing.conformance.batches import BatchChecks
from mstar.testing.conformance.ends import EndChecks
from mstar.testing.conformance.graphs import GraphChecks
from mstar.testing.conformance.http import HttpChecks
from mstar.testing.conformance.plugins import PluginChecks
from mstar.testing.conformance.requests import RequestChecks
from mstar.testing.conformance.shares import ShareChecks
from mstar.testing.conformance.specs import SpecChecks
from mstar.testing.conformance.weights import WeightsChecks

__all__ = ["FamilyConformance", "PluginConformance", "VariantConformance"]


class VariantConformance(
    SpecChecks,
    GraphChecks,
    WeightsChecks,
    RequestChecks,
    AnswerChecks,
    HttpChecks,
):
    """The checks of what a key says, loads, takes and answers: for one whose model and processor are those of another
    key, which has all checks. How requests share steps and how they end is seen there.

    :cvar key: the model. :cvar plugin: module of its plugin, if that is not installed.
    """

    key: ClassVar[str] = ""
    plugin: ClassVar[str | None] = None


class FamilyConformance(VariantConformance, ShareChecks, BatchChecks, EndChecks):
    """All checks of one model; attributes as of :class:`VariantConformance`."""


class PluginConformance(PluginChecks):
    """The checks of a plugin as such. :cvar plugin: its name; default: that of ``--mstar-plugin``."""

    plugin: ClassVar[str | None] = None
