"""``mstar license``: terms are shown, consent is kept, and it ends when the terms change."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest

from mstar.licences import accept, accepted_by, check_licence, read_acceptances
from mstar.settings import Settings
from mstar.spec.errors import SetupError
from mstar.spec.knobs import SamplingKnobs
from mstar.spec.model import Licence, ModelSpec

Run = Callable[..., tuple[int, str, str]]


def spec(key: str = "closed", **licence: object) -> ModelSpec:
    terms = Licence(**{"name": "Toy-NC", "url": "https://toys.example", "permissive": False, **licence})  # type: ignore[arg-type]
    return ModelSpec(
        key=key, family="toy", summary="", weights=(), licence=terms, model="a:B", processor="a:C", knobs=SamplingKnobs
    )


@pytest.mark.parametrize("word", ["license", "licence"])
def test_list(mstar: Run, word: str) -> None:
    status, out, _ = mstar(word, "list")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert status == 0
    assert "not needed" in lines["toy-chat"]
    assert lines["toy-closed"].split() == ["toy-closed", "Toy-NC", "no", "no", "no", "https://toys.example/terms"]


def test_accept_is_recorded_and_honoured(mstar: Run, tmp_path: Path) -> None:
    refused = mstar("download", "toy-closed", HF_HUB_OFFLINE="1")
    assert refused[0] == 2
    assert "run `mstar license accept toy-closed`" in refused[2]
    status, out, err = mstar("license", "accept", "toy-closed")
    assert status == 0
    assert "the terms of the weights of 'toy-closed': Toy-NC (https://toys.example/terms), which do not allow" in err
    (record,) = json.loads((tmp_path / "config" / "licences.json").read_text())["accepted"]
    assert (record["terms"], record["plugin"], record["version"]) == ("Toy-NC", "cli_toys", "extra module")
    assert record["accepted_at"] in out
    fact = json.loads(mstar("license", "show", "toy-closed", "--json")[1])
    assert (fact["accepted"], fact["accepted_at"]) == ("record", record["accepted_at"])
    after = mstar("download", "toy-closed", HF_HUB_OFFLINE="1")
    assert "is not (wholly) in the Hub's cache" in after[2], "it went on to look for the weights"


def test_accepting_what_needs_no_consent_records_nothing(mstar: Run, tmp_path: Path) -> None:
    status, _, err = mstar("license", "accept", "toy-chat")
    assert (status, "the licence of 'toy-chat' is permissive (Apache-2.0): there is nothing to accept" in err) == (
        0,
        True,
    )
    assert not (tmp_path / "config").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("show", "toy-closde"), "did you mean 'toy-closed'"),
        (("show",), "which model?"),
        (("accpt", "toy-closed"), "did you mean 'accept'"),
        (("list", "toy-closed"), "`mstar license show KEY` shows one"),
    ],
)
def test_faults(mstar: Run, words: tuple[str, ...], sentence: str) -> None:
    status, _, err = mstar("license", *words)
    assert (status, sentence in err) == (2, True), err


def test_a_gated_model_without_a_token_stops_before_the_hub_is_asked(
    mstar: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    status, _, err = mstar("download", "toy-gated")
    assert status == 2
    assert "toys/toy-gated is gated and there is no token: accept its terms on " in err
    assert "'hf auth login'" in err


def test_consent_ends_when_the_terms_change(tmp_path: Path) -> None:
    settings = Settings(config=tmp_path)
    accept(spec(), "toys", "1.0", settings)
    assert accepted_by(spec(), settings) == "record"
    changed = spec(name="Toy-NC-2")
    assert accepted_by(changed, settings) is None
    with pytest.raises(SetupError, match=r"changed since you accepted Toy-NC \(https://toys.example\)"):
        check_licence(changed, settings)
    check_licence(changed, dataclasses.replace(settings, accept_licences=("closed",)))


@pytest.mark.parametrize("text", ["{", "[]", '{"accepted": [{"key": "closed"}]}'])
def test_a_damaged_record_is_not_taken_for_consent(tmp_path: Path, text: str) -> None:
    (tmp_path / "licences.json").write_text(text)
    with pytest.raises(SetupError, match=r"licences\.json cannot be read"):
        check_licence(spec(), Settings(config=tmp_path))


def _accept_some(folder: str, first: int) -> None:
    for number in range(first, first + 5):
        accept(spec(f"model-{number}"), "toys", "1.0", Settings(config=Path(folder)))


def test_processes_lose_no_record_to_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_accept_some, args=(str(tmp_path), first)) for first in (0, 5, 10)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(read_acceptances(Settings(config=tmp_path))) == 15
    assert not list(tmp_path.glob("*.partial"))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="cannot be recorded"):
        accept(spec(), "toys", "1.0", Settings(config=tmp_path / "file"))
