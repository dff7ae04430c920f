"""The conformance suite fails on broken plugins, in the right test and with a message that says what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

DEFECTS = "broken_plugins.defects"


class Report(NamedTuple):
    """What a run of the suite said: test (with its parameters) → outcome; test → message of each failure."""

    outcomes: dict[str, str]
    messages: dict[str, str]

    def failed(self, key: str = "") -> set[str]:
        """The names of the failed tests of model *key*, without parameters."""
        return {t.split("[")[0] for t in self.messages if not key or re.search(rf"\[{key}(-|\])", t)}

    def message(self, test: str, key: str) -> str:
        return next(m for t, m in self.messages.items() if t.startswith(test) and re.search(rf"\[{key}(-|\])", t))


def conformance(folder: Path, plugin: str, *options: str) -> Report:
    """Run the suite on *plugin* as its author would, from an empty folder; in this process, which has torch loaded."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    report = folder / "report.xml"
    fixed = ["-c", str(folder / "pytest.ini"), "-p", "no:asyncio", "-W", "error", "-q", f"--junitxml={report}"]
    with chdir(folder):
        code = pytest.main([*fixed, "--mstar-plugin", plugin, *options])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    return Report(*_read(ElementTree.parse(report).iter("testcase")))


def _read(cases: Iterator[ElementTree.Element]) -> tuple[dict[str, str], dict[str, str]]:
    outcomes, messages = {}, {}
    for case in cases:
        name = case.attrib["name"]
        outcomes[name] = "passed"
        for child in case:
            if child.tag in ("failure", "error"):
                messages[name] = child.attrib.get("message", "") + (child.text or "")
            if child.tag in ("failure", "error", "skipped"):
                outcomes[name] = child.tag
    return outcomes, messages


# --- what can be known without running the model ----------------------------------------------------------------------

STATIC: dict[str, dict[str, str]] = {
    "no_licence": {"test_licence": "licence '' says nothing: name the terms"},
    "no_licence_link": {"test_licence": "licence 'MIT' has no link"},
    "no_commerce": {"test_licence": "forbids commercial use, so it is not permissive: set permissive=False"},
    "wrong_target": {
        "test_spec": "no 'Sund' there; did you mean 'Sound'?",
        "test_it_loads": "'wrong_target' does not load",
    },
    "unpinned": {"test_spec": "have no revision: pin the commit"},
    "wrong_ability": {"test_abilities": "declares the ability 'chat', but its processor refuses"},
    "undescribed": {"test_knobs_are_described": "knob 'steps' has no description"},
    "unbounded": {"test_knobs_have_bounds": "'steps': a number without bounds: give Field(ge=…, le=…)"},
    "vague_option": {
        "test_knobs_are_described": "option 'beams' has no description",
        "test_knobs_have_bounds": "options without bounds",
    },
    "unenforced": {
        "test_knob_bounds_are_enforced": "knob 'steps' accepts 0, which is outside of its declared minimum 1"
    },
    "bad_default": {"test_knob_defaults_are_valid": "the default 40 of knob 'steps' is not valid"},
    "lenient": {
        "test_spec": "misspelled knobs would be ignored",
        "test_unknown_knob_is_refused": "knob 'temperaturqq' accepts 1, which is unknown",
    },
    "other_id": {"test_abilities": "prepare() must use the request id that it is given"},
    "fickle_graph": {"test_graph": "graph() and resources() must return the same each time they are called"},
    "bad_graph": {
        "test_graph": "unknown output port 'tokn'; did you mean 'token'?",
        "test_it_loads": "unknown output port 'tokn'",
    },
    "bad_deployment": {
        "test_deployment": "unknown key; did you mean 'max_concurrent_requests'?",
        "test_it_loads": "max_concurent_requests",
    },
    "bad_layout": {"test_graph": "layout 'two': placement.decoder: unknown node"},
    "bad_resources": {"test_it_loads": "resources.kvv: unknown resource; did you mean 'kv'?"},
    "silent": {"test_graph": "stream 'text'", "test_it_loads": "stream 'text'"},
    "wrong_dtype": {
        "test_nodes_return_what_their_ports_say": "node 'lm' (_Double) entry 'forward': port 'mean' is declared "
        "float32, the node returned float64"
    },
    "wrong_shape": {
        "test_nodes_return_what_their_ports_say": "port 'mean' is declared stacked (rows), the node returned shape"
    },
    "no_tiny": {"test_checkpoint": "set ModelSpec.tiny to the 'module:function'"},
    "unused_tensor": {"test_it_loads": "shift [64] in model.safetensors"},
    "ignores_all": {"test_unused_tensor_is_noticed": "loads a checkpoint with a tensor that it does not use"},
    "loads_anything": {"test_missing_tensor_is_noticed": "loads without tensor 'scale'"},
    "lopsided": {"test_shares_of_tensors_make_up_the_whole": "no rank has items 32 to 63 along dimension 0 of 'scale'"},
    "undivided": {"test_shares_of_tensors_make_up_the_whole": "it has no layer that is divided"},
    "sound_weights": {},
}


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Report:
    tests = (
        "(spec or licence or knob or abilities or graph or deployment or loads or nodes or tensor or checkpoint) "
        "and not counts and not mixed"
    )
    models = [word for key in STATIC for word in ("--mstar-model", key)]
    return conformance(tmp_path_factory.mktemp("static"), DEFECTS, "-k", tests, *models)


@pytest.mark.parametrize("key", STATIC)
def test_a_wrong_declaration_is_found(static: Report, key: str) -> None:
    assert static.failed(key) == STATIC[key].keys()
    for test, fragment in STATIC[key].items():
        assert fragment in static.message(test, key)


# --- what shows when it runs ------------------------------------------------------------------------------------------

REFUSALS: dict[str, dict[str, str]] = {
    "unread_knob": {"test_every_knob_counts": "nothing reads 'steps': a client sets it and nothing changes"},
    "unread_option": {"test_every_option_counts": "nothing reads the options 'beams': an operator sets them"},
    "ignored_knob": {
        "test_knobs_change_something": "knob 'shift' changes nothing: 1, 2 give the same answers to 3 sample requests "
        "(walk 'generate': call of 'lm': port 'shift' has it)"
    },
    "exempt_knob": {},
    "default_too_large": {
        "test_defaults_are_admitted": "a request with every knob at its default {'max_tokens': 300} is refused by the "
        "model's own deployment: the request needs"
    },
    "default_too_long": {
        "test_defaults_are_admitted": "more than the context of 100 tokens\n  Lower the knob's default"
    },
    "ignores_media": {
        "test_what_cannot_be_served_is_refused": "a part of kind 'image' is accepted, and that can mean nothing"
    },
    "raises_on_bad_input": {
        "test_what_cannot_be_served_is_refused": "an empty text makes broken_plugins.processors:Raises raise IndexError"
    },
    "names_no_field": {
        "test_what_cannot_be_served_is_refused": "an empty text is refused with param None, which should name 'text'"
    },
    "fails_on_no_text": {
        "test_what_cannot_be_served_is_refused": "an empty text fails inside the model (the model failed on this"
    },
    "never_ends": {
        "test_every_knob_counts": "did not come to rest in 20000 steps. Does every loop end",
        "test_what_cannot_be_served_is_refused": "did not come to rest",
    },
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Report:
    models = [word for key in REFUSALS for word in ("--mstar-model", key)]
    return conformance(
        tmp_path_factory.mktemp("refusals"), DEFECTS, "-k", "admitted or counts or served or something", *models
    )


@pytest.mark.parametrize("key", REFUSALS)
def test_a_request_that_goes_wrong_is_found(refusals: Report, key: str) -> None:
    assert refusals.failed(key) == REFUSALS[key].keys()
    for test, fragment in REFUSALS[key].items():
        assert fragment in refusals.message(test, key)


ENDS = {"test_cancel", "test_cancel_between_chunks", "test_a_failing_request_fails_alone"}
BATCHES = {
    "test_one_after_the_other",
    "test_prompts_that_begin_alike",
    "test_batch_invariance",
    "test_late_arrivals",
    "test_chunked_prefill",
    "test_mixed_knobs",
    "test_seeds",
}
ANSWERS = {"test_every_output_is_made", "test_a_stop_string_ends_the_text"}
REQUESTS = {"test_every_knob_counts", "test_what_cannot_be_served_is_refused", *ANSWERS}

RUNNING: dict[str, tuple[dict[str, str], set[str]]] = {
    # key → the tests that must fail, with what they say; tests that the defect may fail as well
    "sound": ({}, set()),
    "keeps_state": (
        {"test_one_after_the_other": "keep nothing about a request on itself"},
        {*ENDS, *BATCHES, "test_http_round_trip", "test_a_stop_string_ends_the_text"},
    ),
    "mixes_rows": (
        {"test_batch_invariance": "stream 'text' changed in a batch with other requests: alone ["},
        {*ENDS, *BATCHES, "test_http_round_trip"},
    ),
    "skips_state": (
        {"test_prompts_that_begin_alike": "because prompts before it on the same worker began alike"},
        {*BATCHES, *ENDS, "test_http_round_trip"},
    ),
    "forgets_chunks": (
        {"test_chunked_prefill": "changed when steps may have 3 tokens, so that its prompt is cut"},
        {*ENDS, "test_late_arrivals", "test_one_after_the_other", "test_prompts_that_begin_alike"},
    ),
    "mixes_phases": (
        {"test_late_arrivals": "changed because others arrived while it ran"},
        {*ENDS, "test_chunked_prefill"},
    ),
    "first_rows_knob": ({"test_mixed_knobs": "changed in a batch with requests of other knobs"}, set()),
    "asks_for_too_little": (
        {"test_requests_end_well": "a sample request failed"},
        {*ENDS, *BATCHES, *REQUESTS, "test_close", "test_http_round_trip"},
    ),
    "leaks_when_cut": (
        {"test_cancel_between_chunks": "but something of them is left: slots held by"},
        set(),
    ),
    "leaks_on_error": ({"test_a_failing_request_fails_alone": "but something of them is left"}, set()),
    "ignores_seed": ({"test_seeds": "with the same seed"}, {"test_mixed_knobs"}),
    "swallows_errors": (
        {"test_a_failing_request_fails_alone": "_Swallowing.forward caught an exception of its own forward pass"},
        set(),
    ),
    "leaks": (
        {
            "test_requests_end_well": "close() must free all that reserve() and open() took",
            "test_close": "the worker was closed after 1 steps, but something of them is left",
            "test_cancel": "slots held by",
        },
        {*ENDS, *BATCHES, *REQUESTS, "test_nodes_return_what_their_ports_say", "test_http_round_trip"},
    ),
    "crashes": (
        {"test_requests_end_well": "a sample request failed (internal_error): the model failed on this request: Zero"},
        {*ENDS, *BATCHES, *REQUESTS, "test_close", "test_http_round_trip", "test_nodes_return_what_their_ports_say"},
    ),
    "wrong_outputs": (
        {
            "test_http_round_trip": "the answer has text, which ModelSpec.outputs does not declare",
            "test_every_output_is_made": "ModelSpec.outputs declares 'audio', but none of 6 sample requests gave that",
        },
        set(),
    ),
    "unmade_output": (
        {"test_every_output_is_made": "ModelSpec.outputs declares 'audio', but none of 6 sample requests gave that"},
        set(),
    ),
    "ignores_stop": ({"test_a_stop_string_ends_the_text": "it should end before the first "}, set()),
    "goes_on": ({"test_a_stop_string_ends_the_text": "let the renderer set finished = 'stop'"}, set()),
    "refuses_stop": ({}, set()),
    "counts_nothing": ({"test_the_prompt_is_counted": "has prompt_tokens=0 (generate)"}, set()),
    "counts_messages": ({"test_the_prompt_is_counted": "and twice that text has 1 (generate)"}, set()),
    "misspelt_param": (
        {
            "test_requests_end_well": "the request lacks parameter 'shfit' (walk 'generate': call of 'lm': port "
            "'shift'); did you mean 'shift'?"
        },
        {*ENDS, *BATCHES, *REQUESTS, "test_close", "test_defaults_are_admitted", "test_http_round_trip"},
    ),
    "undeclared_resource": (
        {
            "test_requests_end_well": "entry 'forward' uses resource 'state', which it does not declare (it declares "
            "'kv', 'positions', 'sampler'): list it in Entry('forward', resources=(…, 'state'))",
            "test_batch_invariance": "The cause is that of test_",
        },
        {*ENDS, *BATCHES, *REQUESTS, "test_close", "test_http_round_trip"},
    ),
    "extra_row": (
        {
            "test_requests_end_well": "_ExtraRowNode.forward returned shape (2, 2) for port 'token', which is declared "
            "stacked (rows): expected 1 rows"
        },
        {*ENDS, *BATCHES, *REQUESTS, "test_close", "test_http_round_trip", "test_nodes_return_what_their_ports_say"},
    ),
    "breaks_off": (
        {
            "test_http_round_trip": "POST /generate was answered 500",
            "test_every_knob_counts": "its renderer raised ValueError: no more",
        },
        ANSWERS,
    ),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The whole suite on the sound model; on the others without what sends a hundred bad requests to a sound server."""
    others = [word for key in RUNNING if key != "sound" for word in ("--mstar-model", key)]
    sound = conformance(tmp_path_factory.mktemp("sound"), DEFECTS, "--mstar-model", "sound")
    broken = conformance(tmp_path_factory.mktemp("running"), DEFECTS, "-k", "not bad_requests", *others)
    return Report(sound.outcomes | broken.outcomes, sound.messages | broken.messages)


@pytest.mark.parametrize("key", RUNNING)
def test_wrong_behaviour_is_found(running: Report, key: str) -> None:
    certain, possible = RUNNING[key]
    assert certain.keys() <= running.failed(key) <= certain.keys() | possible
    for test, fragment in certain.items():
        assert fragment in running.message(test, key)


def test_bounds_that_only_the_schema_has_show_over_http(tmp_path: Path) -> None:
    report = conformance(tmp_path, DEFECTS, "--mstar-model", "unenforced", "-k", "bad_requests")
    assert "POST /generate accepts steps=0, which is outside of" in report.message("test_bad_requests", "unenforced")


# --- plugins ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugin", "test", "fragment"),
    [
        ("heavy", "test_imports_nothing_heavy", "importing 'broken_plugins.heavy' imports torch at "),
        ("heavy_hook", "test_imports_nothing_heavy", "calling its mstar_models imports torch at "),
        ("undocumented", "test_every_model_is_documented", "does not name wallflower, leak: say what each key serves"),
        ("typo", "test_plugin_is_used", "there is no hook 'mstar_model'; did you mean 'mstar_models'?"),
        ("hookless", "test_plugin_is_used", "has no mstar_… hook. To mend it: mark its functions"),
        ("absent", "test_plugin_is_used", "No module named 'broken_plugins.absent'"),
    ],
)
def test_a_wrong_plugin_is_found(tmp_path: Path, plugin: str, test: str, fragment: str) -> None:
    report = conformance(tmp_path, f"broken_plugins.{plugin}", "-k", "Plugin")
    assert report.failed() == {test}
    assert fragment in report.messages[test]
    if test == "test_imports_nothing_heavy":
        assert f"broken_plugins{os.sep}{plugin}.py:" in report.messages[test]


def test_the_sound_plugin_passes(tmp_path: Path) -> None:
    report = conformance(tmp_path, DEFECTS, "-k", "Plugin")
    assert report.failed() == set()
    assert list(report.outcomes.values()) == ["passed"] * 3
