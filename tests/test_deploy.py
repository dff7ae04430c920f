"""What ``deploy/`` queries is there: names and labels are those of the catalog of metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from mstar_server.observe.catalog import CATALOG

DEPLOY = Path(__file__).parent.parent / "deploy"
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
SERIES = {name + suffix: metric for name, metric in CATALOG.items() for suffix in _SUFFIXES[metric.kind]}


def dashboard() -> list[str]:
    board = json.loads((DEPLOY / "grafana" / "mstar.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return queries + [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]


def alerts() -> list[str]:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    return [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


QUERIES = dashboard() + alerts()


@pytest.mark.parametrize("query", QUERIES)
def test_queries_name_metrics_and_labels_that_exist(query: str) -> None:
    found = re.findall(r"\b(mstar_\w+)(?:\{([^}]*)\})?", query)
    assert found
    labels = {"le"}
    for name, matchers in found:
        assert name in SERIES, name
        labels |= set(SERIES[name].labels)
        for label in re.findall(r"(\w+)\s*[=!]", matchers):
            assert label in SERIES[name].labels, (name, label)
    for names in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
        assert {label.strip() for label in names.split(",")} <= labels


def test_all_of_the_dashboard_is_shown_by_model_or_says_why_not() -> None:
    for query in dashboard():
        assert "model" in query or "mstar_http" in query, query
