"""The plugin's light side."""

from __future__ import annotations

import os
import subprocess
import sys

from mstar.spec.knobs import validate_knobs
from mstar_demo import plugin
from mstar_demo.spec import SMOLLM2


def test_the_hook_returns_the_model() -> None:
    (spec,) = plugin.mstar_models()
    assert spec is SMOLLM2
    assert (spec.key, spec.licence.name, spec.licence.permissive) == ("smollm2", "Apache-2.0", True)


def test_weights_are_pinned() -> None:
    package, hub = SMOLLM2.weights
    assert (package.source, package.revision) == ("package", "0.1.2")
    assert hub.source == "hub"
    assert hub.revision is not None
    assert len(hub.revision) == 40


def test_the_plugin_imports_no_torch() -> None:
    program = "import sys, mstar_demo.plugin; sys.exit(bool({'torch', 'transformers', 'gguf'} & sys.modules.keys()))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == 0


def test_knobs_are_the_sampling_knobs_with_other_defaults() -> None:
    assert validate_knobs(SMOLLM2.knobs, {}).temperature == 0.2  # type: ignore[attr-defined]
