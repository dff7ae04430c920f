"""The processor of causal language models: chats, completions and plain texts in, text out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mstar.processing.answer_form import with_answer_form
from mstar.processing.channels import Channels, ReasoningTags
from mstar.processing.constraints import checked_grammar
from mstar.processing.sampling_defaults import checkpoint_defaults, with_defaults
from mstar.processing.stops import StopStrings
from mstar.processing.text import TextRenderer
from mstar.processing.tokenizer import TextTokenizer, read_json
from mstar.processing.tool_calls import ToolFormat, tool_format_of
from mstar.resources.grammars import GrammarCompiler
from mstar.spec.errors import RequestError, SetupError
from mstar.spec.knobs import SamplingKnobs, TextOptions
from mstar.spec.processor import Prepared, Processor, ProcessorContext
from mstar.spec.request import EngineRequest, SamplingParams
from mstar.spec.tasks import ChatTask, CompletionTask, GenerateTask, Message, Part, Task, Text

__all__ = ["Limits", "TextProcessor", "sampling_params"]

_UNSUPPORTED = "unsupported_parameter"
_TAIL = 16
"""Tokens that hold the end of a chat's prompt: a role, line breaks, the tag of a thought."""
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
DEFAULT_MAX_TOKENS: int = TextOptions.model_fields["default_max_tokens"].default


@dataclass(frozen=True)
class Limits:
    """What bounds a text request. *context*: tokens of prompt and answer together; *vocab*: ids are below it."""

    context: int
    vocab: int
    default_max_tokens: int = DEFAULT_MAX_TOKENS

    @classmethod
    def read(cls, folder: Path, vocab: int, options: TextOptions) -> Limits:
        """From ``config.json`` (or its ``text_config``) and the deployment's *options*. *vocab*: used when the file
        does not say."""
        config = read_json(folder, "config.json")
        text = {**config, **config.get("text_config", {})}
        context = options.max_tokens or text.get("max_position_embeddings")
        if not isinstance(context, int):
            raise SetupError(f"{folder / 'config.json'} has no max_position_embeddings: set model_kwargs.max_tokens")
        if context < 2:
            raise SetupError(f"a context of {context} tokens has no room for a prompt and an answer: set at least 2")
        return cls(context, int(text.get("vocab_size", vocab)), options.default_max_tokens)

    def answer(self, prompt: int, asked: int | None, param: str) -> int:
        """Tokens that the answer to a prompt of *prompt* tokens may have. *param*: the prompt's field."""
        room = self.context - prompt
        if room < 1 or (asked is not None and asked > room):
            wanted = f"{prompt} tokens of prompt" + (f" and max_tokens {asked}" if asked is not None else "")
            raise RequestError(
                f"{wanted} do not fit: this model's context is {self.context} tokens for prompt and answer together",
                param=param if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        return asked if asked is not None else min(self.default_max_tokens, room)


_CONSTRAINED = frozenset({"chat", "completion"})
"""Abilities whose routes take constraints."""


@dataclass(frozen=True)
class _Rendering:
    """What rendering an answer takes of its prompt: ids that are no part of the answer, and the prompt's last ids."""

    hidden: tuple[int, ...]
    tail: tuple[int, ...]


class TextProcessor(Processor):
    """Prepares a request with input ``prompt`` (int64 ``[T]``) and sampling parameters for ``sampler``; renders stream
    ``text``. A family's knobs must be :class:`~mstar.spec.knobs.SamplingKnobs` or a subclass.

    *What a family overrides.* :meth:`template_content`, if messages hold more than text. :meth:`prompt_ids`, if the
    prompt is more than the text (a prefix, a mode's token, placeholders for pictures): its answer is checked against
    the context and becomes ``prompt``. :meth:`prepare`, if the request has more inputs, or another name for the prompt:
    call ``super().prepare(…)`` and change ``request.inputs``, ``request.sampling`` or ``request.params`` of what it
    returns. :meth:`renderer`, if other streams are to be rendered.

    *Chats.* Knobs that the chat template reads (``enable_thinking``) are handed to it by name, but for ``None``: then
    the template's own default holds. Thoughts and calls of tools are told apart from the text
    (:mod:`mstar.processing.channels`) where the template knows them.

    *Sampling.* What a request does not say is what the checkpoint's ``generation_config.json`` says
    (:mod:`mstar.processing.sampling_defaults`), else the default of the family's knobs.

    *Where the knobs are.* ``task.knobs`` is an instance of the spec's knobs class, validated: ``task.knobs.language``.
    They are in ``request.params`` as well, for the graph's :class:`~mstar.spec.graph.Param` and for routes. What the
    operator sets for all requests is in ``context.options`` (:class:`~mstar.spec.knobs.TextOptions` or a subclass).
    """

    reasoning: ReasoningTags | None = None
    """The tags around the model's thoughts; default: those of its chat template."""

    tool_format: type[ToolFormat] | None = None
    """How the model writes calls; default: the format of its chat template."""

    trusted: tuple[str, ...] = ()
    """Special tokens that the processor itself puts into messages (placeholders of pictures); elsewhere what a client
    wrote is text, whatever it spells."""

    def __init__(self, context: ProcessorContext):
        super().__init__(context)
        if context.weights is None:
            raise SetupError(f"{context.spec.key}: this model needs weights; name a folder or a Hub id with --weights")
        self.tokenizer = TextTokenizer(context.weights)
        template = self.tokenizer.chat_template
        if template is not None:
            self.reasoning = self.reasoning or ReasoningTags.of(template.text)
            self.tool_format = self.tool_format or tool_format_of(template.text)
        self.limits = Limits.read(context.weights, self.tokenizer.vocab_size, TextOptions.of(context.options))
        self.defaults = checkpoint_defaults(context.weights)
        self.grammars = GrammarCompiler(self.tokenizer.vocabulary, self.limits.vocab)

    def warm(self) -> None:
        """The library for constraints, where a client may ask for one: its import would hold up all running streams."""
        if self.tokenizer.stop_ids and not _CONSTRAINED.isdisjoint(self.context.spec.abilities):
            self.grammars.load()

    def prepare(self, task: Task, request_id: str) -> Prepared:
        task = replace(task, knobs=with_defaults(task.knobs, self.defaults))
        ids, param = self.prompt_ids(task)
        if not ids:
            raise RequestError(f"{param} is empty", param=param)
        stop_ids, tail = self.tokenizer.stop_ids, tuple(ids[-_TAIL:])
        formed = with_answer_form(task, self.tool_format, self.reasoning, self._thinks(tail))
        grammar = checked_grammar(formed, self.grammars, stop_ids)
        params = sampling_params(task, len(ids), param, self.limits, stop_ids, grammar)
        request = EngineRequest(
            id=request_id,
            inputs={"prompt": np.array(ids, dtype=np.int64)},
            params=task.knobs.model_dump(),
            sampling={"sampler": params},
            want=task.want,
            session=task.session,
            tenant=task.tenant,
            cache_salt=task.tenant,
        )
        hidden = () if params.ignore_eos else params.stop_token_ids
        return Prepared(request, prompt_tokens=len(ids), state=_Rendering(hidden, tail))

    def renderer(self, task: Task, prepared: Prepared) -> TextRenderer:
        state: _Rendering = prepared.state
        return TextRenderer(
            self.tokenizer.decode, hidden=state.hidden, channels=self.channels(task, self._thinks(state.tail))
        )

    def channels(self, task: Task, thinking: bool) -> Channels:
        """What tells thoughts, text and calls apart in the answer to *task*.

        :param thinking: the prompt ends in the middle of a thought.
        """
        stops = StopStrings(task.stop, task.include_stop)
        if isinstance(task, CompletionTask):
            return Channels(stops)
        if not isinstance(task, ChatTask):
            return Channels(stops, self.reasoning, thinking)
        tools = self.tool_format(task.tools) if self.tool_format and _usable(task) else None
        return Channels(stops, self.reasoning, thinking, tools, single=not task.parallel_tool_calls)

    def _thinks(self, tail: Sequence[int]) -> bool:
        """Whether a prompt with this *tail* ends in the middle of a thought."""
        return self.reasoning is not None and self.reasoning.open_in(self.tokenizer.decode(tail, skip_special=False))

    def token_bytes(self, token: int) -> bytes:
        """For log-probabilities: the bytes that *token* stands for."""
        return self.tokenizer.token_bytes(token)

    # --- tokens for clients -------------------------------------------------------------------------------------------
    @property
    def max_model_len(self) -> int:
        return self.limits.context

    def tokenize(self, task: ChatTask | CompletionTask, special: bool = True) -> list[int]:
        if not special and isinstance(task, CompletionTask) and isinstance(task.prompt, str):
            return self.tokenizer.encode(task.prompt, special=False)
        return self.prompt_ids(task)[0]

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(self._checked(ids, "tokens"), skip_special=False)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return self.tokenizer.tokens(ids)

    # --- prompts ------------------------------------------------------------------------------------------------------
    def prompt_ids(self, task: Task) -> tuple[list[int], str]:
        """The prompt's ids, and the name of the field that it came from, for errors about its length.

        Called once by :meth:`prepare`, for every kind of task; *task* has the knobs. A family's own may change the task
        before, or the ids after::

            ids, field = super().prompt_ids(task)
            return [self.modes[task.knobs.mode], *ids], field

        :raises RequestError: *task* cannot be read.
        """
        if isinstance(task, ChatTask):
            return self._chat(task), "messages"
        if isinstance(task, CompletionTask):
            return self._completion(task.prompt), "prompt"
        if isinstance(task, GenerateTask):
            return self._generate(task), "text"
        raise RequestError(f"this model does not serve {type(task).__name__}", code="unsupported_task")

    def _chat(self, task: ChatTask) -> list[int]:
        if not task.messages:
            raise RequestError("messages is empty", param="messages")
        if self.tokenizer.chat_template is None:
            other = next((a for a in ("completion", "generate") if a in self.context.spec.abilities), None)
            hint = {"completion": ": use /v1/completions", "generate": ": use /generate"}.get(other or "", "")
            raise RequestError(f"this model has no chat template{hint}", param="messages", code="unsupported_task")
        if task.tools and "tools" not in self.tokenizer.chat_template.reads:
            raise RequestError("tools: this model's chat template does not know any", param="tools", code=_UNSUPPORTED)
        messages = [
            _plain_message(message, i, self.template_content(message.content, f"messages[{i}].content"))
            for i, message in enumerate(task.messages)
        ]
        tools = task.tools if _usable(task) else ()
        return self.tokenizer.encode_chat(
            messages,
            tools,
            add_generation_prompt=task.add_generation_prompt,
            trusted=self.trusted,
            **self._template_variables(task),
        )

    def template_content(self, parts: Sequence[Part], where: str) -> str | list[dict[str, Any]]:
        """What the chat template gets as the content of a message of *parts*: by default their text. A family whose
        template writes placeholders of media gives a list of parts instead, in the template's own form.

        :param where: the parts' place in the request, for errors.
        :raises RequestError: one of *parts* is nothing that the model takes.
        """
        return _text_of(parts, where)

    def _template_variables(self, task: Task) -> dict[str, Any]:
        """The knobs that the chat template reads. One that is ``None`` is not told, so that the template decides."""
        reads = () if self.tokenizer.chat_template is None else self.tokenizer.chat_template.reads
        return {name: value for name, value in task.knobs if name in reads and value is not None}

    def _generate_content(self, task: GenerateTask) -> str | list[dict[str, Any]]:
        """Media come before the text, texts behind it."""
        parts = self.template_content(task.parts, "parts")
        if isinstance(parts, str):
            return task.text + parts
        return [*parts, {"type": "text", "text": task.text}] if task.text else parts

    def _completion(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt) if prompt else []
        return self._checked(prompt, "prompt")

    def _checked(self, ids: Sequence[int], param: str) -> list[int]:
        for i, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.limits.vocab:
                raise RequestError(
                    f"{param}[{i}]: {token!r} is no token id (0 to {self.limits.vocab - 1})", param=f"{param}[{i}]"
                )
        return list(ids)

    def _generate(self, task: GenerateTask) -> list[int]:
        if task.live:
            raise RequestError(f"this model takes no live input {task.live[0]!r}", param="live")
        if self.tokenizer.chat_template is None:
            text = task.text + _text_of(task.parts, "parts")
            return self.tokenizer.encode(text) if text else []
        content = self._generate_content(task)
        if not content:
            return []
        return self.tokenizer.encode_chat(
            [{"role": "user", "content": content}], trusted=self.trusted, **self._template_variables(task)
        )


def _usable(task: ChatTask) -> bool:
    """Whether the answer may call any tool."""
    return bool(task.tools) and task.tool_choice != "none"


def _text_of(parts: Sequence[Part], where: str) -> str:
    for i, part in enumerate(parts):
        if not isinstance(part, Text):
            raise RequestError(
                f"{where}[{i}]: this model reads text only, not {type(part).__name__.lower()}",
                param=f"{where}[{i}]",
                code="unsupported_modality",
            )
    return "".join(part.text for part in parts if isinstance(part, Text))


def _plain_message(message: Message, index: int, content: str | list[dict[str, Any]]) -> dict[str, Any]:
    """As chat templates read it: its *content*, a tool call's arguments as an object, no empty fields.

    OpenAI renamed ``system`` to ``developer``; templates know the old word.
    """
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content,
    }
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        where = f"messages[{index}].tool_calls"
        plain["tool_calls"] = [_plain_call(call, f"{where}[{i}]") for i, call in enumerate(message.tool_calls)]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _plain_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function", {})
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}: function must be an object", param=f"{where}.function")
    function = dict(function)
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            field = f"{where}.function.arguments"
            raise RequestError(f"{field!r} are not valid JSON: {error}", param=field) from None
    return {**call, "function": function}


def sampling_params(
    task: Task,
    prompt_tokens: int,
    prompt_param: str,
    limits: Limits,
    stop_ids: Sequence[int],
    grammar: str | None = None,
) -> SamplingParams:
    """The engine's sampling parameters for *task*, or a ``RequestError`` that names the field at fault.

    :param grammar: the task's constraint: see :func:`~mstar.processing.constraints.checked_grammar`.
    """
    knobs = task.knobs
    if not isinstance(knobs, SamplingKnobs):
        raise TypeError(f"the knobs of a text model must derive from SamplingKnobs, not {type(knobs).__name__}")
    _check_stop(task.stop)
    if task.logprobs is not None and not 0 <= task.logprobs <= MAX_LOGPROBS:
        raise RequestError(f"logprobs: 0 to {MAX_LOGPROBS} alternatives, got {task.logprobs}", param="logprobs")
    max_tokens = limits.answer(prompt_tokens, knobs.max_tokens, prompt_param)
    if knobs.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens {knobs.min_tokens} is more than the answer's {max_tokens} tokens", param="min_tokens"
        )
    return SamplingParams(
        temperature=knobs.temperature,
        top_k=knobs.top_k,
        top_p=knobs.top_p,
        min_p=knobs.min_p,
        repetition_penalty=knobs.repetition_penalty,
        frequency_penalty=knobs.frequency_penalty,
        presence_penalty=knobs.presence_penalty,
        logit_bias=_checked_bias(task.logit_bias, limits.vocab),
        seed=knobs.seed,
        max_tokens=max_tokens,
        min_tokens=knobs.min_tokens,
        stop_token_ids=tuple(stop_ids),
        ignore_eos=knobs.ignore_eos,
        logprobs=task.logprobs,
        grammar=grammar,
    )


def _check_stop(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"stop: at most {MAX_STOP_STRINGS} strings, got {len(stop)}", param="stop")
    for i, text in enumerate(stop):
        if not text:
            raise RequestError(f"stop[{i}] is empty", param=f"stop[{i}]")


def _checked_bias(bias: Mapping[int, float], vocab: int) -> dict[int, float]:
    for token, value in bias.items():
        if not 0 <= token < vocab:
            raise RequestError(f"logit_bias: {token} is no token id (0 to {vocab - 1})", param="logit_bias")
        if not math.isfinite(value) or abs(value) > 100:
            raise RequestError(f"logit_bias: -100 to 100 for token {token}, got {value}", param="logit_bias")
    return dict(bias)
