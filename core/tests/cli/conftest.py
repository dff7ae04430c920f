"""A toy plugin and a way to run command lines with it alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mstar.cli.app import run

sys.path.append(str(Path(__file__).parent))  # for checks

PLUGIN = """
import mstar
from mstar.spec.knobs import SamplingKnobs
from mstar.spec.model import Licence, ModelSpec, WeightsRef

def spec(key, licence, size):
    return ModelSpec(
        key=key, family="toy", summary=f"The model {key}.", weights=(WeightsRef("hub", "toys/" + key, "v1"),),
        licence=licence, model="toys:Model", processor="toys:Processor", knobs=SamplingKnobs, abilities=("chat",),
        size=size,
    )

@mstar.hookimpl
def mstar_models():
    return [
        spec("toy-chat", Licence("Apache-2.0"), 269_000_000),
        spec("toy-closed", Licence("Toy-NC", "https://toys.example/terms", commercial=False, permissive=False), None),
        spec("toy-gated", Licence("Toy-Community", "https://toys.example/gate", gated=True), None),
    ]

@mstar.hookimpl
def mstar_cli(commands):
    commands.add("greet", lambda arguments, context: print(f"hello {arguments.name}"), help="Say hello.",
        arguments=lambda parser: parser.add_argument("name"))
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def mstar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command line in this process with the toy plugin alone (and *extra*, a module with source *code*), its
    folders below ``tmp_path``; gives exit status, stdout and stderr."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "cli_toys.py").write_text(PLUGIN)
    folders = {f"MSTAR_{name.upper()}": str(tmp_path / name) for name in ("cache", "config")}

    def call(*words: str, extra: str = "", code: str = "", **environ: str) -> tuple[int, str, str]:
        if code:
            (tmp_path / f"{extra}.py").write_text(code)
        modules = ",".join(filter(None, ["cli_toys", extra]))
        hub = str(tmp_path / "hub")
        base = {"MSTAR_PLUGINS": "", "MSTAR_EXTRA_PLUGINS": modules, "HF_HUB_CACHE": hub, **folders}
        status = run(words, {**base, **environ})
        out, err = capsys.readouterr()
        return status, out, err

    yield call
    for name in [name for name in sys.modules if name.startswith("cli_toys")]:
        del sys.modules[name]


LLAMA = """
import mstar
from mstar.spec.knobs import SamplingKnobs
from mstar.spec.model import Licence, ModelSpec, WeightsRef

@mstar.hookimpl
def mstar_models():
    return [
        ModelSpec(
            key="toy-llama", family="toy", summary="A small decoder.", weights=(WeightsRef("hub", "toys/llama", "v1"),),
            licence=Licence("Apache-2.0"), model="mstar.patterns.causal_lm:CausalLM",
            processor="mstar.processing.chat:TextProcessor", knobs=SamplingKnobs, abilities=("chat",),
            deployment={"device": "cpu", "dtype": "float32", "resources": {"kv": {"tokens": 1024}}},
        )
    ]
"""

CONFIG = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def llama_code() -> str:
    """The module of the plugin that ``llama`` adds."""
    return LLAMA


@pytest.fixture
def llama(mstar: Run, tmp_path: Path) -> Run:
    """As ``mstar``, with model ``toy-llama`` beside the others; ``tmp_path/llama`` holds its config and no weights."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(CONFIG))

    def call(*words: str) -> tuple[int, str, str]:
        return mstar(*words, extra="cli_toys_llama", code=LLAMA)

    return call
