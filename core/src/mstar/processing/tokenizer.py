"""A model's tokenizer and chat template, from its folder, without torch.

Why not ``AutoTokenizer``: it imports torch and takes seconds to import (4.2 s against 0.1 s), and the API side shall
need neither. A ``tokenizer.json`` holds the whole tokenizer (normaliser, model, post-processor, decoder), and the
``tokenizers`` library reads it directly; a chat template is a Jinja template with a few documented helpers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from mstar.processing.bpe_files import read_bpe
from mstar.processing.token_bytes import token_speller
from mstar.processing.user_text import UserText
from mstar.spec.errors import RequestError, SetupError

__all__ = ["ChatTemplate", "TextTokenizer", "read_json"]

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_SHOWN = 8
"""Names of a folder that is not a model's, in the error that says so."""


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in file *name*, empty when there is no such file. Raises ``SetupError`` when it is broken."""
    path = folder / name
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SetupError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise SetupError(f"{path}: expected a JSON object")
    return content


def _content(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "") or "nothing"


class TextTokenizer:
    """Text to ids and back. Thread-safe.

    :param folder: holds ``tokenizer.json`` (or, of Qwen's models, the older ``vocab.json`` and ``merges.txt``) and,
        where the model has them, ``tokenizer_config.json``, ``special_tokens_map.json``, ``chat_template.jinja``,
        ``generation_config.json`` and ``config.json``.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = read_json(folder, "tokenizer_config.json")
        self._tokenizer = self._read()
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._user_text = UserText(self._tokenizer)
        self._alone: dict[tuple[int, ...], str] = {}  # at most the vocabulary
        self.special_tokens = _special_tokens(self.config, read_json(folder, "special_tokens_map.json"))
        sources = _template_sources(folder, self.config)
        # compiled now: a broken template stops the start, not every request
        self.chat_template = ChatTemplate(sources, self.special_tokens) if sources else None

    def _read(self) -> Tokenizer:
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            older = read_bpe(self.folder, self.config)
            if older is not None:
                return older
            if not any((self.folder / name).is_file() for name in ("config.json", "tokenizer_config.json")):
                there = _content(self.folder)
                raise SetupError(f"{path} is missing: {self.folder} holds no model of texts, but {there}")
            raise SetupError(
                f"{path} is missing. A model in an older layout can be converted once with transformers: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        try:
            found: Tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a file that it cannot read
            raise SetupError(f"{path}: {error}") from error
        return found

    @property
    def vocab_size(self) -> int:
        """Ids are below this. The model's logits may be wider (padding) or narrower."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def id_of(self, token: str) -> int | None:
        """The id of exactly this token, or ``None``."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """*special*: add the tokens that the tokenizer puts around a text (a beginning-of-text token)."""
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        except TypeError:
            raise _lone_surrogate() from None

    def encode_around(self, before: str, written: str, after: str) -> list[int]:
        """Ids of three texts in one, of which a client wrote the second: special tokens in it are text."""
        try:
            marked, marks = self._user_text.mark(written)
        except TypeError:
            raise _lone_surrogate() from None
        text = before + marked + after
        return self._user_text.encode(text, marks) if marks else self.encode(text, special=False)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        if len(ids) > 1 or not skip_special:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special))
        # every token of every answer is decoded alone once, as the next one's left context
        text = self._alone.get(tuple(ids))
        if text is None:
            text = self._alone[tuple(ids)] = str(self._tokenizer.decode(list(ids)))
        return text

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each of *ids* as the vocabulary writes it (``"Ġthe"``); the empty string for one that it lacks."""
        return [self._tokenizer.id_to_token(token) or "" for token in ids]

    @cached_property
    def token_bytes(self) -> Callable[[int], bytes]:
        """The bytes that a token stands for; see :mod:`mstar.processing.token_bytes`."""
        return token_speller(self._tokenizer)

    def vocabulary(self) -> list[bytes]:
        """:attr:`token_bytes` of all ids."""
        return [self.token_bytes(token) for token in range(self.vocab_size)]

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: what ``generation_config.json`` says, else ``config.json``, else the tokenizer."""
        for name in ("generation_config.json", "config.json"):
            content = read_json(self.folder, name)
            value = content.get("eos_token_id", content.get("text_config", {}).get("eos_token_id"))
            if value is not None:
                return tuple(value) if isinstance(value, list) else (int(value),)
        found = self.id_of(self.special_tokens.get("eos_token", ""))
        return () if found is None else (found,)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        trusted: Collection[str] = (),
        **variables: Any,
    ) -> list[int]:
        """Ids of a conversation. See :meth:`ChatTemplate.render`.

        Special tokens are the template's: what *messages* and *tools* spell like one is text.

        :param trusted: special tokens that a processor has put into messages itself (placeholders of pictures), after
            making sure that no client wrote them.
        """
        if self.chat_template is None:
            raise RequestError("this model has no chat template", param="messages")
        try:
            (messages, tools), marks = self._user_text.mark((messages, tools), trusted)
        except TypeError:
            raise _lone_surrogate() from None
        text = self.chat_template.render(messages, tools, **variables)
        return self._user_text.encode(text, marks) if marks else self.encode(text, special=False)


def _lone_surrogate() -> RequestError:
    """The library's ``TypeError`` for half a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return RequestError("the text is not valid Unicode: it holds a lone surrogate")


class ChatTemplate:
    """A Hugging Face chat template (or several by name: ``default``, ``tool_use``), rendered in Jinja's sandbox.

    :param sources: name → template text. :param variables: what every rendering sees (``bos_token``…).
    :ivar text: of all templates. :ivar reads: names of the variables that they look at.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, Any]):
        environment = _environment()
        self._variables = dict(variables)
        self.text = "\n".join(sources.values())
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise SetupError(f"the chat template is broken at line {error.lineno}: {error.message}") from None
        trees = [environment.parse(text) for text in sources.values()]
        self.reads = frozenset().union(*map(jinja2.meta.find_undeclared_variables, trees))

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **variables: Any
    ) -> str:
        """The conversation as text. *messages* are plain data, as in OpenAI's API, with ``content`` a string.

        :param variables: ``add_generation_prompt`` (default true) and whatever else the template reads.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        known = {"add_generation_prompt": True, "documents": None, **self._variables, **variables}
        try:
            return self._templates[name].render(messages=list(messages), tools=list(tools) or None, **known)
        except (jinja2.TemplateError, TypeError) as error:
            # A template refuses by raising; a missing or ill-typed field ends in one of these two.
            raise RequestError(f"the chat template refused the messages: {error}", param="messages") from None


def _special_tokens(config: Mapping[str, Any], fallback: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL:
        token = config.get(name) or fallback.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    value = config.get("chat_template") or read_json(folder, "chat_template.json").get("chat_template")
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        if "default" not in named:
            raise SetupError(f"{folder}: of the chat templates {sorted(named)} none is named 'default'")
        return named
    return {"default": value} if value else {}


def _environment() -> ImmutableSandboxedEnvironment:
    """What published templates expect: trimmed blocks, loop controls, plain JSON, ``raise_exception``, a clock."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML and non-ASCII text, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
