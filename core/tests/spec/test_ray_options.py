"""The section ``ray`` of a deployment: what is refused, and where it is told. No Ray is needed for it."""

from __future__ import annotations

from typing import Any

import pytest

from mstar.spec.deployment import merge_deployment
from mstar.spec.errors import DeploymentError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"address": "ray://head:10001"}, r"ray.address.*HOST:PORT of the head \(6379\)"),
        ({"address": "head"}, "ray.address.*use auto, or HOST:PORT"),
        ({"adress": "auto"}, "ray.adress.*did you mean 'address'"),
        ({"strategy": "PACKED"}, "ray.strategy.*'PACK'"),
        ({"gpus": 2}, "ray.gpus.*less than or equal to 1"),
        ({"cpus": 0}, "ray.cpus.*greater than 0"),
        ({"resources": {"disk": 0}}, "ray.resources.disk.*greater than 0"),
        ({"max_restarts": -2}, "ray.max_restarts"),
    ],
)
def test_what_is_wrong_with_it_is_told(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DeploymentError, match=f"(?s){said}"):
        merge_deployment("any", {"executor": "ray", "ray": options})
