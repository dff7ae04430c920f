#!/usr/bin/env python3
"""From nothing to an answer of a real model: ``python3 scripts/quickstart.py``.

Sets up ``.venv`` in this checkout, serves SmolLM2 on the CPU, asks it a question through the official OpenAI client and
stops the server. Needs Python 3.11 or later; this file itself uses only its standard library.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from environment import ROOT, CannotSetUp, environment, say, use_supported_python

KEY = "smollm2"
QUESTION = "What is the capital of France?"
POLL_S = 0.25
STALL_S = 900  # with no change of phase or progress for so long, something is wrong
STOP_S = 40  # the server drains for up to 30 seconds


def main():
    # type: () -> int
    parser = argparse.ArgumentParser(description="Set M* up, serve %s on the CPU and ask it a question." % KEY)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--weights", metavar="DIR|HUB_ID", help="weights from elsewhere than the usual place")
    arguments = parser.parse_args()
    try:
        use_supported_python()
        return run(environment(["openai"]), arguments)
    except CannotSetUp as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run(python, arguments):
    # type: (str, argparse.Namespace) -> int
    """Serve, ask, stop. The server is stopped whatever happens."""
    port = free_port()
    words = [os.path.join(os.path.dirname(python), "mstar"), "serve", KEY, "--device", "cpu", "--port", str(port)]
    if arguments.weights:
        words += ["--weights", arguments.weights]
    say("starting: mstar " + " ".join(words[1:]))
    server = subprocess.Popen(words, start_new_session=True)  # Ctrl-C reaches us, and we stop the server
    try:
        wait_until_ready(server, "http://127.0.0.1:%d/health/ready" % port)
        say("asking: " + arguments.question)
        client = [
            python,
            os.path.join(ROOT, "scripts", "ask.py"),
            "http://127.0.0.1:%d/v1" % port,
            KEY,
            arguments.question,
        ]
        return subprocess.call(client)
    finally:
        stop(server)


def free_port():
    # type: () -> int
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(server, url):
    # type: (subprocess.Popen[bytes], str) -> None
    """Wait for readiness and tell each new phase, or every tenth of one that knows its progress."""
    told, moved = "", time.monotonic()
    while server.poll() is None:
        ready, phase = readiness(url)
        if phase and phase != told:
            say(phase)
            told, moved = phase, time.monotonic()
        if ready:
            return
        if time.monotonic() - moved > STALL_S:
            raise CannotSetUp("the server has not become ready; its last phase was: %s" % (told or "none"))
        time.sleep(POLL_S)
    raise CannotSetUp("the server ended with status %d before it was ready; its message is above" % server.returncode)


def readiness(url):
    # type: (str) -> tuple[bool, str]
    """Whether the server takes requests, and where it stands: a short sentence, empty before the port is open."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return True, describe(json.load(answer))
    except urllib.error.HTTPError as error:
        with error:
            return False, describe(json.load(error))
    except OSError:  # not listening yet; whether the server still runs is looked at by the caller
        return False, ""


def describe(body):
    # type: (dict) -> str
    phase = body["models"][KEY]
    if phase["progress"] is None:
        return "%s: %s" % (KEY, phase["phase"])
    return "%s: %s, %d %%" % (KEY, phase["phase"], int(phase["progress"] * 10) * 10)


def stop(server):
    # type: (subprocess.Popen[bytes]) -> None
    """Ask the server to stop; when it does not, end its whole process group."""
    if server.poll() is not None:
        return
    say("stopping the server")
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        raise CannotSetUp("the server did not stop within %d s and was killed" % STOP_S) from None


if __name__ == "__main__":
    sys.exit(main())
