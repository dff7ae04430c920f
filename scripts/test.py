#!/usr/bin/env python3
"""All checks and tests, in an environment of their own: ``python3 scripts/test.py [arguments for pytest]``.

The exit status is 0 only when every check and every test passed. pytest runs last, also after a failed check.
"""

import os
import subprocess
import sys

from environment import PACKAGES, ROOT, CannotSetUp, environment, say, use_supported_python

CHECKS = (
    ("format", ["ruff", "format", "--check", "--quiet", "."]),
    ("lint", ["ruff", "check", "--quiet", "."]),
    ("import layers", ["lint-imports", "--no-cache"]),
    ("types", ["mypy"] + [package + "/src" for package in PACKAGES]),
)


def main():
    # type: () -> int
    try:
        use_supported_python()
        tests = os.path.join(ROOT, "tests")
        python = environment(
            ["-r", os.path.join(tests, "requirements.txt")],
            ["-r", os.path.join(tests, "references.txt")],
            (("qwen_tts", ["-r", os.path.join(tests, "references-qwen-tts.txt")]),),
        )
    except CannotSetUp as error:
        print(error, file=sys.stderr)
        return 2
    failed = [name for name, words in CHECKS if not _passes(python, name, words)]
    if failed:
        say("FAILED: %s. The tests run all the same; this run fails." % ", ".join(failed))
    # Two processes, since most tests wait for a server, a worker or a compiler now and then. A file stays in one.
    # What fails runs once more, and -rR names it: a browser or a busy machine shall not fail a run, nor hide a race.
    words = ["-n", "2", "--dist", "loadfile", "--reruns", "1", "-rfER"] + sys.argv[1:]
    # Each has its half of the processors: where both take all, threads of one spin while those of the other compute,
    # which takes twice the time on two processors.
    environ = dict(os.environ)
    environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
    status = subprocess.call([python, "-m", "pytest"] + words, cwd=ROOT, env=environ)
    return status or (1 if failed else 0)


def _passes(python, name, words):
    # type: (str, str, list[str]) -> bool
    say("checking " + name)
    command = os.path.join(os.path.dirname(python), words[0])
    return subprocess.call([command] + words[1:], cwd=ROOT) == 0


if __name__ == "__main__":
    sys.exit(main())
