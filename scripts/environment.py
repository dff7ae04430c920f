"""A virtual environment with M* from this checkout. Standard library only: it runs before anything is installed.

This file must parse on Python 3.6 and later, so that an old Python is told what is wrong instead of a syntax error.
"""

import hashlib
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGES = (
    "core",
    "server",
    "plugins/mstar-demo",
    "plugins/mstar-asr",
    "plugins/mstar-diffusion",
    "plugins/mstar-tts",
    "plugins/mstar-qwen3",
)
NEWEST_FIRST = ("python3.13", "python3.12", "python3.11")

# A fixed release, so that a run of today and one of next month test the same thing. MSTAR_TORCH takes any requirement
# that pip understands, for instance a build for CUDA.
TORCH = os.environ.get("MSTAR_TORCH", "torch==2.13.0")


class CannotSetUp(Exception):
    """Says what is missing and how to get it."""


def use_supported_python():
    # type: () -> None
    """Go on in a Python of 3.11 or later: this one, or else one that is on the PATH (replaces this process)."""
    if sys.version_info >= (3, 11):
        return
    for name in NEWEST_FIRST:
        path = shutil.which(name)
        if path and _is_supported(path):
            os.execv(path, [path] + sys.argv)
    raise CannotSetUp(
        "M* needs Python 3.11 or later; this is %d.%d and no newer one is on the PATH." % sys.version_info[:2]
    )


def _is_supported(python):
    # type: (str) -> bool
    """Version managers put commands on the PATH that only say that the version is not installed."""
    code = "import sys; sys.exit(sys.version_info < (3, 11))"
    return subprocess.call([python, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0


def environment(requirements, alone=(), aside=()):
    # type: (list[str], list[str] | tuple[str, ...], tuple[tuple[str, list[str]], ...]) -> str
    """Create or update the virtual environment and return the path of its Python.

    It holds torch, this checkout's packages (editable), *requirements* (arguments for ``pip install``) and those of
    *alone*, which are installed without what they ask for. *aside* are names of folders below ``references``, and what
    is installed there in the same way: programs of other processes put such a folder before all others. The environment
    is ``.venv`` in the checkout, or what MSTAR_VENV says. Each set of requirements is installed once; a change of any
    package's ``pyproject.toml``, of torch's release or of Python installs again.
    """
    folder = os.path.abspath(os.environ.get("MSTAR_VENV") or os.path.join(ROOT, ".venv"))
    python = os.path.join(
        folder, "Scripts" if os.name == "nt" else "bin", "python.exe" if os.name == "nt" else "python"
    )
    unfinished = os.path.join(folder, "mstar-unfinished")
    if os.path.exists(unfinished):
        say("an earlier installation was interrupted: starting again")
        shutil.rmtree(folder)  # pip takes a half-installed package for a whole one
    if not os.path.exists(python):
        _create(folder, python)
    further = [word for _, words in aside for word in words]
    stamp = os.path.join(folder, "mstar-%s.stamp" % _digest(requirements + list(alone) + further))
    if not os.path.exists(stamp):
        with open(unfinished, "w"):
            pass
        _install(python, ["--upgrade", "pip"], "pip")
        _install(python, [TORCH], TORCH + " (a large download, once)")
        editable = [word for package in PACKAGES for word in ("-e", os.path.join(ROOT, *package.split("/")))]
        _install(python, [TORCH] + editable + requirements, "M* and what it needs")
        if alone:
            _install(python, ["--no-deps"] + list(alone), "what tests compare with")
        for name, words in aside:
            place = os.path.join(folder, "references", name)
            shutil.rmtree(place, ignore_errors=True)  # pip leaves what is there already
            _install(python, ["--no-deps", "--target", place] + words, "what tests compare with: " + name)
        with open(stamp, "w"):
            pass
        os.remove(unfinished)
    return python


def _digest(requirements):
    # type: (list[str]) -> str
    facts = hashlib.sha256(repr((TORCH, sys.version_info[:2], requirements)).encode())
    files = [os.path.join(ROOT, *package.split("/"), "pyproject.toml") for package in PACKAGES]
    for path in files + [word for word in requirements if os.path.isfile(word)]:
        with open(path, "rb") as file:
            facts.update(file.read())
    return facts.hexdigest()[:16]


def _create(folder, python):
    # type: (str, str) -> None
    say("creating %s with Python %d.%d" % ((folder,) + sys.version_info[:2]))
    done = subprocess.run(
        [sys.executable, "-m", "venv", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    if done.returncode == 0 and os.path.exists(python):
        return
    shutil.rmtree(folder, ignore_errors=True)  # half an environment would look like a whole one next time
    raise CannotSetUp(
        "%s cannot create virtual environments: its `venv` or `ensurepip` module is missing or failed. On Debian and "
        "Ubuntu: apt-get install python3-venv. It said:\n%s" % (sys.executable, done.stdout.strip())
    )


def _install(python, words, what):
    # type: (str, list[str], str) -> None
    say("installing " + what)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"] + words
    if subprocess.call(command) != 0:
        raise CannotSetUp(
            "pip could not install %s; its message is above. The command was:\n%s" % (what, " ".join(command))
        )


def say(sentence):
    # type: (str) -> None
    """Tell the user what happens, at once."""
    print("* " + sentence, flush=True)
