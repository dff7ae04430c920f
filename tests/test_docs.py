"""What the documentation shows is so: files exist, links lead somewhere, examples work."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from mstar.nn.model import Model, Run
from mstar.nn.node import Step
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.scaffold.names import Names
from mstar.scaffold.write import write_package
from mstar.settings import Settings
from mstar.spec import resources
from mstar.spec.check import check_graph
from mstar.spec.deployment import merge_deployment
from mstar.spec.resources import PagedKV, Sampler
from mstar.testing import Example
from mstar.testing.drive import Driver

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("plugins/*/README.md")]
)
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
BASES = [ROOT, ROOT / "core/src/mstar", ROOT / "core/src", ROOT / "server/src", *ROOT.glob("plugins/*/src")]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


@PAGE
def test_every_file_that_is_named_exists(page: Path, tmp_path: Path) -> None:
    bases = [*BASES, page.parent]
    if page.name == "write-a-family.md":  # it is about the reader's package, and makes one more file there
        bases += package_of_the_tutorial(tmp_path)
    named = re.findall(r"`([\w./-]+\.(?:py|md|toml))`", page.read_text(encoding="utf-8"))
    missing = [name for name in named if not any((base / name).is_file() for base in bases)]
    assert missing == []


def package_of_the_tutorial(folder: Path) -> list[Path]:
    names = Names("mstar-translator", "mstar_translator", "translator", "translator", "Translator")
    write_package(folder / "package", names, "encoder-decoder")
    (folder / "package" / "ask.py").touch()
    return [folder / "package", folder / "package" / "src" / "mstar_translator"]


@PAGE
def test_every_link_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert missing == []


def test_the_index_links_every_page() -> None:
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")} - {"README.md"}
    assert len(pages) > 10
    assert [page for page in sorted(pages) if f"]({page})" not in text] == []


def test_the_architecture_page_names_every_folder_of_the_core() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (ROOT / "core/src/mstar").glob("*/__init__.py")}
    assert len(folders) > 10
    assert [folder for folder in sorted(folders) if f"`{folder}/" not in text] == []


def test_the_architecture_page_says_where_every_file_is() -> None:
    """By its path, or by a folder of files that are told together. ``plugin.py`` is the same in every plugin."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/.]+)`", text))
    told = {name.rstrip("/") for name in named if name.count("/") and not name.endswith(".py")}
    sources = [ROOT / "core/src/mstar", ROOT / "server/src", *(ROOT / "plugins").glob("*/src")]
    unnamed = [
        name
        for source in sources
        for path in source.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py", "plugin.py")
        if (name := path.relative_to(source).as_posix()) not in named
        if not any(name.startswith(f"{folder}/") for folder in told)
    ]
    assert unnamed == [], "give them a row in docs/architecture.md"


def test_the_graph_of_the_concepts_page_is_sound() -> None:
    (source,) = [block for block in blocks("docs/concepts.md", "python") if "Graph(" in block]
    names: dict[str, Any] = {}
    exec(compile(source, "docs/concepts.md", "exec"), names)
    check_graph("the example", names["graph"], {"kv": PagedKV(), "sampler": Sampler(vocab=8)})


def test_the_route_of_the_concepts_page_is_one() -> None:
    (source,) = [block for block in blocks("docs/concepts.md", "python") if "def route" in block]
    names: dict[str, Any] = {"Run": Run, "Model": Model}
    exec(compile(source, "docs/concepts.md", "exec"), names)
    route = names["route"](None, "talk", None)
    assert next(route) == Run("answer", signals=("wants_image",))


def test_the_deployment_file_of_the_quickstart_is_valid() -> None:
    (text,) = blocks("docs/quickstart.md", "yaml")
    deployment = merge_deployment("smollm2", yaml.safe_load(text))
    assert deployment.resources["kv"] == {"tokens": 16384}


def test_the_deployment_files_of_the_ray_and_deploy_pages_are_valid() -> None:
    (text,) = blocks("docs/ray.md", "yaml")
    deployment = merge_deployment("whisper_base", yaml.safe_load(text))
    assert (deployment.executor, deployment.ray.cpus, deployment.replicas) == ("ray", 4, 2)
    (text,) = blocks("docs/deploy.md", "yaml")
    values = yaml.safe_load(text)
    assert values.keys() <= yaml.safe_load((ROOT / "deploy/helm/mstar/values.yaml").read_text(encoding="utf-8")).keys()
    for model, keys in values["deployments"].items():
        assert model in values["models"]
        merge_deployment(model, keys)


def test_the_sizing_page_multiplies_right() -> None:
    text = (ROOT / "docs/sizing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([\d,]+) \|$", text, re.MULTILINE)
    assert len(rows) >= 5
    for layers, heads, size, number, told in rows:
        assert int(layers) * int(heads) * int(size) * 2 * int(number) == int(told.replace(",", ""))


def test_the_model_of_the_nodes_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = blocks("docs/nodes.md", "python")
    (tmp_path / "nodes_page.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry(load_plugins(Settings(extra_plugins=("nodes_page",))))
    driver = Driver("fader", registry, device="cpu", dtype="float32")
    asked = {"a": Example("AC", {"times": 3}), "b": Example("d", {"times": 2, "gain": 0.25})}
    for request, example in asked.items():
        driver.submit(request, example)
    driver.run()
    assert driver.result("a")["numbers"].tolist() == [33.0, 16.5, 8.25]
    assert driver.result("b")["numbers"].tolist() == [25.0, 6.25]
    driver.assert_empty()


def test_every_view_and_fact_of_a_step_is_on_the_nodes_page() -> None:
    text = (ROOT / "docs/nodes.md").read_text(encoding="utf-8")
    kinds = [name for name in resources.__all__ if name != "ResourceSpec"]
    assert [name for name in kinds if f"| `{name}` |" not in text] == []
    assert [f.name for f in fields(Step) if f"`step.{f.name}`" not in text and f.name not in ("views", "entry")] == []


def test_every_promise_that_is_cited_is_listed() -> None:
    listed = set(
        re.findall(r"^\| (P\d+) \|", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "core/src").rglob("*.py")]
    cited = {
        name for text in sources for place in re.findall(r"promises? ([P\d, ]+)", text) for name in place.split(", ")
    }
    assert {"P2", "P7"} <= {name.strip() for name in cited} <= listed
    assert not any("design §" in text for text in sources)
