"""Overrides, the order of references, and the error that lists what was tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from mstar.spec.errors import SetupError, WeightsError
from mstar.spec.knobs import Knobs
from mstar.spec.model import Licence, ModelSpec, WeightsRef
from mstar.weights.sources import PathSource, SourceContext, WeightSource, parse_override, resolve_weights


class Failing(WeightSource):
    def resolve(self, ref: WeightsRef, context: SourceContext) -> Path:
        raise WeightsError(f"no luck with {ref.id}")


class Licensed(WeightSource):
    """Answers with a folder named after the licence that it was told."""

    def resolve(self, ref: WeightsRef, context: SourceContext) -> Path:
        assert context.licence is not None
        return Path(context.licence.name)


def sources(name: str) -> type[WeightSource]:
    known: dict[str, type[WeightSource]] = {"failing": Failing, "path": PathSource, "licensed": Licensed}
    if name not in known:
        raise SetupError(f"unknown weight source {name!r}")
    return known[name]


def spec(*refs: WeightsRef) -> ModelSpec:
    return ModelSpec("tiny", "tiny", "", refs, Licence("MIT"), "m:M", "p:P", Knobs)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    return folder


def context(tmp_path: Path) -> SourceContext:
    return SourceContext(cache=tmp_path / "cache")


def test_the_first_reference_that_works_wins(tmp_path: Path, checkpoint: Path) -> None:
    said: list[str] = []
    where = SourceContext(cache=tmp_path, say=said.append)
    refs = spec(WeightsRef("failing", "a", "1"), WeightsRef("path", str(checkpoint)), WeightsRef("failing", "never"))
    assert resolve_weights(refs, None, sources, where) == checkpoint
    assert said == ["failing a @ 1 did not work, trying the next place."]


def test_all_failures_are_listed_with_the_remedy(tmp_path: Path) -> None:
    refs = spec(WeightsRef("failing", "a", "1"), WeightsRef("gone", "b"), WeightsRef("path", str(tmp_path / "none")))
    with pytest.raises(WeightsError) as caught:
        resolve_weights(refs, None, sources, context(tmp_path))
    message = str(caught.value)
    for part in (
        "'tiny'",
        "failing a @ 1: no luck",
        "unknown weight source 'gone'",
        "there is no folder",
        "--weights DIR",
    ):
        assert part in message


def test_a_bug_in_a_source_is_not_taken_for_missing_weights(tmp_path: Path) -> None:
    class Buggy(WeightSource):
        def resolve(self, ref: WeightsRef, context: SourceContext) -> Path:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        resolve_weights(spec(WeightsRef("x", "y")), None, lambda name: Buggy, context(tmp_path))


def test_an_override_is_tried_alone(tmp_path: Path, checkpoint: Path) -> None:
    fallback = spec(WeightsRef("licensed", "x"))
    assert resolve_weights(fallback, str(checkpoint), sources, context(tmp_path)) == checkpoint
    with pytest.raises(WeightsError, match="there is no folder"):
        resolve_weights(fallback, str(tmp_path / "wrong"), sources, context(tmp_path))


def test_sources_learn_the_licence(tmp_path: Path) -> None:
    assert resolve_weights(spec(WeightsRef("licensed", "x")), None, sources, context(tmp_path)) == Path("MIT")


def test_a_model_without_weights(tmp_path: Path) -> None:
    assert resolve_weights(spec(), None, sources, context(tmp_path)) is None


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("owner/name", WeightsRef("hub", "owner/name")),
        ("owner/na.me-1@v1.0", WeightsRef("hub", "owner/na.me-1", "v1.0")),
        ("owner/name@refs/pr/1", WeightsRef("hub", "owner/name", "refs/pr/1")),
        ("./owner/name", WeightsRef("path", "./owner/name")),
        ("/a/b", WeightsRef("path", "/a/b")),
        ("~/a", WeightsRef("path", "~/a")),
    ],
)
def test_override_spellings(text: str, ref: WeightsRef) -> None:
    assert parse_override(text) == ref


@pytest.mark.parametrize("text", ["name", "a/b/c", "owner/name@", "", "owner/na me"])
def test_what_is_neither_folder_nor_hub_id(text: str) -> None:
    with pytest.raises(WeightsError, match="OWNER/NAME"):
        parse_override(text)


def test_an_existing_folder_wins_over_a_hub_id(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent.parent)
    relative = f"{checkpoint.parent.name}/{checkpoint.name}"
    assert parse_override(relative) == WeightsRef("path", relative)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [((), "found nothing"), (("readme.md",), "found readme.md"), (("model.gguf",), "GGUF")],
)
def test_folders_that_are_no_checkpoint(tmp_path: Path, files: tuple[str, ...], complaint: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    with pytest.raises(WeightsError, match=complaint):
        PathSource().resolve(WeightsRef("path", str(folder)), context(tmp_path))


def test_weights_one_level_down_are_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "pipeline" / "vae").mkdir(parents=True)
    (tmp_path / "pipeline" / "vae" / "model.safetensors").touch()
    folder = PathSource().resolve(WeightsRef("path", str(tmp_path / "pipeline")), context(tmp_path))
    assert folder == tmp_path / "pipeline"


def test_a_file_is_no_folder(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="is a file"):
        PathSource().resolve(WeightsRef("path", str(checkpoint / "model.safetensors")), context(tmp_path))
