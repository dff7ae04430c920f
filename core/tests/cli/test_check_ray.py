"""``mstar check`` of what Ray is to run."""

from __future__ import annotations

from pathlib import Path

from checks import Run, deployment, facts


def test_faults_of_the_section_are_told_with_their_places(mstar: Run, tmp_path: Path) -> None:
    file = deployment(tmp_path, "executor: ray\nray: {address: 'ray://head:10001', cpu: 2}\ndevice: cpu\n")
    found = {
        fault["key"]: fault
        for fault in facts(mstar, "mini_chat", "--config", file, extra="mstar.testing.miniatures")["faults"]
    }
    assert "did you mean 'cpus'" in found["ray.cpu"]["message"]
    assert "HOST:PORT of the head" in found["ray.address"]["message"]


def test_ray_chooses_the_gpu(mstar: Run, tmp_path: Path) -> None:
    file = deployment(tmp_path, "executor: ray\ndevice: cuda:1\n")
    found = {
        fault["key"]: fault["message"]
        for fault in facts(mstar, "mini_chat", "--config", file, extra="mstar.testing.miniatures")["faults"]
    }
    assert "Ray chooses the GPU of each rank; use 'cuda'" in found["device"]
