"""``hub``: weights from the Hugging Face Hub (or a mirror of it), at a pinned revision."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

from mstar.spec.errors import WeightsError
from mstar.spec.model import WeightsRef
from mstar.weights.parts import assembled, part_refs
from mstar.weights.sources import SourceContext, WeightSource, check_checkpoint

__all__ = ["HubSource"]

_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.txt", "*.model")
"""Safetensors, configurations and every form of tokenizer: not the copies of the weights in other formats."""


class HubSource(WeightSource):
    """Downloads a snapshot into the Hub library's own cache, which other programs share; goes on where a download broke
    off. A cached snapshot of a pinned revision is used without asking the Hub.

    Options of a reference: ``allow`` and ``ignore``, lists of file patterns, for layouts other than safetensors;
    ``parts``, further repositories that become folders of this one (:mod:`mstar.weights.parts`).
    """

    def resolve(self, ref: WeightsRef, context: SourceContext) -> Path:
        unknown = ref.options.keys() - {"allow", "ignore", "parts"}
        if unknown:
            raise WeightsError(f"hub {ref.id}: unknown options in the model's spec: {', '.join(sorted(unknown))}")
        if context.gated and not context.offline and self.present(ref, context) is None:
            _check_token(ref, context)
        context.say(f"Looking for {ref.id} in the Hub's cache" + ("." if context.offline else " and on the Hub."))
        folder = _snapshot(ref, context)
        check_checkpoint(folder)
        parts = {name: part for name, part in part_refs(ref).items() if not (folder / name).exists()}
        open_to_all = replace(context, gated=False)  # what the spec says of the gate is said of the model's own
        return assembled(context.cache, folder, {name: self.resolve(part, open_to_all) for name, part in parts.items()})

    def present(self, ref: WeightsRef, context: SourceContext) -> Path | None:
        """Reads the layout of the Hub's cache, which is documented, without importing the library."""
        folder = self._present(ref, context)
        if folder is None:
            return None
        parts: dict[str, Path] = {}
        for name, part in part_refs(ref).items():
            found = folder / name if (folder / name).exists() else self._present(part, context)
            if found is None:
                return None
            parts[name] = found
        return assembled(context.cache, folder, parts)

    def _present(self, ref: WeightsRef, context: SourceContext) -> Path | None:
        if context.hub_cache is None:
            return None
        repository = context.hub_cache / f"models--{ref.id.replace('/', '--')}"
        pointer = repository / "refs" / (ref.revision or "main")
        commit = pointer.read_text(encoding="ascii").strip() if pointer.is_file() else ref.revision
        folder = repository / "snapshots" / (commit or "main")
        return folder if folder.is_dir() and _is_whole(folder) else None


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot has its weights: those that its index names, or any when there is no index."""
    try:
        indexes = (*folder.glob("*.safetensors.index.json"), *folder.glob("*/*.safetensors.index.json"))
        for index in indexes:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            if not all((index.parent / shard).is_file() for shard in shards):
                return False
        check_checkpoint(folder)
    except (WeightsError, OSError, ValueError, KeyError):
        return False
    return True


def _check_token(ref: WeightsRef, context: SourceContext) -> None:
    """Weights behind a gate are not even asked for without a token."""
    from huggingface_hub import get_token

    if context.token is None and get_token() is None:
        raise WeightsError(
            f"{ref.id} is gated and there is no token: accept its terms on {_page(ref, context)}, then give a token "
            "of that account (HF_TOKEN, or 'hf auth login')"
        )


def _page(ref: WeightsRef, context: SourceContext) -> str:
    return f"{context.endpoint or 'https://huggingface.co'}/{ref.id}"


def _say_once() -> None:
    """Where logging is set up, the library's own handler would print each of its lines a second time."""
    if logging.getLogger().handlers:
        logging.getLogger("huggingface_hub").handlers.clear()


def _snapshot(ref: WeightsRef, context: SourceContext) -> Path:
    # Imported here: the library reads its environment when it is imported, and takes a moment.
    from huggingface_hub import errors, snapshot_download

    _say_once()
    try:
        return Path(
            snapshot_download(
                ref.id,
                revision=ref.revision,
                cache_dir=context.hub_cache,
                token=context.token,
                endpoint=context.endpoint,
                local_files_only=context.offline,
                allow_patterns=list(ref.options.get("allow", _FILES)),
                ignore_patterns=list(ref.options.get("ignore", ())),
            )
        )
    except errors.GatedRepoError as error:
        raise WeightsError(
            f"{ref.id} is gated: accept its terms on {_page(ref, context)}, then give a token of that "
            "account (HF_TOKEN, or 'hf auth login')"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise WeightsError(
            f"the Hub has no model {ref.id!r}, or it is private (then give a token that may read it: HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise WeightsError(f"{ref.id} has no revision {ref.revision!r}") from error
    except errors.HFValidationError as error:
        raise WeightsError(f"{ref.id!r} is not a Hub id (OWNER/NAME): {error}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise WeightsError(_absent(ref, context, error)) from error
    except Exception as error:
        # What a broken connection raises depends on the library's version and its HTTP client.
        raise WeightsError(f"downloading {ref.id} failed ({type(error).__name__}: {error}); try again") from error


def _absent(ref: WeightsRef, context: SourceContext, error: Exception) -> str:
    if context.offline:
        return f"{ref.id} is not (wholly) in the Hub's cache, and fetching it is off (offline mode)"
    reason = str(error).strip().splitlines()[0]
    place = context.endpoint or "the Hub"
    return f"{ref.id} is not in the Hub's cache, and {place} does not answer as it should ({reason})"
