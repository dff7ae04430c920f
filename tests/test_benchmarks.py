"""The benchmark programs: each says what it does, and the chat benchmark's client and figures are right."""

from __future__ import annotations

import asyncio
import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
FAKE = Path(__file__).with_name("fake_chat_server.py")
PROGRAMS = sorted(p.name for p in FOLDER.glob("*.py") if '__name__ == "__main__"' in p.read_text(encoding="utf-8"))

pytestmark = pytest.mark.usefixtures("benchmark_modules")


def test_files_that_lose_something_are_not_measured() -> None:
    program = importlib.import_module("image_files")
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    ways = program.ways()
    (row,) = program.measure({"small": pixels}, {"ours": ways["the server's"]}, 2)
    assert row["way"] == "ours"
    assert row["small share"] > 1
    with pytest.raises(ValueError, match="dark: the file of 'small'"):
        program.measure({"small": pixels}, {"dark": lambda seen: ways["the server's"](seen // 2)}, 1)
    assert {"Pillow 1 default", "FFmpeg avg 1"} <= ways.keys(), "what the server needs in any case"


@pytest.mark.parametrize("right", [True, False])
def test_decoding_is_checked_before_it_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: bool) -> None:
    program = importlib.import_module("vae_gpu")
    if not right:
        good = program.ops.group_norm
        monkeypatch.setattr(program.ops, "group_norm", lambda x, *rest: good(x, *rest) * 1.01)
    words = ["--shape", "tiny", "--device", "cpu", "--rounds", "1", "--out", str(tmp_path / "found.json")]
    assert program.main(words) == (0 if right else 1)
    found = json.loads((tmp_path / "found.json").read_text())
    assert ("decode" in found) == right
    assert all(found["check"]["right"].values()) == right


@pytest.fixture
def client() -> ModuleType:
    return importlib.import_module("chat_client")


@pytest.fixture
def servers() -> ModuleType:
    return importlib.import_module("chat_servers")


@pytest.fixture
def chat() -> ModuleType:
    return importlib.import_module("chat_cpu")


def fake(servers: ModuleType, *words: str) -> Any:
    """The fake server as a contestant."""

    def command(weights: Path, port: int) -> list[str]:
        return [sys.executable, str(FAKE), str(port), *words]

    return servers.Contestant(
        "fake", command, "/ready", {"extra": 1}, lambda weights: "fake", "it comes with the tests"
    )


def body(wish: str, tokens: int = 6) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"please {wish}"}], "max_tokens": tokens}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_explains_itself(program: str) -> None:
    done = subprocess.run([sys.executable, FOLDER / program, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_the_chat_benchmark_is_among_them() -> None:
    assert {"chat_cpu.py", "decode_gpu.py", "sched_scale.py", "import_time.py"} <= set(PROGRAMS)


@given(st.lists(st.text("ab:\n é", max_size=6), max_size=5), st.lists(st.integers(1, 9)), st.booleans())
def test_events_do_not_depend_on_how_the_bytes_arrive(data: list[str], cuts: list[int], crlf: bool) -> None:
    events = importlib.import_module("chat_client").Events()
    sent = "".join(": comment\n" + "".join(f"data: {line}\n" for line in d.split("\n")) + "\n" for d in data)
    left = (sent.replace("\n", "\r\n") if crlf else sent).encode()
    found = []
    for cut in cuts:
        found += events.feed(left[:cut])
        left = left[cut:]
    assert found + events.feed(left) == [d.encode() for d in data]


async def test_tokens_are_those_of_the_usage(client: ModuleType, servers: ModuleType) -> None:
    with servers.RunningServer(fake(servers), ROOT) as server:
        await asyncio.to_thread(server.wait_ready, 20)
        seen: list[Any] = []
        level = await client.run_level(server.url, [body("talk")] * 5, 2, 20, seen.append)
    found = client.summary(level)
    assert (found["answers"], found["completion_tokens"], found["prompt_tokens"]) == (5, 30, 25)
    assert found["finish_reasons"] == {"length": 5}
    assert found["tokens_per_s"] == pytest.approx(30 / level.seconds)
    assert found["ttft"]["min"] >= 0.002
    assert len(seen) == 5
    for answer in level.answers:
        assert 1 <= len(answer.arrivals) <= 3
        assert answer.arrivals == sorted(answer.arrivals)


@pytest.mark.parametrize(
    ("wish", "error", "says"),
    [
        ("status", "AnswerError", "status 422: .*field refused"),
        ("error", "AnswerError", "out of pages"),
        ("no-usage", "AnswerError", "without the number of its tokens"),
        ("hang", "TimeoutError", "0 of 2 answers"),
    ],
)
async def test_what_is_no_whole_answer_is_an_error(
    client: ModuleType, servers: ModuleType, wish: str, error: str, says: str
) -> None:
    kind = TimeoutError if error == "TimeoutError" else client.AnswerError
    with servers.RunningServer(fake(servers), ROOT) as server:
        await asyncio.to_thread(server.wait_ready, 20)
        with pytest.raises(kind, match=says):
            await client.run_level(server.url, [body(wish)] * 2, 2, 0.3 if wish == "hang" else 20)


def answers(client: ModuleType, *times: list[float]) -> list[Any]:
    return [client.Answer(0.0, arrivals, 1, len(arrivals)) for arrivals in times]


def test_decode_alone_is_the_whole_answer_but_its_first_token(client: ModuleType) -> None:
    alone = answers(client, [1.0 + n / 10 for n in range(21)])
    assert client.steady_decode(alone, 1) == pytest.approx((20, 2.0))


def test_decode_counts_only_while_all_streams_are_in_an_answer(client: ModuleType) -> None:
    early = [n / 10 for n in range(41)]  # 0 to 4 s
    late = [2.05 + n / 10 for n in range(41)]  # 2.05 to 6.05 s
    tokens, seconds = client.steady_decode(answers(client, early, late), 2)
    assert seconds == pytest.approx(1.95)
    assert tokens == 20 + 19
    assert client.steady_decode(answers(client, early, late), 3) == (0, 0)


def test_decode_counts_tokens_not_arrivals(client: ModuleType) -> None:
    answer = client.Answer(0.0, [float(n) for n in range(11)], 1, 31)
    assert client.steady_decode([answer], 1) == pytest.approx((30, 10))


def test_a_stretch_of_few_steps_is_left_out(client: ModuleType) -> None:
    assert client.steady_decode(answers(client, [0.0, 0.1, 0.2]), 1) == (0, 0)


def test_prompts_are_the_same_each_time_and_never_twice() -> None:
    make = importlib.import_module("chat_prompts").prompts
    assert make(6, 3) == make(6, 3)
    many = make(96, 1) + make(96, 2)
    assert len({prompt[:10] for prompt in many}) == len(many)
    words = [len(prompt.split()) for prompt in make(6, 3)]
    assert all(w < 20 for w in words[::3])
    assert all(80 <= w < 120 for w in words[1::3])
    assert all(305 <= w < 350 for w in words[2::3])


def plan(chat: ModuleType, **changed: Any) -> Any:
    settings = {"weights": ROOT, "servers": ["fake"], "streams": [2], "tokens": 40, "rounds": 2, "timeout": 20.0}
    return chat.Plan(**settings | changed)


def test_a_measurement_and_its_row(chat: ModuleType, servers: ModuleType) -> None:
    said: list[tuple[str, int | None]] = []
    row = chat.measure(fake(servers), 2, plan(chat), lambda *words: said.append(words))
    assert "failed" not in row
    assert (row["answers"], row["completion_tokens"]) == (4, 160)
    assert row["peak_rss_mb"] > 0
    assert [phase for phase, _ in said[:3]] == ["starting", "warming up", "measuring"]
    assert said[-1] == ("measuring", 4)
    cells = chat.table_row({**row, "floor_tokens_per_s": 50.0, "share_of_floor": 0.5})
    assert set(cells) == {*chat.SPEED, *chat.LATENCY}
    assert cells["of floor"] == "50 %"
    json.dumps(row)


def test_a_server_and_its_children_are_gone_afterwards(servers: ModuleType) -> None:
    with servers.RunningServer(fake(servers), ROOT) as server:
        server.wait_ready(20)
        child = int(server.reason().split()[1])
        assert psutil.pid_exists(child)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_server_that_ends_is_reported_with_its_last_words(chat: ModuleType, servers: ModuleType) -> None:
    broken = fake(servers, "no number")
    row = chat.measure(broken, 1, plan(chat), lambda *words: None)
    assert "ValueError: could not convert string to float" in row["failed"]
    assert "it comes with the tests" in row["failed"]
    cells = chat.table_row({**row, "floor_tokens_per_s": 50.0})
    assert (cells["tokens/s"], cells["floor"]) == ("failed", "50.0")


def test_a_server_that_ends_in_an_answer_is_the_reason(
    chat: ModuleType, servers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "prompts", lambda count, seed: ["please exit"] * count)
    row = chat.measure(fake(servers), 1, plan(chat), lambda *words: None)
    assert row["failed"].startswith("ServerError: ended with status 3: Segmentation something")


INTERRUPTED = """
import signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import chat_cpu, chat_servers
chat_cpu.prompts = lambda count, seed: ["please hang"] * count
command = lambda weights, port: [sys.executable, sys.argv[2], str(port)]
fake = chat_servers.Contestant("fake", command, "/ready", {}, str, "")
plan = chat_cpu.Plan(Path(), ["fake"], [2], 4, 1, 60.0)
signal.signal(signal.SIGTERM, chat_cpu._stop)
chat_cpu.measure(fake, 2, plan, lambda phase, done: print(phase, flush=True))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_takes_the_server_along(number: signal.Signals) -> None:
    words = [sys.executable, "-c", INTERRUPTED, str(FOLDER), str(FAKE)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        while program.stdout.readline() != "warming up\n":
            assert program.poll() is None
        children = psutil.Process(program.pid).children(recursive=True)
        assert len(children) == 2, "the server and its child"
        program.send_signal(number)
        _, errors = program.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors
    for child in children:
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_command_that_is_not_there(chat: ModuleType, servers: ModuleType) -> None:
    missing = servers.Contestant("x", lambda w, p: ["no-such-command"], "/", {}, str, "needed: x")
    row = chat.measure(missing, 1, plan(chat), lambda *words: None)
    assert row["failed"] == "ServerError: no-such-command cannot be started (No such file or directory); needed: x"


@pytest.mark.timeout(180)
def test_damaged_media_do_no_harm() -> None:
    words = [sys.executable, str(FOLDER / "media_fuzz.py"), "--requests", "40"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_the_http_path_loses_no_stream() -> None:
    words = [sys.executable, str(FOLDER / "http_cost.py"), "--quick", "--streams", "8", "--tokens", "1"]
    run = subprocess.run(words, capture_output=True, text=True, timeout=170, check=False)
    assert run.returncode == 0, run.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in run.stdout.splitlines() if "│" in line]
    lost = {row[1]: row[5] for row in rows if row[1] in ("mstar", "bare", "offline")}
    assert lost == {"mstar": "0", "bare": "0", "offline": "0"}


def test_a_picture_takes_its_whole_way_in_each_row() -> None:
    words = [sys.executable, str(FOLDER / "picture_path.py"), "--quick", "--at-once", "2", "--rounds", "1"]
    run = subprocess.run(words, capture_output=True, text=True, timeout=170, check=False)
    assert run.returncode == 0, run.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in run.stdout.splitlines() if "│" in line]
    took = {row[0]: float(row[2]) for row in rows}
    assert took.keys() == {"http", "offline", "file"}
    assert all(ms > 0 for ms in took.values())
