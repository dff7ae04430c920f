"""The executor ``ray`` on a cluster of two nodes, which these tests start, break and end."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

import mstar
from mstar.plugins import load_plugins
from mstar.registry import Registry
from mstar.settings import Settings
from mstar.spec.errors import RequestError, SetupError

from .tiny_models import publish

if sys.platform != "linux":
    pytest.skip("Ray's clusters of several nodes on one machine are for Linux", allow_module_level=True)

import ray
from ray.cluster_utils import Cluster

from mstar.cluster.base import WorkerConfig
from mstar.cluster.ray.actor import Where
from mstar.cluster.ray.group import Group
from mstar.cluster.ray.remote import RemoteWorker
from mstar.spec.deployment import merge_deployment

ROOT = Path(__file__).parent.parent
STORE = 80 << 20
KNOBS: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


class Nodes:
    """The cluster: a head and another node, each with two CPUs. Nobody here is connected to it."""

    def __init__(self) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args={**self._size, "include_dashboard": False})
        self.address: str = self._cluster.address
        self.other: Any = self._cluster.add_node(**self._size)

    @property
    def _size(self) -> dict[str, Any]:
        return {"num_cpus": 2, "object_store_memory": STORE}

    def lose(self) -> None:
        """The other node is gone, with all its processes."""
        self._cluster.remove_node(self.other, allow_graceful=False)

    def replace(self) -> None:
        self.other = self._cluster.add_node(**self._size)

    def end(self) -> None:
        self._cluster.shutdown()

    def assert_free(self) -> None:
        """No actor and no placement group is left: all CPUs are free."""
        with joined(self.address):
            all_cpus = 2.0 * sum(node["Alive"] for node in ray.nodes())
            until(lambda: ray.available_resources().get("CPU") == all_cpus, ray.available_resources)
            assert {group["state"] for group in ray.util.placement_group_table().values()} <= {"REMOVED"}


class joined:
    """A connection of the test's own."""

    def __init__(self, address: str):
        self._address = address

    def __enter__(self) -> None:
        ray.init(self._address, logging_level="error", log_to_driver=False)

    def __exit__(self, *error: object) -> None:
        ray.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    before = {process.pid for process in psutil.process_iter()}
    told = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]),
        # a lost node is noticed after a second, and not after half a minute
        "RAY_health_check_period_ms": "300",
        "RAY_health_check_failure_threshold": "3",
        "RAY_USAGE_STATS_ENABLED": "0",
        "MSTAR_EXTRA_PLUGINS": "tests.tiny_models",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        cluster = Nodes()
        try:
            yield cluster
        finally:
            cluster.end()
    left = [p.info["cmdline"] for p in psutil.process_iter(["pid", "cmdline"]) if p.pid not in before]
    assert [words for words in left if words and any("ray" in Path(word).name for word in words[:2])] == []


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    publish("tiny-llama", folder)
    return str(folder)


def load(weights: str, executor: str = "ray", **deployment: Any) -> mstar.Local:
    settings = Settings(plugins=(), extra_plugins=("tests.tiny_models",))
    registry = Registry(load_plugins(settings))
    return mstar.load(
        "tiny-llama", weights=weights, executor=executor, settings=settings, registry=registry, **deployment
    )


PROMPTS = ("hello there", "a b c", "what?")


@pytest.fixture(scope="module")
def expected(weights: str) -> list[str]:
    with load(weights, "processes") as model:
        return [model.chat(prompt, **KNOBS) for prompt in PROMPTS]


def started(model: mstar.Local) -> Any:
    return model._service._executor


def dies(pieces: Iterator[str]) -> str:
    """The reason that an answer in the making ends with, which is that its worker has died."""
    with pytest.raises(RequestError) as raised:
        list(pieces)
    assert (raised.value.code, raised.value.status) == ("worker_died", 503)
    return str(raised.value)


def test_two_nodes_answer_as_one_process_does(
    nodes: Nodes, weights: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, meet = Group.where, []

    async def elsewhere(group: Group, rank: int, folder: str) -> Any:
        """As if the executor were on a third machine: no shared memory, encrypted TCP."""
        meet.append(rank)
        return msgspec.structs.replace(await where(group, rank, folder), sees=False)

    monkeypatch.setattr(Group, "where", elsewhere)
    options = {"address": nodes.address, "strategy": "STRICT_SPREAD"}
    placement = {"llm": {"ranks": [0, 1], "tp": 2}}
    with load(weights, ray=options, placement=placement) as model:
        executor = started(model)
        assert len(set(executor._nodes.values())) == 2
        assert [model.chat(prompt, **KNOBS) for prompt in PROMPTS] == expected
        assert [rank["rank"] for rank in model.status()["ranks"]] == [1]
    assert {*meet} == {0, 1}
    assert not ray.is_initialized()  # it was the model's connection
    nodes.assert_free()


def test_state_moves_between_nodes_by_lanes(nodes: Nodes, weights: str, expected: list[str]) -> None:
    options = {"address": nodes.address, "strategy": "STRICT_SPREAD"}
    placement = {"llm": {"prefill": 1, "decode": 0}}
    with load(weights, ray=options, placement=placement, engine={"values": "gloo"}) as model:
        assert len(set(started(model)._nodes.values())) == 2
        until(lambda: [rank["way"] for rank in model.status()["ranks"]] == ["gloo"], model.status)
        assert [model.chat(prompt, **KNOBS) for prompt in PROMPTS] == expected
        model.chat("a long prompt, whose keys and values are no small tensor, " * 4, **KNOBS)
        (rank,) = model.status()["ranks"]
        assert rank["lane_bytes"]["received"] > 8192
        assert model.status()["moves"]["done"] == len(PROMPTS) + 1
    nodes.assert_free()


def until(holds: Callable[[], bool], what: Callable[[], Any]) -> None:
    """Wait until *holds()*. *what*: told when it does not in time."""
    deadline = time.monotonic() + 150
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def all_ready(model: mstar.Local) -> None:
    until(lambda: (model.phase.name, model.phase.detail) == ("ready", ""), lambda: model.phase)


@pytest.fixture(scope="class")
def pair(nodes: Nodes, weights: str) -> Iterator[mstar.Local]:
    """A copy on each node."""
    with load(weights, ray={"address": nodes.address, "cpus": 2}, replicas=2, engine={"threads": 1}) as model:
        yield model
    nodes.assert_free()


def one_on_each(model: mstar.Local) -> tuple[list[Any], list[Iterator[str]]]:
    """The copies' executors, and a long answer of each, begun."""
    copies = [copy.executor for copy in started(model)._copies]
    running = [model.chat(prompt, stream=True, **{**KNOBS, "max_tokens": 200}) for prompt in PROMPTS[:2]]
    for pieces in running:
        next(pieces)
    return copies, running


class TestCopies:
    def test_a_killed_actor_is_started_again(self, pair: mstar.Local, expected: list[str]) -> None:
        copies, running = one_on_each(pair)
        old = copies[0].pid
        os.kill(old, signal.SIGSTOP)  # it gets no further
        os.kill(old, signal.SIGKILL)
        assert "is gone: the process was killed" in dies(running[0])
        assert "".join(running[1])
        all_ready(pair)
        assert copies[0].pid != old
        assert [pair.chat(prompt, **KNOBS) for prompt in PROMPTS] == expected

    def test_a_lost_node_takes_its_requests_with_it_and_no_others(
        self, nodes: Nodes, pair: mstar.Local, expected: list[str]
    ) -> None:
        copies, running = one_on_each(pair)
        before = [copy.node for copy in copies]
        lost = before.index(nodes.other.node_id)
        stopped = copies[lost].pid
        os.kill(stopped, signal.SIGSTOP)
        nodes.lose()
        assert "is gone" in dies(running[lost])
        until(lambda: not psutil.pid_exists(stopped), lambda: psutil.Process(stopped).status())  # stopped as it was
        assert "".join(running[1 - lost])
        assert [pair.chat(prompt, **KNOBS) for prompt in PROMPTS] == expected  # on the node that is left
        nodes.replace()
        all_ready(pair)
        assert copies[lost].node == nodes.other.node_id
        assert copies[1 - lost].node == before[1 - lost]
        assert [pair.chat(prompt, **KNOBS) for prompt in PROMPTS] == expected


def test_the_server_of_the_command_line_drains(nodes: Nodes, weights: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    words = ["serve", "tiny-llama", "--executor", "ray", "--weights", weights, "--port", url[17:]]
    server = subprocess.Popen(
        [sys.executable, "-c", "import sys; from mstar.cli.app import main; sys.exit(main())", *words],
        env={**os.environ, "RAY_ADDRESS": nodes.address},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: answers(url), server.poll)
        body = {"model": "tiny-llama", "messages": [{"role": "user", "content": "on"}], **KNOBS, "max_tokens": 200}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            assert "data: [DONE]" in list(lines)
        _, said = server.communicate(timeout=60)
        assert server.returncode == 0, said
        assert "SIGTERM received" not in said  # by Ray, which aborts three seconds after that
    finally:
        server.kill()
        server.communicate()
    nodes.assert_free()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_what_cannot_be_placed_is_told_and_leaves_nothing(nodes: Nodes, weights: str) -> None:
    options = {"address": nodes.address, "resources": {"fast_disk": 1}, "placement_timeout_s": 1}
    with pytest.raises(SetupError, match=r"could not place 1 rank with CPU 1, fast_disk 1 each .* free .*CPU 4"):
        load(weights, ray=options)
    nodes.assert_free()


def test_replicas_of_ray_serve_are_whole_servers(
    nodes: Nodes, weights: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from ray import serve

    build: Any = importlib.import_module("ray_serve")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with joined(nodes.address):
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
            serve.run(build.build({"model": "tiny-llama", "weights": weights, "max_replicas": "2"}))
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                assert http.get("/health/ready").status_code == 200
                body = {"model": "tiny-llama", "messages": [{"role": "user", "content": PROMPTS[0]}], **KNOBS}
                answer = http.post("/v1/chat/completions", json=body).json()
                assert answer["choices"][0]["message"]["content"] == expected[0]
                streamed = http.post("/v1/chat/completions", json={**body, "stream": True}).text
                assert streamed.count("data: ") > 10
                refused = http.post("/v1/chat/completions", json={**body, "temperature": -1})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
        finally:
            serve.shutdown()
    nodes.assert_free()


@pytest.mark.parametrize("page", ["docs/ray.md", "examples/ray_serve.py"])
def test_serve_finds_the_example_where_its_commands_say(page: str) -> None:
    from ray.serve.scripts import run

    line = next(line for line in (ROOT / page).read_text().splitlines() if line.strip().startswith("serve run"))
    given = run.make_context("run", line.split()[2:]).params
    module = given["config_or_import_path"].partition(":")[0] + ".py"
    assert (ROOT / given["app_dir"] / module).exists()  # for the command itself
    assert (ROOT / given["working_dir"] / module).exists()  # for the replicas
    assert given["arguments"][0] == "model=smollm2"


async def test_a_node_with_another_version_is_refused() -> None:
    class Elsewhere:
        async def where(self, rank: int, folder: str) -> Where:
            return Where(pid=1, version="0.0.0", node="n", host="10.0.0.9", sees=False)

        async def age(self, rank: int) -> float:
            return 0.0

    said: list[Any] = []
    group: Any = Elsewhere()
    deployment = merge_deployment("tiny-llama", {"executor": "ray"})
    config = WorkerConfig(key="tiny-llama", weights=None, deployment=deployment)
    worker = RemoteWorker(group, config, ("no:worker", "no:registry"), 1.0, said.extend, None)
    await worker.exited.wait()
    assert (said[-1].setup, said[-1].message.startswith("rank 0: there is M* 0.0.0 on 10.0.0.9")) == (True, True)
    assert await worker.reap(0.0) == said[-1].message.removeprefix("rank 0: ")
    await worker.stop(0.0)


def test_a_cluster_that_is_not_there_is_told(weights: str) -> None:
    with pytest.raises(SetupError, match=r"no Ray cluster can be joined at '127.0.0.1:1' .*ray start --head"):
        load(weights, ray={"address": "127.0.0.1:1"})


def test_without_ray_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from mstar.plugins import load_plugins; from mstar.registry import Registry\n"
        "from mstar.settings import Settings\n"
        "Registry(load_plugins(Settings(plugins=()))).executor('ray')"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'mstar-core[ray]'" in said.stderr
