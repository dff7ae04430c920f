"""What ``deploy/`` runs is there: packages, commands, options, routes, values. Where Helm is, the chart is rendered."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from mstar.cli.commands import Parser
from mstar.cli.serve import _arguments
from mstar.settings import __doc__ as settings_table
from mstar.spec.deployment import merge_deployment
from mstar.spec.placement import ranks_of
from mstar_server.observe.catalog import CATALOG
from mstar_server.options import ServerOptions
from mstar_server.routes.health import router as health
from mstar_server.run import FLUSH_S

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/mstar"
DOCKERFILES = sorted((DEPLOY / "docker").glob("Dockerfile.*"))
TEMPLATES = sorted((CHART / "templates").iterdir())
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
ROUTES = {getattr(route, "path", "") for route in health.routes}
DOCKERFILE = pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)


def project(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def test_there_is_an_image_for_cpus_and_one_for_gpus() -> None:
    assert [file.suffix for file in DOCKERFILES] == [".cpu", ".cuda"]


@DOCKERFILE
def test_an_image_installs_packages_and_extras_that_exist(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    families = re.search(r'^ARG FAMILIES="([^"]*)"$', text, re.MULTILINE)
    assert families is not None
    assert set(families[1].split()) == {path.name for path in (ROOT / "plugins").iterdir() if path.is_dir()}
    installed = re.findall(r'"\./(core|server)\[([\w,]+)\]"', text)
    assert {folder for folder, _ in installed} == {"core", "server"}
    for folder, extras in installed:
        assert set(extras.split(",")) <= set(project(ROOT / folder)["optional-dependencies"]), folder
    torch = re.search(r"^ARG TORCH=(.*)$", text, re.MULTILINE)
    assert torch is not None
    assert f'"{torch[1]}"' in (ROOT / "scripts/environment.py").read_text(encoding="utf-8")


@DOCKERFILE
def test_an_image_copies_and_sets_what_exists(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, re.MULTILINE):
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] not in ignored
    for name in re.findall(r"\bMSTAR_\w+", text):
        assert settings_table is not None
        assert f"``{name}``" in settings_table
    assert re.search(r"^USER (?!root|0)\w+$", text, re.MULTILINE)
    assert re.search(r"^STOPSIGNAL SIGTERM$", text, re.MULTILINE)


@DOCKERFILE
def test_an_image_starts_the_server_and_asks_a_route_of_its(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    start, words = (
        ast.literal_eval(found) for found in re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", text, re.MULTILINE)
    )
    assert start[:2] == ["mstar", "serve"]
    assert "mstar" in project(ROOT / "core")["scripts"]
    given = parsed([*start[2:], *words, "--drain", "60"])
    assert (given.host, given.keys) == ("0.0.0.0", ["smollm2"])
    (probe,) = re.findall(rf"http://127\.0\.0\.1:{given.port}(/[\w/]*)", text)
    assert probe in ROUTES


def parsed(words: list[str]) -> Any:
    parser = Parser(prog="mstar serve")
    _arguments(parser)
    return parser.parse_args(words)


# --- the chart -----------------------------------------------------------------------------------------------------


def test_every_value_that_a_template_reads_has_a_default_and_every_default_is_read() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in TEMPLATES)
    read = set(re.findall(r"\.Values\.([\w.]+)", text))
    for path in read:
        found: Any = VALUES
        for key in path.split("."):
            assert key in found, path
            found = found[key]
    leaves = set(paths(VALUES))
    assert [leaf for leaf in leaves if not any(leaf == path or leaf.startswith(f"{path}.") for path in read)] == []


def paths(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from paths(value, f"{before}{key}.")
        else:
            yield before + key


def test_the_templates_blocks_are_closed() -> None:
    for file in TEMPLATES:
        words = re.findall(r"\{\{-?\s*(if|with|range|define|end)\b", file.read_text(encoding="utf-8"))
        depth = 0
        for word in words:
            depth += -1 if word == "end" else 1
            assert depth >= 0, file.name
        assert depth == 0, file.name


def test_probes_ask_routes_that_exist_and_a_pod_has_time_to_drain() -> None:
    text = (CHART / "templates/deployment.yaml").read_text(encoding="utf-8")
    probed = dict(re.findall(r"(\w+)Probe:\s+httpGet:\s+path: (\S+)", text))
    assert probed == {"startup": "/health/ready", "readiness": "/health/ready", "liveness": "/health/live"}
    assert {*probed.values()} <= ROUTES
    grace = re.search(
        r"terminationGracePeriodSeconds: \{\{ add \.Values\.preStopSeconds \.Values\.drainSeconds (\d+) \}\}", text
    )
    assert grace is not None
    assert int(grace[1]) >= FLUSH_S + 5
    assert VALUES["drainSeconds"] == ServerOptions().drain_s


RENDERED: list[dict[str, Any]] = [
    {},
    {
        "models": ["smollm2", "whisper_base"],
        "deployments": {"smollm2": {"max_concurrent_requests": 64, "scheduler": {"max_queue": 8}}},
        "apiKey": {"value": "secret"},
        "huggingFace": {"existingSecret": "hub"},
        "autoscaling": {"enabled": True, "metric": "mstar_worker_requests_waiting"},
        "extraArgs": ["--alias", "gpt-4o=smollm2"],
        "gpus": 1,
    },
    {"cache": {"enabled": False}, "autoscaling": {"enabled": True}, "podDisruptionBudget": {"enabled": False}},
    {"strategy": {"type": "Recreate"}, "gpus": 1, "resources": {"requests": None, "limits": None}},
]


def render(values: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The chart's objects: by ``helm``, or its library for Python (``pip install helm-python-sdk``)."""
    if shutil.which("helm"):
        file = folder / "values.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        made = subprocess.run(
            ["helm", "template", "demo", str(CHART), "--values", str(file)], capture_output=True, text=True, check=True
        )
        texts = [made.stdout]
    else:
        helm = pytest.importorskip("helm_python", reason="neither helm nor helm-python-sdk is there")
        rendered = helm.Chart.load(str(CHART)).render(values, name="demo", namespace="default")
        texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


@pytest.mark.parametrize("values", RENDERED)
def test_what_the_chart_renders_can_be_served(values: Mapping[str, Any], tmp_path: Path) -> None:
    found = {one["kind"]: one for one in render(values, tmp_path)}
    pod = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = parsed(container["args"])
    assert given.keys == values.get("models", VALUES["models"])
    assert pod["terminationGracePeriodSeconds"] > given.drain_s + FLUSH_S
    probe = container["startupProbe"]
    assert found["Deployment"]["spec"]["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]
    assert found["Deployment"]["spec"].get("strategy", {}) == values.get("strategy", {})
    gpus = values.get("gpus", 0)
    assert container["resources"].get("limits", {}).get("nvidia.com/gpu", 0) == gpus
    for file in given.config:
        assert str(file).startswith("/etc/mstar/")
        merge_deployment("smollm2", yaml.safe_load(found["ConfigMap"]["data"][file.name]))
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    (port,) = found["Service"]["spec"]["ports"]
    assert port["targetPort"] in {one["name"] for one in container["ports"]}
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert found["Service"]["spec"]["selector"].items() <= labels
    assert found["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels
    wanted = {"Deployment", "Service"}
    wanted |= {"ConfigMap"} if values.get("deployments") else set()
    wanted |= {"Secret"} if values.get("apiKey") else set()
    wanted |= {"HorizontalPodAutoscaler"} if values.get("autoscaling") else set()
    wanted |= set() if values.get("cache") else {"PersistentVolumeClaim"}
    wanted |= set() if values.get("podDisruptionBudget") else {"PodDisruptionBudget"}
    assert set(found) == wanted
    for metric in ("mstar_worker_requests_waiting",):
        assert metric in CATALOG


def test_what_the_page_gives_the_chart_can_be_served() -> None:
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    files = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    assert len(files) > 1
    for values in files:
        assert values.keys() <= VALUES.keys()
        assert values["deployments"].keys() <= {*values["models"]}
        ranks = 0
        for key, file in values["deployments"].items():
            deployment = merge_deployment(key, file)
            ranks += ranks_of(deployment.placement) * deployment.replicas
        assert values.get("gpus", 0) in (0, ranks)
        if ranks > 1:
            assert values["gpus"] == ranks


# --- KubeRay -------------------------------------------------------------------------------------------------------


def test_the_ray_service_starts_what_is_in_the_image() -> None:
    service, claim = yaml.safe_load_all((DEPLOY / "kuberay/rayservice.yaml").read_text(encoding="utf-8"))
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    module, _, function = application["import_path"].partition(":")
    source = ROOT / "examples" / f"{module}.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for file in DOCKERFILES:
        assert re.search(
            rf"^COPY examples/{module}.py (\S+)/{module}.py$", file.read_text(encoding="utf-8"), re.MULTILINE
        )
    (arguments,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Arguments")
    fields = {
        node.target.id
        for node in arguments.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert application["args"].keys() <= fields
    assert service["spec"].keys() == {
        "serveConfigV2",
        "rayClusterConfig",
    }  # what else there is, KubeRay ignores
    cluster = service["spec"]["rayClusterConfig"]
    for file in DOCKERFILES:
        assert re.search(rf"^ARG RAY={re.escape(cluster['rayVersion'])}$", file.read_text("utf-8"), re.MULTILINE)
    (workers,) = cluster["workerGroupSpecs"]
    spec = workers["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["terminationGracePeriodSeconds"] > application["args"]["drain_s"] + FLUSH_S
    assert {v["name"] for v in spec["volumes"]} == {m["name"] for m in container["volumeMounts"]}
    assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert float(container["resources"]["requests"]["cpu"]) >= application["args"]["cpus"]
    ports = {
        port["name"]: port["containerPort"]
        for port in cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]
    }
    assert ports["serve"] == config["http_options"]["port"]
