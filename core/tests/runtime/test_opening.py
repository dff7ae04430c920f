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
from mstar.spec.errors import DeploymentError, FaultFound, SetupError, WeightsError
from mstar.spec.knobs import Knobs, SamplingKnobs
from mstar.spec.model import ModelSpec, WeightsRef
from mstar.testing.drive import miniature_registry
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
        ("model: other", r":1: model: this is the deployment of 'other', not of 'fake'"),
        ("engine: &here {trace: *here}", r"line 1: what is anchored here contains itself"),
        ("<<: &here {<<: *here}", r"line 1: what is anchored here contains itself"),
        ("model_kwargs: " + "[" * 40 + "]" * 40, r"line 1: this is nested more than 32 levels deep"),
        ("model_kwargs: " + "{a: " * 5000 + "1" + "}" * 5000, r"this is nested more than 32 levels deep"),
        ("session_ttl_s: !!int soon", r"is not valid YAML: invalid literal"),
        ("session_ttl_s: 2026-13-01", r"is not valid YAML: month must be in 1..12"),
        ("max_sessions: \x00", r"is not valid YAML"),
    ],
)
def test_a_faulty_file_is_named(file: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(FaultFound, match=rf"{tmp_path}/deployment\.yaml.*{fault}"):
        opened(with_defaults(), tmp_path, file=file)


def test_a_few_lines_of_aliases_do_not_stand_for_millions_of_values(tmp_path: Path) -> None:
    lines = [
        "a0: &a0 {x: 1}",
        *(f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(10))}}}" for i in range(1, 9)),
    ]
    with pytest.raises(FaultFound, match=r"with what aliases repeat, these are more than 10,000 values"):
        opened(with_defaults(), tmp_path, file="\n".join(lines))


def test_a_file_that_is_not_utf8_is_a_fault_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes("# ok\nmodel: fake # für\n".encode("latin-1"))
    registry: Any = OneModel(SPEC)
    with pytest.raises(FaultFound, match=rf"{file}: line 2: this is not UTF-8"):
        prepare_config(with_defaults(), Settings(cache=tmp_path), {}, registry, config=file)


def test_a_file_that_is_not_there_is_no_fault_of_a_deployment(tmp_path: Path) -> None:
    registry: Any = OneModel(SPEC)
    with pytest.raises(SetupError, match=r"nowhere\.yaml cannot be read") as caught:
        prepare_config(with_defaults(), Settings(cache=tmp_path), {}, registry, config=tmp_path / "nowhere.yaml")
    assert not isinstance(caught.value, FaultFound)


def test_a_key_given_twice_is_refused_with_both_lines_beside_other_faults(tmp_path: Path) -> None:
    file = "max_sessions: 2\nengine:\n  threads: 1\n  'threads': 2\nmax_sessions: 3\nsession_ttl_s: -1\n"
    with pytest.raises(DeploymentError) as caught:
        opened(with_defaults(), tmp_path, file=file)
    path = tmp_path / "deployment.yaml"
    assert str(caught.value).splitlines()[:2] == [
        f"{path}:5: max_sessions: given 2 times, on lines 1 and 5; keep one of them",
        f"{path}:4: engine.threads: given 2 times, on lines 3 and 4; keep one of them",
    ]
    assert f"{path}:6: session_ttl_s: " in str(caught.value)
    with pytest.raises(DeploymentError, match=r"max_sessions: given 2 times, on line 1"):
        opened(with_defaults(), tmp_path, file="{max_sessions: 2, max_sessions: 2}")


def test_merged_keys_are_no_repeated_ones_and_have_the_line_of_where_they_stand(tmp_path: Path) -> None:
    file = "engine: &base\n  threads: 1\n  runer: eager\nscheduler:\n  <<: *base\n  threads: 2\n"
    with pytest.raises(DeploymentError) as caught:
        opened(with_defaults(), tmp_path, file=file)
    path = tmp_path / "deployment.yaml"
    found = {(place, key) for place, key, _ in (line.split(": ", 2) for line in str(caught.value).splitlines())}
    assert found == {
        (f"{path}:3", "engine.runer"),
        (f"{path}:3", "scheduler.runer"),
        (f"{path}:6", "scheduler.threads"),
    }


def test_a_repeated_key_of_the_packages_own_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "b_family"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "default.yaml").write_text("executor: inline\nexecutor: inline\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DeploymentError, match=r"b_family:default\.yaml:2: executor: given 2 times, on lines 1 and 2"):
        opened(dataclasses.replace(SPEC, deployment="b_family:default.yaml"), tmp_path)


@pytest.mark.parametrize(
    ("options", "file", "message"),
    [
        ({"executor": "inlin"}, "", "options given: executor: there is no executor 'inlin'; did you mean 'inline'?"),
        (
            {},
            "executor: nosuch",
            "{file}:1: executor: there is no executor 'nosuch'; there are: inline, processes, ray",
        ),
        (
            {},
            "scheduler:\n  policy: defaul",
            "{file}:2: scheduler.policy: there is no scheduler 'defaul'; did you mean 'default'?",
        ),
        ({}, "engine:\n  runner: graph", "{file}:2: engine.runner: there is no engine 'graph'; did you mean 'graphs'?"),
        (
            {},
            "engine: {attention: torch_spda}",
            "{file}:1: engine.attention: there is no attention backend 'torch_spda'; did you mean 'torch_sdpa'?",
        ),
        (
            {},
            "resources: {kv: {backend: torch_spda}}",
            "{file}:1: resources.kv.backend: there is no attention backend 'torch_spda'; did you mean 'torch_sdpa'?",
        ),
        ({}, "dtype: bfloat", "{file}:1: dtype: dtype 'bfloat' is not supported; did you mean 'bfloat16'?"),
        ({}, "device: gpu", "{file}:1: device: device 'gpu' is not one that M* knows; use cpu, cuda or cuda:N"),
        ({}, "\nrequired_plugins: [mstar-nowhere]", "{file}:2: required_plugins: the deployment requires plugins"),
    ],
)
def test_names_that_are_not_there_are_refused_before_weights_are_fetched(
    options: dict[str, Any], file: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*arguments: Any) -> None:
        raise AssertionError("weights were fetched")

    monkeypatch.setattr("mstar.runtime.opening.resolve_weights", fetch)
    monkeypatch.setattr("mstar.runtime.opening.present_weights", fetch)
    config = tmp_path / "deployment.yaml"
    config.write_text(file)
    registry = miniature_registry()
    with pytest.raises(DeploymentError) as caught:
        prepare_config(registry.model("mini_chat"), Settings(cache=tmp_path), options, registry, config=config)
    assert str(caught.value).startswith(message.format(file=config))


def test_all_names_that_are_not_there_are_listed_at_once(tmp_path: Path) -> None:
    registry = miniature_registry()
    layer = {"executor": "a", "scheduler": {"policy": "b"}, "engine": {"runner": "c", "attention": "d"}}
    with pytest.raises(DeploymentError) as caught:
        prepare_config(
            registry.model("mini_chat"), Settings(cache=tmp_path), {**layer, "model_kwargs": {"e": 1}}, registry
        )
    assert [key for key, _ in caught.value.faults] == [
        "executor", "scheduler.policy", "engine.runner", "engine.attention", "model_kwargs.e",
    ]  # fmt: skip


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


@pytest.mark.parametrize(
    ("weights", "fault"),
    [("~nobody-has-this-name/x", "there is no folder '"), ("9" * 5000, "cannot be looked at: File name too long")],
)
def test_weights_that_no_folder_can_be_are_a_fault_with_their_line(weights: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(DeploymentError) as caught:
        opened(with_defaults(), tmp_path, file=f"weights: '{weights}'\n")
    assert f"{tmp_path / 'deployment.yaml'}:1: weights: " in str(caught.value)
    assert fault in str(caught.value)
    with pytest.raises(WeightsError):
        opened(with_defaults(), tmp_path, {"weights": weights})
