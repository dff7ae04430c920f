"""``mstar check``: every fault at once, without weights or a device, and the numbers when all is well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checks import Run, deployment, facts

from mstar.cluster.base import WorkerConfig
from mstar.patterns.causal_lm import CausalLM
from mstar.spec.deployment import merge_deployment
from mstar.spec.errors import DeploymentError
from mstar.testing.drive import miniature_registry
from mstar.testing.miniatures import MINIATURES
from mstar.worker import machine
from mstar.worker.core import Worker

MINI = {"MSTAR_EXTRA_PLUGINS": "mstar.testing.miniatures"}


def test_a_sound_model(llama: Run, tmp_path: Path) -> None:
    found = facts(llama, "toy-llama", "--weights", str(tmp_path / "llama"))
    assert found["faults"] == []
    (node,) = found["nodes"]
    hidden, kv, mlp = 32, 2 * 8, 64
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * mlp + 2 * hidden
    assert node["parameters"] == 104 * hidden + 2 * layer + hidden, "the head is tied; of 100 tokens, in eights"
    kv_pool = next(pool for pool in found["pools"] if pool["name"] == "kv")
    tokens = 1024 + 16  # and the page of padding rows
    assert kv_pool["bytes"] == tokens * 2 * 2 * kv * 4, "tokens x layers x (K, V) x width x 4 bytes"
    assert (kv_pool["units"], kv_pool["owners"], kv_pool["full_requests"]) == (1024 // 16, 32, 1024 // 256)
    status, out, _ = llama("check", "toy-llama", "--weights", str(tmp_path / "llama"))
    assert status == 0
    assert "kv holds 4 of the greatest length" in out
    assert "ok: weights and pools take" in out


def test_every_fault_of_a_file_is_listed_with_the_nearest_right_name(llama: Run, tmp_path: Path) -> None:
    text = """
model: toy-llama
max_concurent_requests: 3
max_sessions: -1
executor: proceses
scheduler: {policy: defualt}
engine: {runner: eagr}
placement: {lm: [0], llm: {ranks: [0], pt: 2}}
resources:
  kv: {tokns: 4, page_size: big}
  samplr: {vocab: 2}
"""
    found = facts(llama, deployment(tmp_path, text), "--weights", str(tmp_path / "llama"))
    faults = {fault["key"]: fault for fault in found["faults"]}
    hints = {
        "max_concurent_requests": "did you mean 'max_concurrent_requests'",
        "max_sessions": "greater than or equal to 0 (got -1)",
        "executor": "did you mean 'processes'",
        "scheduler.policy": "did you mean 'default'",
        "engine.runner": "did you mean 'eager'",
        "placement.lm": "did you mean 'llm'",
        "placement.llm.pt": "known: ranks, sp, split, tp",
        "resources.kv.tokns": "did you mean 'tokens'",
        "resources.kv.page_size": "valid integer",
        "resources.samplr": "did you mean 'sampler'",
    }
    assert faults.keys() == hints.keys()
    for key, hint in hints.items():
        assert hint in faults[key]["message"]
        assert faults[key]["file"].endswith("deployment.yaml")


def test_a_pool_that_cannot_hold_one_request_is_refused_with_the_numbers(llama: Run, tmp_path: Path) -> None:
    file = deployment(tmp_path, "resources: {kv: {tokens: 64}}\n")
    found = facts(llama, "toy-llama", "--config", file, "--weights", str(tmp_path / "llama"))
    (fault,) = found["faults"]
    assert fault["key"] == "resources.kv"
    assert "one context of max_tokens=256 needs 16 pages" in fault["message"]


@pytest.mark.parametrize("key", ["tokens", "max_tokens"])
def test_room_for_no_media_is_refused(mstar: Run, tmp_path: Path, key: str) -> None:
    file = deployment(tmp_path, f"resources: {{media: {{{key}: 0}}}}\n")
    (fault,) = facts(mstar, "mini_look", "--config", file, **MINI)["faults"]
    assert (fault["file"], fault["line"], fault["key"]) == (file, 1, "resources.media")
    assert f"with {key}=0 no request could bring any media" in fault["message"]


def test_what_a_start_reserves_for_graphs_is_not_free(
    llama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "reserved_bytes", lambda deployment, device: 10**18)
    (fault,) = facts(llama, "toy-llama", "--weights", str(tmp_path / "llama"))["faults"]
    assert "graphs and workspace" in fault["message"]


def test_plugins_that_the_file_requires_and_that_are_not_there(llama: Run, tmp_path: Path) -> None:
    file = deployment(tmp_path, "model: toy-llama\nrequired_plugins: [mstar-nowhere>=2]\n")
    found = facts(llama, file, "--weights", str(tmp_path / "llama"))
    (fault,) = found["faults"]
    assert fault["key"] == "required_plugins"
    assert "mstar-nowhere" in fault["message"]


def test_a_gpu_that_is_not_here_does_not_matter(llama: Run, tmp_path: Path) -> None:
    file = deployment(tmp_path, "device: cuda\ndtype: bfloat16\n")
    found = facts(llama, "toy-llama", "--config", file, "--weights", str(tmp_path / "llama"))
    assert (found["ok"], found["device"], found["dtype"]) == (True, "cuda", "bfloat16")
    here = facts(llama, "toy-llama", "--weights", str(tmp_path / "llama"))
    halves = [pool["bytes"] for pool in found["pools"] if pool["name"] == "kv"]
    assert halves == [pool["bytes"] // 2 for pool in here["pools"] if pool["name"] == "kv"]


def test_without_the_models_configuration_it_says_what_fetches_it(llama: Run) -> None:
    found = facts(llama, "toy-llama")
    (fault,) = found["faults"]
    assert "`mstar download toy-llama` fetches them" in fault["message"]
    assert "--weights DIR" in fault["message"]


def test_classes_that_are_not_there(mstar: Run) -> None:
    found = facts(mstar, "toy-chat")
    assert [(fault["key"], fault["file"]) for fault in found["faults"]] == [
        ("model", "spec of 'toy-chat'"),
        ("processor", "spec of 'toy-chat'"),
    ]
    assert all("No module named 'toys'" in fault["message"] for fault in found["faults"])


FAULTY = """
from dataclasses import replace
import mstar
from mstar.testing.miniatures import MINIATURES
from mstar.testing.miniatures.text import Chat
from mstar.spec.graph import Call

class Faulty(Chat):
    def graph(self):
        graph = super().graph()
        node = graph.nodes[0]
        entry = replace(node.entries[0], name="forwrd", resources=("kvv",))
        return replace(graph, nodes=(replace(node, entries=(entry,)),), walks={**graph.walks, "spare": Call("lmm")})

@mstar.hookimpl
def mstar_models():
    mini = next(m.spec for m in MINIATURES if m.model.endswith("text:Chat"))
    return [replace(mini, key="faulty", model="cli_toys_faulty:Faulty")]
"""


def test_faults_of_a_graph(mstar: Run) -> None:
    status, out, err = mstar("check", "faulty", extra="cli_toys_faulty", code=FAULTY)
    assert status == 1
    assert "unknown resource 'kvv'" in err
    assert "walk 'spare' belongs to no partition" in err
    assert "call of 'lmm': unknown node; did you mean 'lm'?" in err
    assert "has no method for entry 'forwrd'; did you mean 'forward'?" in err
    assert "ok:" not in out


BROKEN = """
from dataclasses import replace
import mstar
from mstar.testing.miniatures import MINIATURES
from mstar.testing.miniatures.common import MiniProcessor
from mstar.testing.miniatures.text import Chat

class Processor(MiniProcessor):
    def __init__(self, context):
        super().__init__(context)
        self.table = load(context)

def load(context):
    return {}["vocabulary"]

class Model(Chat):
    def graph(self):
        return super().graph().no_such_field

def tiny(folder):
    (folder / "vocabulary.txt").write_text("a")

class Reader(MiniProcessor):
    def __init__(self, context):
        super().__init__(context)
        assert (context.weights / "vocabulary.txt").read_text() == "b"

@mstar.hookimpl
def mstar_models():
    mini = next(m.spec for m in MINIATURES if m.model.endswith("text:Chat"))
    return [
        replace(mini, key="bad-processor", processor=__name__ + ":Processor"),
        replace(mini, key="bad-model", model=__name__ + ":Model"),
        replace(mini, key="tiny-reader", processor=__name__ + ":Reader", tiny=__name__ + ":tiny"),
        replace(mini, key="bad-tiny", tiny=__name__ + ":no_tiny"),
    ]
"""


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(BROKEN.splitlines(), 1) if text in line)


@pytest.fixture
def broken(mstar: Run) -> Run:
    return lambda *words, **more: mstar(*words, extra="cli_toys_fragile", code=BROKEN, **more)


@pytest.mark.parametrize(
    ("key", "place", "message"),
    [
        ("bad-processor", "cli_toys_fragile:Processor", "KeyError: 'vocabulary' (at {file}:" + str(line_of("{}["))),
        ("bad-model", "cli_toys_fragile:Model", "'Graph' object has no attribute 'no_such_field' (at {file}:"),
        ("tiny-reader", "cli_toys_fragile:Reader", "AssertionError (at {file}:" + str(line_of("assert (context"))),
        ("bad-tiny", "cli_toys_fragile:no_tiny", "no 'no_tiny' there"),
    ],
)
def test_what_a_familys_own_code_raises_has_its_file_and_line(
    broken: Run, tmp_path: Path, key: str, place: str, message: str
) -> None:
    found = facts(broken, key)
    (fault,) = found["faults"]
    assert fault["file"] == place
    assert message.format(file=tmp_path / "cli_toys_fragile.py") in fault["message"]
    _, out, err = broken("check", key)
    assert "Traceback" not in out + err


def test_a_hook_that_raises_has_its_line_too(mstar: Run, tmp_path: Path) -> None:
    code = "import mstar\n@mstar.hookimpl\ndef mstar_models():\n    return [][0]\n"
    status, _, err = mstar("check", "cli_toys_hooks", extra="cli_toys_hooks", code=code)
    assert status == 1
    assert f"mstar_models failed: IndexError: list index out of range (at {tmp_path / 'cli_toys_hooks.py'}:4)" in err


def test_a_file_that_is_not_yaml_is_a_fault_found(llama: Run, tmp_path: Path) -> None:
    status, _, err = llama("check", deployment(tmp_path, "model: [\n"))
    assert (status, "is not valid YAML" in err) == (1, True)


@pytest.mark.parametrize("command", ["check", "graph"])
def test_what_a_models_code_prints_is_not_in_the_answer(
    llama: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    class Loud(CausalLM):
        def __init__(self, *arguments: Any, **named: Any):
            print("loud")
            super().__init__(*arguments, **named)

    monkeypatch.setattr("mstar.patterns.causal_lm.CausalLM", Loud)
    status, out, err = llama(command, "toy-llama", "--weights", str(tmp_path / "llama"), "--json")
    assert status == 0
    assert json.loads(out)["key"] == "toy-llama"
    assert "loud\n" in err


def test_the_traceback_is_shown_on_request(broken: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        broken("check", "bad-processor", MSTAR_LOG_LEVEL="debug")
    assert "in load" in caplog.text


def test_a_processor_that_needs_more_than_the_configuration_is_a_remark(llama: Run, tmp_path: Path) -> None:
    found = facts(llama, "toy-llama", "--weights", str(tmp_path / "llama"))
    assert (found["ok"], found["complete"]) == (True, True)
    (remark,) = found["remarks"]
    assert f"it needs more than is in {tmp_path / 'llama'}" in remark
    assert remark in llama("check", "toy-llama", "--weights", str(tmp_path / "llama"))[2]


def test_with_the_weights_a_processor_that_cannot_read_them_is_a_fault(llama: Run, tmp_path: Path) -> None:
    (tmp_path / "llama" / "model.safetensors").touch()
    found = facts(llama, "toy-llama", "--weights", str(tmp_path / "llama"))
    (fault,) = found["faults"]
    assert fault["file"] == "mstar.processing.chat:TextProcessor"
    assert found["remarks"] == []


def test_weights_that_are_needed_and_not_here_are_said_once(llama: Run) -> None:
    found = facts(llama, "toy-llama")
    (remark,) = found["remarks"]
    assert "not on this machine" in remark


@pytest.mark.parametrize("text", ["dtype: float23\n", "device: gpu\n"])
def test_a_device_or_dtype_that_is_none_is_left_out(llama: Run, tmp_path: Path, text: str) -> None:
    file = deployment(tmp_path, f"model: toy-llama\n{text}resources: {{kv: {{tokens: 64}}}}\n")
    found = facts(llama, file, "--weights", str(tmp_path / "llama"))
    assert [(fault["key"], fault["line"]) for fault in found["faults"]] == [
        (text.partition(":")[0], 2),
        ("resources.kv", 3),
    ]
    assert (found["complete"], found["device"], found["dtype"]) == (True, "cpu", "float32")


def test_faults_that_stop_further_checks_say_so(llama: Run, tmp_path: Path) -> None:
    found = facts(llama, "toy-llama")
    assert not found["complete"]
    _, out, err = llama("check", "toy-llama")
    assert "None" not in out + err
    assert err.endswith("Further checks follow once these are mended.\n")


def test_faults_that_stop_nothing_do_not(llama: Run, tmp_path: Path) -> None:
    words = (deployment(tmp_path, "model: toy-llama\n\nmax_sesions: 1\n"), "--weights", str(tmp_path / "llama"))
    assert facts(llama, *words)["complete"]
    err = llama("check", *words)[2]
    assert "deployment.yaml:3: max_sesions: unknown key; did you mean 'max_sessions'?" in err
    assert "Further checks" not in err


def test_lines_of_nested_keys(llama: Run, tmp_path: Path) -> None:
    text = "model: toy-llama\nresources:\n  sampler: {}\n  kv:\n    page_size: 16\n    tokns: 4\n"
    found = facts(llama, deployment(tmp_path, text), "--weights", str(tmp_path / "llama"))
    assert [(fault["key"], fault["line"]) for fault in found["faults"]] == [("resources.kv.tokns", 6)]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("knobs: {temperature: 0}", "did you mean 'model_kwargs'?"),
        ("temperature: 0", "this is a parameter of requests; options of the model stand under 'model_kwargs:'"),
    ],
)
def test_knobs_at_the_top_of_a_file(llama: Run, tmp_path: Path, text: str, hint: str) -> None:
    found = facts(llama, deployment(tmp_path, f"model: toy-llama\n{text}\n"), "--weights", str(tmp_path / "llama"))
    (fault,) = found["faults"]
    assert hint in fault["message"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("toy-chta",), "did you mean 'toy-chat'"),
        (("missing.yaml",), "missing.yaml cannot be read"),
        (("toy-llama", "--weights", "./nowhere"), "there is no folder './nowhere'"),
    ],
)
def test_what_cannot_be_checked(llama: Run, words: tuple[str, ...], sentence: str) -> None:
    status, _, err = llama("check", *words)
    assert (status, sentence in err) == (2, True), err


def test_a_file_that_names_no_model(llama: Run, tmp_path: Path) -> None:
    status, _, err = llama("check", deployment(tmp_path, "max_sessions: 1\n"))
    assert (status, "add 'model: KEY'" in err) == (2, True)


@pytest.mark.parametrize("key", [mini.key for mini in MINIATURES])
def test_it_sees_what_the_worker_builds(mstar: Run, key: str) -> None:
    found = facts(mstar, key, **MINI)
    assert found["faults"] == []
    registry = miniature_registry()
    config = WorkerConfig(
        key=key,
        weights=None,
        deployment=merge_deployment(key, dict(registry.model(key).deployment)),  # type: ignore[arg-type]
    )
    worker = Worker(config, registry)
    real = {name: (pool.capacity(), pool.device_bytes()) for name, pool in worker.resources.items()}
    assert {pool["name"]: (pool["units"], pool["bytes"]) for pool in found["pools"]} == real


def test_the_worker_refuses_the_same_faults_at_once() -> None:
    registry = miniature_registry()
    key = MINIATURES[0].key
    wrong = {"placement": {"lmm": [0]}, "resources": {"kv": {"tokns": 1}, "kvv": {}}}
    config = WorkerConfig(key=key, weights=None, deployment=merge_deployment(key, {"device": "cpu", **wrong}))
    with pytest.raises(DeploymentError) as caught:
        Worker(config, registry)
    assert {path for path, _ in caught.value.faults} == {"placement.lmm", "resources.kv.tokns", "resources.kvv"}


def test_keys_that_are_no_names_are_faults_among_others(llama: Run, tmp_path: Path) -> None:
    text = "model: toy-llama\n1: a\nresources: {2: {tokens: 1}}\nengine.runner: eager\nmax_sessions: -1\non: 1\n"
    found = facts(llama, deployment(tmp_path, text), "--weights", str(tmp_path / "llama"))
    assert {fault["key"]: fault["line"] for fault in found["faults"]} == {
        "1": 2, "resources.2": 3, "engine.runner": 4, "max_sessions": 5, "on": 6,
    }  # fmt: skip
    assert found["complete"]


def test_repeated_keys_are_faults_among_others(llama: Run, tmp_path: Path) -> None:
    text = "model: toy-llama\nmax_sessions: 1\nexecutor: inlin\nmax_sessions: 2\nresources: {samplr: {}}\n"
    found = facts(llama, deployment(tmp_path, text), "--weights", str(tmp_path / "llama"))
    faults = {fault["key"]: fault for fault in found["faults"]}
    assert {key: fault["line"] for key, fault in faults.items()} == {
        "max_sessions": 4, "executor": 3, "resources.samplr": 5,
    }  # fmt: skip
    assert faults["max_sessions"]["message"] == "given 2 times, on lines 2 and 4; keep one of them"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("engine.attention", "engine:\n  attention: torch_spda"),
        ("resources.kv.backend", "resources:\n  kv: {backend: torch_spda}"),
    ],
)
def test_an_attention_backend_that_is_not_there_is_told_once(llama: Run, tmp_path: Path, key: str, text: str) -> None:
    file = deployment(tmp_path, f"model: toy-llama\n{text}\n")
    (fault,) = facts(llama, file, "--weights", str(tmp_path / "llama"))["faults"]
    assert (fault["key"], fault["line"]) == (key, 3)
    assert "did you mean 'torch_sdpa'?" in fault["message"]


def test_a_fault_of_the_packages_own_deployment_is_not_put_on_the_file(
    llama: Run, llama_code: str, mstar: Run, tmp_path: Path
) -> None:
    code = llama_code.replace('{"kv": {"tokens": 1024}}', '{"kv": {"tokens": 1024}}, "executor": "inlin"')
    file = deployment(tmp_path, "model: toy-llama\nmax_sessions: 1\n")
    words = ("check", file, "--weights", str(tmp_path / "llama"), "--json")
    status, out, _ = mstar(*words, extra="cli_toys_llama", code=code)
    (fault,) = json.loads(out)["faults"]
    assert (status, fault["key"], fault["file"]) == (1, "executor", "deployment of 'toy-llama'")


@pytest.mark.parametrize(
    ("data", "status", "sentence"),
    [
        (None, 2, "cannot be read"),
        (b"model: \xff", 1, "line 1: this is not UTF-8"),
        (b"model: [", 1, "is not valid YAML"),
        (b"- 1", 1, "must be a mapping"),
        (b"model: &a [*a]", 1, "line 1: what is anchored here contains itself"),
        (b"model: toy-llama\nmax_sessions: 1\nmax_sessions: 2\n", 1, ":3: max_sessions: given 2 times"),
        (b"model: toy-chat", 1, ":1: model: this is the deployment of 'toy-chat', not of 'toy-llama'"),
        (b"scheduler: {policy: defalt}", 1, ":1: scheduler.policy: there is no scheduler 'defalt'; did you mean 'def"),
    ],
)
def test_all_commands_end_alike_for_a_faulty_file(
    llama: Run, tmp_path: Path, data: bytes | None, status: int, sentence: str
) -> None:
    file = tmp_path / "deployment.yaml"
    if data is not None:
        file.write_bytes(data)
    commands = [
        ("check", "toy-llama"),
        ("graph", "toy-llama"),
        ("serve", "toy-llama"),
        ("run", "toy-llama", "hello"),
    ]
    if data is None or sentence.startswith(("line", "is", "must")):
        commands.append(("check",))
    for command, *words in commands:
        option = (str(file),) if not words else ("--config", str(file))
        found, _, err = llama(command, *words, *option)
        assert found == status, (command, words, err)
        assert str(file) in err
        assert sentence in err, (command, words)


def test_a_file_whose_model_is_not_there_has_its_line(llama: Run, tmp_path: Path) -> None:
    file = deployment(tmp_path, "\nmodel: toy-lama\n")
    status, _, err = llama("check", file)
    assert status == 1
    assert err.startswith(f"{file}:2: model: there is no model 'toy-lama'; did you mean 'toy-llama'?")


@pytest.mark.parametrize("command", ["check", "graph"])
def test_the_file_may_name_the_model(llama: Run, tmp_path: Path, command: str) -> None:
    file = deployment(tmp_path, "model: toy-llama\nweights: llama\n")
    named = llama(command, "toy-llama", "--config", file)
    assert named[0] == 0
    assert llama(command, "--config", file) == named


@pytest.mark.parametrize("words", [("check",), ("graph",), ("serve",), ("run", "hello")])
def test_a_file_of_another_model_is_refused_with_both_names(llama: Run, tmp_path: Path, words: tuple[str, ...]) -> None:
    file = deployment(tmp_path, "model: toy-chat\n")
    status, _, err = llama(words[0], "toy-llama", *words[1:], "--config", file)
    assert status == 1
    assert f"{file}:1: model: this is the deployment of 'toy-chat', not of 'toy-llama'" in err


def test_a_folder_of_weights_is_relative_to_its_file(llama: Run, tmp_path: Path) -> None:
    found = facts(llama, deployment(tmp_path, "model: toy-llama\nweights: llama\n"))
    assert (found["faults"], found["weights_folder"]) == ([], str(tmp_path / "llama"))


def test_weights_of_a_file_that_are_not_there_are_one_fault_among_others(llama: Run, tmp_path: Path) -> None:
    found = facts(llama, deployment(tmp_path, "model: toy-llama\nmax_sessions: -1\nweights: lama\n"))
    faults = {fault["key"]: fault for fault in found["faults"]}
    assert faults.keys() == {"max_sessions", "weights"}
    assert (faults["weights"]["line"], faults["weights"]["file"]) == (3, str(tmp_path / "deployment.yaml"))
    assert faults["weights"]["message"] == f"there is no folder '{tmp_path / 'lama'}'"
