"""Opening a model: which layer of the deployment wins, and where weights come from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import SPEC, FakeRegistry
from pydantic import Field

from mstar.cluster.child import build_registry
from mstar.runtime.opening import prepare_config
from mstar.runtime.service import open_service
from mstar.settings import Settings
from mstar.spec.errors import DeploymentError, SetupError, WeightsError
from mstar.spec.knobs import Knobs, SamplingKnobs
from mstar.spec.model import ModelSpec, WeightsRef
from mstar.testing.miniatures import MINIATURES
from mstar.weights.sources import PathSource, SourceContext


class OneModel(FakeRegistry):
    def __init__(self, spec: ModelSpec):
        self._spec = spec

    def model(self, key: str) -> ModelSpec:
        return self._spec

    def weight_source(self, name: str) -> Any:
        return {"path": PathSource}[name]


def opened(spec: ModelSpec, tmp_path: Path, overrides: dict[str, Any] | None = None, file: str | None = None) -> Any:
    config = None
    if file is not None:
        config = tmp_path / "deployment.yaml"
        config.write_text(file)
    registry: Any = OneModel(spec)
    settings = Settings(cache=tmp_path, extra_plugins=("json",))
    return open_service(spec.key, settings, overrides or {}, registry, config=config, say=lambda sentence: None).config


def with_defaults(**deployment: Any) -> ModelSpec:
    return dataclasses.replace(SPEC, deployment={"executor": "inline", **deployment})


def test_flags_win_over_the_file_and_the_file_over_the_package(tmp_path: Path) -> None:
    spec = with_defaults(max_concurrent_requests=1, max_sessions=1, session_ttl_s=1.0)
    file = "max_sessions: 2\nsession_ttl_s: 2\nengine: {threads: 2}\n"
    config = opened(spec, tmp_path, {"session_ttl_s": 3.0, "device": None}, file)
    deployment = config.deployment
    assert (deployment.max_concurrent_requests, deployment.max_sessions, deployment.session_ttl_s) == (1, 2, 3.0)
    assert (deployment.engine.threads, deployment.device) == (2, None)
    assert (config.weights, config.extra_plugins) == (None, ("json",))


def test_a_worker_process_has_the_plugins_of_its_parent(tmp_path: Path) -> None:
    settings = Settings(plugins=(), block_plugins=("other",), extra_plugins=("mstar.testing.miniatures",))
    config = prepare_config(with_defaults(), settings, {}, OneModel(SPEC))  # type: ignore[arg-type]
    registry = build_registry(config)
    assert set(registry.models) == {miniature.key for miniature in MINIATURES}
    assert config.block_plugins == ("other",)


@pytest.mark.parametrize("trace", [True, False])
def test_a_worker_process_traces_hooks_when_its_parent_does(trace: bool, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(plugins=(), trace_plugins=trace)
    config = prepare_config(with_defaults(), settings, {}, OneModel(SPEC))  # type: ignore[arg-type]
    build_registry(config)
    assert ("hook: mstar_engines() [core]" in capsys.readouterr().err) is trace


class Options(Knobs):
    voice: str = Field("anna", description="Who speaks.")
    window: int | None = Field(None, ge=1, le=64, description="Seconds.", strict=True)


def test_a_deployments_options_are_the_models(tmp_path: Path) -> None:
    spec = dataclasses.replace(with_defaults(model_kwargs={"voice": "bert"}), options=Options)
    config = opened(spec, tmp_path, file="model_kwargs: {window: 8}")
    assert config.deployment.model_kwargs == {"voice": "bert", "window": 8}


def test_unknown_and_wrong_options_are_refused_together_before_weights_are_looked_for(tmp_path: Path) -> None:
    spec = dataclasses.replace(with_defaults(), options=Options, weights=(WeightsRef("nowhere", "x"),))
    with pytest.raises(DeploymentError) as caught:
        opened(spec, tmp_path, {"model_kwargs": {"voice": "x", "windo": 3, "window": 65}})
    assert caught.value.faults == (
        (
            "model_kwargs.window",
            "'window': input should be less than or equal to 64, got '65'; the nearest valid value is 64",
        ),
        ("model_kwargs.windo", "unknown parameter 'windo'; did you mean 'window'?"),
    )


def test_a_model_without_options_takes_none(tmp_path: Path) -> None:
    with pytest.raises(
        DeploymentError, match=r"model_kwargs\.max_tokens: unknown parameter 'max_tokens'; there are none"
    ):
        opened(dataclasses.replace(with_defaults(), options=Knobs), tmp_path, file="model_kwargs: {max_tokens: 8}")


def test_the_packages_defaults_may_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a_family"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "default.yaml").write_text("executor: inline\nmax_sessions: 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = opened(dataclasses.replace(SPEC, deployment="a_family:default.yaml"), tmp_path)
    assert config.deployment.max_sessions == 5
    with pytest.raises(SetupError, match=r"a_family:other\.yaml.*cannot be read"):
        opened(dataclasses.replace(SPEC, deployment="a_family:other.yaml"), tmp_path)


@pytest.mark.parametrize(
    ("file", "fault"),
    [
        ("max_sesions: 2", r"did you mean 'max_sessions'"),
        ("- 1", r"must be a mapping"),
        ("a: [", r"is not valid YAML"),
        ("model: other", r"is the deployment of 'other', not of 'fake'"),
    ],
)
def test_a_faulty_file_is_named(file: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=fault):
        opened(with_defaults(), tmp_path, file=file)


def test_every_fault_stands_on_a_line_with_its_place(tmp_path: Path) -> None:
    file = "model: fake\nmax_sesions: 2\nengine:\n  runer: eager\n"
    with pytest.raises(DeploymentError) as caught:
        opened(with_defaults(session_ttl_s=-1), tmp_path, {"max_concurrent_requests": 0, "device": None}, file)
    path = tmp_path / "deployment.yaml"
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[0] for line in sorted(lines)] == sorted(
        [f"{path}:2", f"{path}:4", "deployment of 'fake'", "options given"]
    )
    assert f"{path}:2: max_sesions: unknown key; did you mean 'max_sessions'?" in lines
    assert f"{path}:4: engine.runer: unknown key; did you mean 'runner'?" in lines


@pytest.mark.parametrize(
    ("layer", "hint"),
    [
        ({"knobs": {"temperature": 0}}, "knobs: unknown key; did you mean 'model_kwargs'?"),
        ({"temperature": 0}, "temperature: unknown key: this is a parameter of requests"),
        ({"answer_tokens": 3}, "did you mean 'model_kwargs: {answer_tokens: …}'?"),
        ({"engine": {"temperature": 0}}, "engine.temperature: unknown key; known: "),
    ],
)
def test_what_belongs_into_model_kwargs_is_sent_there(layer: dict[str, Any], hint: str, tmp_path: Path) -> None:
    spec = dataclasses.replace(with_defaults(model_kwargs={"answer_tokens": 2}), knobs=SamplingKnobs)
    with pytest.raises(DeploymentError) as caught:
        opened(spec, tmp_path, layer)
    assert hint in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_here_is_refused_before_weights_are_fetched(tmp_path: Path) -> None:
    fetched = []

    class Fetching(PathSource):
        def present(self, ref: WeightsRef, context: SourceContext) -> Path | None:
            return None

        def resolve(self, ref: WeightsRef, context: SourceContext) -> Path:
            fetched.append(ref)
            return tmp_path

    class Registry(OneModel):
        def weight_source(self, name: str) -> Any:
            return Fetching

    registry: Any = Registry(dataclasses.replace(with_defaults(), weights=(WeightsRef("hub", "a/b"),)))
    settings = Settings(cache=tmp_path)
    with pytest.raises(SetupError, match="sees no CUDA device; use --device cpu"):
        prepare_config(registry.model("fake"), settings, {"device": "cuda"}, registry)
    assert not fetched
    prepare_config(registry.model("fake"), settings, {"device": "cpu"}, registry)
    assert fetched


def test_weights_come_from_the_specs_place_or_the_operators(tmp_path: Path) -> None:
    for name in ("published", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    spec = dataclasses.replace(with_defaults(), weights=(WeightsRef("path", str(tmp_path / "published")),))
    assert opened(spec, tmp_path).weights == str(tmp_path / "published")
    assert opened(spec, tmp_path, {"weights": str(tmp_path / "mine")}).weights == str(tmp_path / "mine")
    with pytest.raises(WeightsError, match=r"no weights for 'fake'"):
        opened(spec, tmp_path, {"weights": str(tmp_path / "missing")})


def test_weights_of_a_file_that_are_not_there_have_its_line(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError) as caught:
        opened(with_defaults(), tmp_path, file="max_sessions: 1\nweights: nowhere\n")
    place = tmp_path / "deployment.yaml"
    assert str(caught.value) == f"{place}:2: weights: there is no folder '{tmp_path / 'nowhere'}'"
