"""The command line: what it prints, how it fails, and that it starts without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mstar.cli import serve
from mstar.cli.commands import Commands, Parser, one_of
from mstar.cli.output import table
from mstar.spec.errors import SetupError

Run = Callable[..., tuple[int, str, str]]


# --- the front page ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_the_overview_lists_every_command(mstar: Run, words: tuple[str, ...]) -> None:
    status, out, err = mstar(*words)
    assert (status, err) == (0, "")
    for name in ("serve", "models", "plugins", "greet"):
        assert f"\n  {name} " in out


def test_version(mstar: Run) -> None:
    import mstar as package

    assert mstar("--version") == (0, f"mstar {package.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("srve",), "mstar: unknown command 'srve'; did you mean 'serve'?"),
        (("--hlep",), "mstar: unknown option '--hlep'; did you mean '--help'?"),
        (("models", "--jsn"), "mstar models: unknown option '--jsn'; did you mean '--json'?"),
        (("models", "toy-chat", "extra"), "mstar models: unexpected argument 'extra'"),
        (("serve",), "mstar serve: which model?"),
        (("graph",), "mstar graph: which model?"),
        (("check",), "mstar check: which model?"),
        (("serve", "d.yaml"), "'d.yaml' is no model but a file: `mstar serve --config d.yaml`"),
        (("serve", "toy-chat", "toy-chat"), "the model 'toy-chat' is named twice"),
        (("serve", "toy-chat", "--on-demand", "toy-chat"), "the model 'toy-chat' is named twice"),
        (("serve", "toy-chat", "toy-gated", "--weights", "x"), "--weights is for one model"),
        (("serve", "toy-chat", "--idle-unload", "soon"), "'soon' is not a number of seconds"),
        (("serve", "toy-chat", "--request-timeout", "0"), "0 seconds are none"),
        (("serve", "toy-chat", "--max-file", "much"), "is not a size such as 64MiB"),
        (("serve", "toy-chat", "--max-body", "0.1"), "is not a size"),
        (("serve", "toy-chat", "--max-pixels", "0"), "at least 1"),
        (("serve", "toy-chat", "--max-audio-seconds", "0"), "0 seconds are none"),
        (("serve", "toy-chat", "--media-host", "https://a.example"), "is not a host such as example.com"),
        (("serve", "toy-chat", "--media-host", "a.example"), "--allow-remote-media allows that they are"),
        (("serve", "toy-chat", "--cors", "example.com/x"), "'example.com/x' is not an origin"),
        (("serve", "toy-chat", "--root-path", "mstar"), "'mstar' is not a path"),
        (("serve", "toy-chta"), "there is no model 'toy-chta'; did you mean 'toy-chat'?"),
        (("serve", "toy-chat", "--prot=1"), "unknown option '--prot'; did you mean '--port'?"),
        (("serve", "toy-chat", "--port", "70000"), "'70000' is not a port"),
        (("serve", "toy-chat", "--device", "gpu"), "'gpu' is not a device: cpu, cuda or cuda:N"),
        (("serve", "toy-chat", "--dtype", "float23"), "'float23' is not a valid value; did you mean 'float32'?"),
        (("serve", "toy-chat", "--max-concurrent", "0"), "'0' is not a number of at least 1"),
        (("serve", "toy-chat", "--dev", "cpu"), "unknown option '--dev'"),
    ],
)
def test_a_fault_is_one_sentence_with_the_nearest_word(mstar: Run, words: tuple[str, ...], sentence: str) -> None:
    status, out, err = mstar(*words)
    assert (status, out) == (2, "")
    assert sentence in err
    assert "Traceback" not in err
    assert "\x1b" not in err, "colours only on a terminal"


def test_a_setting_that_does_not_parse(mstar: Run) -> None:
    status, _, err = mstar("models", HF_HUB_OFFLINE="perhaps")
    assert status == 2
    assert err.startswith("HF_HUB_OFFLINE: 'perhaps'")


def test_a_bug_keeps_its_traceback(mstar: Run) -> None:
    code = (
        "import mstar\n@mstar.hookimpl\ndef mstar_cli(commands):\n"
        "    commands.add('crash', lambda arguments, context: 1 / 0, help='Crash.')\n"
    )
    with pytest.raises(ZeroDivisionError):
        mstar("crash", extra="cli_toys_crash", code=code)


def test_an_interrupt_is_no_traceback(mstar: Run) -> None:
    code = (
        "import mstar\ndef stop(arguments, context):\n    raise KeyboardInterrupt\n"
        "@mstar.hookimpl\ndef mstar_cli(commands):\n    commands.add('wait', stop, help='Wait.')\n"
    )
    assert mstar("wait", extra="cli_toys_wait", code=code) == (130, "", "")


# --- commands of plugins -----------------------------------------------------------------------------------------


def test_hook_mstar_cli(mstar: Run) -> None:
    assert mstar("greet", "you") == (0, "hello you\n", "")


def test_a_plugin_cannot_take_a_command_that_exists(mstar: Run) -> None:
    code = (
        "import mstar\n@mstar.hookimpl\ndef mstar_cli(commands):\n"
        "    commands.add('mine', print, help='Mine.')\n    commands.add('serve', print, help='Serve.')\n"
    )
    status, out, err = mstar("--help", extra="cli_toys_bold", code=code)
    assert status == 0
    assert "mine" not in out, "a plugin is taken whole or not at all"
    assert "plugin 'cli_toys_bold' (extra module) is not used: the command `mstar serve` exists already" in err


def test_a_command_twice_in_one_plugin_is_refused() -> None:
    commands = Commands()
    commands.add("a", lambda arguments, context: None, help="A.")
    with pytest.raises(SetupError, match="`mstar a` exists already"):
        commands.add("a", lambda arguments, context: None, help="A.")


def test_options_of_groups_parse_too() -> None:
    parser = Parser(prog="x")
    parser.add_argument("--size", type=one_of("small", "large"))
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--on", action="store_true")
    assert parser.parse(["--size", "large", "--on"]).on
    with pytest.raises(SetupError, match="did you mean 'large'"):
        parser.parse(["--size", "larg"])


def test_table() -> None:
    assert table(("A", "B"), [("long cell", "x"), ("s", "y")]) == "A          B\nlong cell  x\ns          y"


# --- models and plugins ------------------------------------------------------------------------------------------


def test_models(mstar: Run) -> None:
    status, out, err = mstar("models")
    assert (status, err) == (0, "")
    head, chat, closed, _ = out.splitlines()
    columns = "KEY FAMILY ABILITIES MODALITIES LICENCE SIZE PLUGIN WEIGHTS SUMMARY"
    assert head.split() == columns.split()
    expected = "toy-chat toy chat text → text Apache-2.0 269 MB cli_toys extra module not yet The model toy-chat."
    assert chat.split() == expected.split()
    assert chat.index("Apache") == head.index("LICENCE")
    assert closed[head.index("SIZE")] == "?"


def snapshot(hub: Path, *files: str) -> Path:
    """The Hub's cache after a download of toy-chat's weights."""
    folder = hub / "models--toys--toy-chat" / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    refs = hub / "models--toys--toy-chat" / "refs"
    refs.mkdir()
    (refs / "v1").write_text("c0ffee")
    for name in files:
        (folder / name).write_text("{}")
    return folder


def test_models_finds_weights_in_the_hubs_cache(mstar: Run, tmp_path: Path) -> None:
    folder = snapshot(tmp_path / "hub", "config.json")
    assert not json.loads(mstar("models", "--json")[1])[0]["weights_present"], "a snapshot without its weights"
    (folder / "model-00001-of-00002.safetensors").touch()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not json.loads(mstar("models", "--json")[1])[0]["weights_present"], "a download that broke off"
    (folder / "model-00002-of-00002.safetensors").touch()
    chat, closed, _ = json.loads(mstar("models", "--json")[1])
    assert (chat["weights_present"], chat["weights_folder"]) == (True, str(folder))
    assert (closed["weights_present"], closed["weights_folder"]) == (False, None)


def test_models_for_programs(mstar: Run) -> None:
    status, out, _ = mstar("models", "--json")
    chat, closed, _ = json.loads(out)
    assert status == 0
    assert chat["weights"] == [{"source": "hub", "id": "toys/toy-chat", "revision": "v1"}]
    assert (chat["plugin"], chat["size"], chat["abilities"]) == ("cli_toys", 269_000_000, ["chat"])
    assert closed["licence"] == {
        "name": "Toy-NC",
        "url": "https://toys.example/terms",
        "commercial": False,
        "gated": False,
        "permissive": False,
    }


TUNED = """
import mstar
from mstar.spec.knobs import Knobs
from mstar.spec.model import Licence, ModelSpec

class Options(Knobs):
    longest: int = 7
    widest: int = 8

@mstar.hookimpl
def mstar_models():
    return [ModelSpec(
        key="tuned", family="toy", summary="Tuned.", weights=(), licence=Licence("Apache-2.0"), model="toys:Model",
        processor="toys:Processor", knobs=Knobs, abilities=("chat",), options=Options,
        deployment={"model_kwargs": {"longest": 9}},
    )]
"""


def test_the_defaults_of_a_models_options_are_those_of_its_deployment(mstar: Run) -> None:
    status, out, _ = mstar("models", "tuned", "--json", extra="cli_toys_tuned", code=TUNED)
    assert status == 0
    assert {row["name"]: row["default"] for row in json.loads(out)["options"]} == {"longest": "9", "widest": "8"}


def test_models_says_so_when_there_are_none(mstar: Run) -> None:
    status, out, err = mstar("models", MSTAR_EXTRA_PLUGINS="")
    assert (status, out) == (0, "")
    assert "pip install mstar-demo" in err


BROKEN = "import mstar\n@mstar.hookimpl\ndef mstar_models():\n    return 'a model'\n"


def test_models_reports_a_broken_plugin_beside_the_list(mstar: Run) -> None:
    status, out, err = mstar("models", extra="cli_toys_broken", code=BROKEN)
    assert status == 0
    assert "toy-chat" in out
    assert "plugin 'cli_toys_broken' (extra module) is not used: mstar_models must return a list of ModelSpec" in err


def test_plugins(mstar: Run) -> None:
    status, out, _ = mstar("plugins", extra="cli_toys_broken", code=BROKEN)
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert status == 0
    assert "loaded" in lines["core"]
    assert "mstar_executors" in lines["core"]
    assert "mstar_cli, mstar_models" in lines["cli_toys"]
    assert "broken" in lines["cli_toys_broken"]
    assert "mstar_models must return" in lines["cli_toys_broken"]
    assert "cli_toys_broken: mend the module" in out


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("import a_library_that_is_missing.part", "`pip install a_library_that_is_missing`"),
        ("from json import a_name_of_the_future", "mend the module"),
    ],
)
def test_plugins_says_what_to_do(mstar: Run, code: str, remedy: str) -> None:
    _, out, _ = mstar("plugins", "--json", extra="cli_toys_lacks", code=code)
    fact = next(fact for fact in json.loads(out) if fact["name"] == "cli_toys_lacks")
    assert remedy in fact["remedy"]
    assert "traceback" not in fact
    facts = json.loads(mstar("plugins", "--json", "--traceback", extra="cli_toys_lacks")[1])
    assert code in next(fact["traceback"] for fact in facts if fact["name"] == "cli_toys_lacks")


def test_plugins_that_are_asked_for_and_not_installed(mstar: Run) -> None:
    _, out, _ = mstar("plugins", "--json", MSTAR_PLUGINS="no-such-plugin")
    fact = next(fact for fact in json.loads(out) if fact["name"] == "no-such-plugin")
    assert fact["remedy"] == "install it, or take it off the list"


@pytest.mark.parametrize("words", [(), ("models",), ("models", "toy-chat"), ("license", "list"), ("plugins",)])
@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ("MSTAR_BLOCK_PLUGINS", "MSTAR_BLOCK_PLUGINS: no plugin 'cli-toyz' is installed; did you mean 'cli_toys'?"),
        (
            "MSTAR_PLUGINS",
            "plugin 'cli-toyz' (no version) is not used: MSTAR_PLUGINS names it, but it is not installed",
        ),
    ],
)
def test_a_plugin_that_a_setting_names_and_that_is_not_there_is_told_once(
    mstar: Run, words: tuple[str, ...], variable: str, sentence: str
) -> None:
    status, _, err = mstar(*words, **{variable: "cli-toyz"})
    assert status == 0
    assert err.startswith(sentence)
    assert err.count("cli-toyz") == 1


def test_a_plugin_that_is_blocked_and_there_is_not_told(mstar: Run) -> None:
    status, out, err = mstar("models", MSTAR_BLOCK_PLUGINS="cli-toys", MSTAR_PLUGINS="core")
    assert (status, out) == (0, "")
    assert "cli-toys" not in err


@pytest.mark.parametrize(
    "words", [("license", "list"), ("download", "toy-chat"), ("serve", "toy-chat"), ("run", "toy-chat", "hello")]
)
def test_a_model_that_a_consent_names_and_that_is_not_there_is_told(mstar: Run, words: tuple[str, ...]) -> None:
    accepted = "toy-closed,toy-gatd"
    _, _, err = mstar(*words, MSTAR_ACCEPT_LICENCES=accepted, HF_HUB_OFFLINE="1")
    assert err.count("MSTAR_ACCEPT_LICENCES") == 1
    assert "MSTAR_ACCEPT_LICENCES: there is no model 'toy-gatd'; did you mean 'toy-gated'?\n" in err
    assert "Traceback" not in err


def test_plugins_for_programs(mstar: Run) -> None:
    status, out, _ = mstar("plugins", "--json", extra="cli_toys_broken", code=BROKEN, MSTAR_BLOCK_PLUGINS="cli_toys")
    facts = {fact["name"]: fact for fact in json.loads(out)}
    assert status == 0
    assert {name: facts[name]["state"] for name in ("core", "cli_toys", "cli_toys_broken")} == {
        "core": "loaded",
        "cli_toys": "blocked",
        "cli_toys_broken": "broken",
    }
    assert all(fact.keys() == facts["core"].keys() for fact in facts.values())


def test_plugins_traceback_shows_where_it_failed(mstar: Run) -> None:
    status, out, _ = mstar("plugins", "--traceback", extra="cli_toys_raise", code="int('not a number')\n")
    assert status == 0
    assert "cli_toys_raise.py" in out
    assert "ValueError: invalid literal" in out


# --- serve -------------------------------------------------------------------------------------------------------


class FakeServer:
    """Stands in for the runtime and the HTTP server, which have tests of their own: records how they are called."""

    def __init__(self) -> None:
        self.opened: dict[str, Any] = {}
        self.served: dict[str, Any] = {}

    def open_service(self, key: str, settings: Any, overrides: Any, registry: Any, **more: Any) -> str:
        self.opened = {"key": key, "settings": settings, "overrides": overrides, **more}
        return "the service"

    def serve(self, services: Any, registry: Any, options: Any, on_demand: Any) -> None:
        self.served = {"services": services, "options": options, "on_demand": on_demand}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake, module, runtime = FakeServer(), ModuleType("cli_toys_server"), ModuleType("mstar.runtime.service")
    vars(module).update(serve=fake.serve, Options=dict)
    vars(runtime).update(open_service=fake.open_service)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, runtime.__name__, runtime)
    monkeypatch.setattr(serve, "SERVER", "cli_toys_server:serve")
    monkeypatch.setattr(serve, "SERVER_OPTIONS", "cli_toys_server:Options")
    return fake


def test_serve_passes_its_options_on(mstar: Run, server: FakeServer) -> None:
    model = ("--weights", "a/b@c", "--config", "d.yaml", "--device", "cuda:1", "--dtype", "bfloat16")
    server_words = ("--host", "0.0.0.0", "--port", "0", "--api-key", "k")
    words = (
        *model,
        *server_words,
        "--layout",
        "apart",
        "--executor",
        "inline",
        "--max-concurrent",
        "3",
        "--trace",
        "t.json",
    )
    status, _, err = mstar("serve", "toy-chat", *words)
    assert (status, err) == (0, "")
    assert server.served == {
        "services": {"toy-chat": "the service"},
        "options": {"host": "0.0.0.0", "port": 0, "api_key": "k"},
        "on_demand": {},
    }
    assert server.opened["config"] == Path("d.yaml")
    assert server.opened["overrides"] == {
        "weights": "a/b@c",
        "layout": "apart",
        "device": "cuda:1",
        "dtype": "bfloat16",
        "executor": "inline",
        "max_concurrent_requests": 3,
        "request_timeout_s": None,
        "engine": {"trace": "t.json"},
    }


def test_serve_with_several_models_some_on_demand(mstar: Run, server: FakeServer, tmp_path: Path) -> None:
    config = tmp_path / "chat.yaml"
    config.write_text("model: toy-chat\n")
    limits = ("--idle-unload", "5", "--load-wait", "9", "--max-loaded", "1", "--max-key-requests", "7")
    proxy = ("--cors", "https://a.example", "--cors", "*", "--root-path", "/m/", "--drain", "3")
    words = ("toy-gated", "--on-demand", "toy-chat", "--config", str(config), *limits, *proxy)
    status, _, err = mstar("serve", *words)
    assert (status, err) == (0, "")
    assert server.served["services"] == {"toy-gated": "the service"}
    assert server.opened["key"] == "toy-gated"
    assert server.opened["config"] is None
    assert server.served["options"] == {
        "host": "127.0.0.1", "port": 8000, "api_key": None, "idle_unload_s": 5.0, "load_wait_s": 9.0, "max_loaded": 1,
        "max_key_requests": 7, "cors": ("https://a.example", "*"), "root_path": "/m", "drain_s": 3.0,
    }  # fmt: skip
    spec, make, _ = server.served["on_demand"]["toy-chat"]
    assert (spec.key, make(), server.opened["config"]) == ("toy-chat", "the service", config)


def test_serve_passes_limits_on(mstar: Run, server: FakeServer) -> None:
    words = {
        "--max-body": ("1GiB", "max_body_bytes", 2**30),
        "--max-file": ("1.5GB", "max_file_bytes", 1_500_000_000),
        "--max-decoded": ("4096", "max_decoded_bytes", 4096),
        "--max-files": ("3", "max_files", 3),
        "--max-pixels": ("1000000", "max_pixels", 10**6),
        "--max-video-pixels": ("7", "max_video_pixels", 7),
        "--max-video-frames": ("8", "max_video_frames", 8),
        "--max-video-seconds": ("9.5", "max_video_s", 9.5),
        "--max-audio-seconds": ("10", "max_audio_s", 10.0),
        "--media-timeout": ("11", "media_timeout_s", 11.0),
        "--fetch-timeout": ("12", "fetch_timeout_s", 12.0),
        "--media-processes": ("2", "media_processes", 2),
        "--video-timeout": ("13", "video_timeout_s", 13.0),
        "--speech-ahead": ("0", "speech_ahead", 0),
    }
    flat = [word for flag, (value, *_) in words.items() for word in (flag, value)]
    hosts = ("--allow-remote-media", "--media-host", "A.example", "--media-host", "*.b.example")
    status, _, err = mstar("serve", "toy-chat", *flat, *hosts)
    assert (status, err) == (0, "")
    given = server.served["options"]
    assert {name: given[name] for _, name, _ in words.values()} == {name: value for _, name, value in words.values()}
    assert (given["allow_remote_media"], given["media_hosts"]) == (True, ("a.example", "*.b.example"))


def test_serve_takes_its_models_from_their_files(mstar: Run, server: FakeServer, tmp_path: Path) -> None:
    chat, gated, none = (tmp_path / name for name in ("chat.yaml", "gated.yaml", "none.yaml"))
    chat.write_text("model: toy-chat\n")
    gated.write_text("model: toy-gated\n")
    none.write_text("max_sessions: 3\n")
    status, _, err = mstar("serve", "--config", str(chat))
    assert (status, err) == (0, "")
    assert (server.served["services"], server.opened["config"]) == ({"toy-chat": "the service"}, chat)
    assert mstar("serve", "--config", str(chat), "--config", str(gated))[0] == 0
    assert server.served["services"].keys() == {"toy-chat", "toy-gated"}
    status, _, err = mstar("serve", "--config", str(none))
    assert (status, f"{none} names no model: add 'model: KEY'" in err) == (2, True)
    assert "named twice" in mstar("serve", "--config", str(chat), "--config", str(chat))[2]
    assert "cannot be read" in mstar("serve", "--config", str(tmp_path / "absent.yaml"))[2]


def test_a_deployment_file_must_be_of_one_of_several_models(mstar: Run, server: FakeServer, tmp_path: Path) -> None:
    config = tmp_path / "other.yaml"
    config.write_text("model: toy-closed\n")
    words = ("serve", "toy-chat", "toy-gated", "--config", str(config))
    assert "must name one that is served (toy-chat, toy-gated), not 'toy-closed'" in mstar(*words)[2]
    config.write_text("model: toy-chat\n")
    assert "are both deployments of 'toy-chat'" in mstar(*words, "--config", str(config))[2]


def test_serve_asks_for_keys_once_there_are_some(mstar: Run, server: FakeServer, tmp_path: Path) -> None:
    assert mstar("key", "add", "alice")[0] == 0
    assert mstar("serve", "toy-chat")[0] == 0
    assert server.served["options"]["api_keys"] == tmp_path / "config" / "api_keys.json"
    other = tmp_path / "other.json"
    mstar("serve", "toy-chat", "--api-keys", str(other))
    assert server.served["options"]["api_keys"] == other


def test_serve_leaves_what_is_not_given_to_the_deployment(mstar: Run, server: FakeServer) -> None:
    assert mstar("serve", "toy-chat", MSTAR_API_KEY="from-env")[0] == 0
    assert set(server.opened["overrides"].values()) == {None}
    assert server.served["options"] == {"host": "127.0.0.1", "port": 8000, "api_key": "from-env"}


def test_serve_takes_the_limit_of_videos_from_the_environment(mstar: Run, server: FakeServer) -> None:
    assert mstar("serve", "toy-chat", MSTAR_MAX_VIDEO_PIXELS="5000")[0] == 0
    assert server.served["options"]["max_video_pixels"] == 5000
    assert mstar("serve", "toy-chat", "--max-video-pixels", "6000", MSTAR_MAX_VIDEO_PIXELS="5000")[0] == 0
    assert server.served["options"]["max_video_pixels"] == 6000
    assert "'0' is not a whole number" in mstar("serve", "toy-chat", MSTAR_MAX_VIDEO_PIXELS="0")[2]


def test_serve_without_the_server_says_how_to_get_it(
    mstar: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "SERVER", "mstar_server_is_not_there.run:serve")
    status, _, err = mstar("serve", "toy-chat")
    assert status == 2
    assert "pip install mstar-server" in err


def test_a_server_that_lacks_a_dependency_is_not_called_missing(
    mstar: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cli_toys_half_server.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.setattr(serve, "SERVER", "cli_toys_half_server:serve")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
        mstar("serve", "toy-chat")


@pytest.mark.parametrize(
    ("words", "environ"),
    [(("--accept-licence",), {}), ((), {"MSTAR_ACCEPT_LICENCES": "other,toy-closed"})],
)
def test_terms_that_are_accepted(
    mstar: Run, server: FakeServer, words: tuple[str, ...], environ: dict[str, str]
) -> None:
    assert mstar("serve", "toy-closed", *words, **environ)[0] == 0
    assert server.served


def test_terms_that_are_not_accepted_are_shown(mstar: Run, server: FakeServer) -> None:
    status, _, err = mstar("serve", "toy-closed", MSTAR_ACCEPT_LICENCES="toy-chat")
    assert status == 2
    assert "Toy-NC (https://toys.example/terms), which do not allow commercial use" in err
    assert not server.served


# --- start-up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["models", "--json"],
        ["plugins"],
        ["license", "list"],
        ["completion", "words", "--", "serve", ""],
        ["graph", "no-such-key"],
        *([command, "--help"] for command in ("serve", "run", "check", "graph", "doctor", "download")),
        ["serve", "no-such-key"],
    ],
)
def test_these_commands_import_no_torch(words: list[str]) -> None:
    code = (
        "import os, sys; from mstar.cli.app import run\n"
        "try: run(sys.argv[1:], os.environ)\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'zmq', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, "imported" in done.stderr) == (0, False), done.stderr
