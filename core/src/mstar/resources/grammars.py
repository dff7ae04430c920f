"""Constraints compiled for a vocabulary, by xgrammar.

Both sides use it: the processor to refuse an unsound constraint before anything is scheduled, the sampler to ask what
may come next. The library takes seconds to import, with torch and transformers, and holds up whatever else its process
does meanwhile. That happens at the first constraint, or before (:meth:`GrammarCompiler.load`).

Grammars are compiled without the masks of their states, which are made and kept as answers come to them: a schema with
1000 properties compiles in a tenth of a second instead of 90 s, and the first mask of a state costs 2 ms at most.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from mstar.resources.bounded_calls import BoundedCalls
from mstar.spec.constraints import (
    Choice,
    Constraint,
    EbnfGrammar,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTag,
    decode_constraint,
)
from mstar.spec.errors import RequestError

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher, TokenizerInfo
    from xgrammar import GrammarCompiler as XGrammarCompiler

__all__ = ["GrammarCompiler", "Matcher"]

_CACHE_BYTES = 256 << 20
"""Memory that compiled grammars may keep in one process."""

_WHITESPACE = 32
"""Most blanks and line ends in a row between the parts of JSON: a model that may go on with them for ever sometimes
does."""


_AT_ONCE = 2
"""Compilations that run at the same time: nothing can stop one, so what a client sends must not pile up."""


_AT_MOST_S, _EACH_S = 1.0, 0.02
"""How long following a constraint may hold up a step, and the time that each call adds to what is left of that: so one
answer costs everyone else a second, and then 20 ms a token, at most. A mask takes a millisecond."""

_MAY_TAKE_LONG = re.compile(
    r'"(?:regex|pattern|grammar|patternProperties|m(?:in|ax)(?:Length|Items|Properties))"\s*:|"type"\s*:\s*"qwen_xml'
)
"""Of a constraint as JSON. What is repeated a counted number of times, or can be read in several ways, may take the
library seconds a token to follow, and the more the further an answer gets: a first mask does not show it."""


class Matcher:
    """How far one answer is in its grammar.

    A stop token is allowed where the grammar may be complete, and nothing else where it must be.

    :param begun: the library's matcher, which is waited for at the first use.
    :param bounded: follows it for so long as :data:`_AT_MOST_S` says; ``None``: for one that cannot take long.
    """

    def __init__(self, begun: Future[GrammarMatcher], bounded: BoundedCalls | None = None):
        self._begun, self._bounded = begun, bounded
        self._left = _AT_MOST_S

    def mask(self, row: npt.NDArray[np.int32]) -> None:
        """Write which tokens may come next into *row*, int32 ``[ceil(vocab / 32)]``: bit ``i % 32`` of word ``i // 32``
        is set when token *i* may. Nothing that comes later depends on it.

        :raises RequestError: no token may.
        """
        matcher = self._matcher()
        if self._bounded is None:
            _fill(matcher, row)
            return
        found = np.empty_like(row)  # of its own: a call that was given up still writes
        self._in_time(self._bounded, lambda: _fill(matcher, found))
        row[:] = found

    def accept(self, token: int) -> None:
        """*token*, one of those that :meth:`mask` allowed, has been generated."""
        matcher = self._matcher()
        if self._bounded is None:
            _accept(matcher, token)
        else:
            self._in_time(self._bounded, lambda: _accept(matcher, token))

    def _in_time(self, bounded: BoundedCalls, call: Callable[[], None]) -> None:
        """*call*, if there is time left; none is left behind one that took too long."""
        began = time.monotonic()
        if self._left <= 0 or not bounded.run(call, self._left):
            self._left = 0.0
            raise RequestError(
                "the constraint takes too long to follow: make it simpler, with fewer or smaller counted repetitions",
                param="response_format",
                code="constraint_too_slow",
            )
        self._left = min(_AT_MOST_S, self._left + _EACH_S - (time.monotonic() - began))

    def _matcher(self) -> GrammarMatcher:
        try:
            return self._begun.result()
        except RuntimeError as error:  # nobody checked it
            raise _refusal(error, "response_format") from None


def _accept(matcher: GrammarMatcher, token: int) -> None:
    if not matcher.is_terminated() and not matcher.accept_token(token):
        raise ValueError(f"token {token} is not one that the constraint allows here")


def _fill(matcher: GrammarMatcher, row: npt.NDArray[np.int32]) -> None:
    row.fill(0)
    if matcher.is_terminated():  # the answer goes on behind its end: ignore_eos
        for token in matcher.stop_token_ids:
            row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
    elif not matcher.fill_next_token_bitmask(row[None]):
        row.fill(-1)  # everything may come
    if not row.any():
        raise RequestError(
            "the constraint cannot go on from here: no token of the vocabulary continues it",
            param="response_format",
            code="unsatisfiable_constraint",
        )


class GrammarCompiler:
    """Compiles constraints for one vocabulary. Thread-safe; equal constraints are compiled once.

    :param tokens: called at the first constraint, for the bytes that each token stands for; an empty one is never
        generated inside of a constraint. :param vocab: size of the logits, which may be more or less than tokens.
    """

    def __init__(self, tokens: Callable[[], Sequence[bytes]], vocab: int):
        self._tokens, self._vocab = tokens, vocab
        self._lock = threading.Lock()
        self._turns = threading.Semaphore(_AT_ONCE)
        self._compiler: XGrammarCompiler | None = None
        self._bounded = BoundedCalls()

    def check(self, constraint: Constraint, stop_ids: Sequence[int], param: str, seconds: float) -> None:
        """Whether an answer that ends with one of *stop_ids* can begin under *constraint*.

        :param seconds: the most that compiling and the first mask may take, the time to load the library not counted.
        :raises RequestError: it is unsound, uses what the library cannot do, allows nothing, or takes too long.
        """
        self.load()
        compiling = self.start(constraint, stop_ids)
        try:
            compiling.result(timeout=seconds)
        except TimeoutError:
            if compiling.cancel():
                raise RequestError(
                    "too many constraints are being compiled; try again later",
                    param=param,
                    code="overloaded",
                    status=503,
                    type="server_error",
                ) from None
            raise RequestError(
                f"{param}: takes more than {seconds:g} s to compile; make it simpler",
                param=param,
                code="unsupported_value",
            ) from None
        except RequestError as error:
            error.param = param
            raise
        except RuntimeError as error:
            raise _refusal(error, param) from None

    def matcher(self, grammar: str, stop_ids: Sequence[int]) -> Matcher:
        """A fresh matcher for :attr:`~mstar.spec.request.SamplingParams.grammar`, compiled beside the caller.

        :param stop_ids: ids beyond the vocabulary are left out. :raises RequestError: none is left; or too many such
            constraints have been given up and still run.
        """
        stops = [i for i in dict.fromkeys(stop_ids) if 0 <= i < self._vocab]
        if not stops:
            raise RequestError(
                "structured output needs a stop token, to end when the constraint is complete, and this model has none",
                param="response_format",
                code="unsupported_value",
            )
        if _MAY_TAKE_LONG.search(grammar) is None:
            return Matcher(self.start(decode_constraint(grammar), stops))
        if self._bounded.lost >= _AT_ONCE:
            raise RequestError(
                "constraints that took too long are still being followed; try again later",
                param="response_format",
                code="overloaded",
                status=503,
                type="server_error",
            )
        return Matcher(self.start(decode_constraint(grammar), stops), self._bounded)

    def start(self, constraint: Constraint, stop_ids: Sequence[int]) -> Future[GrammarMatcher]:
        """Compile, and make the first mask, in a thread of its own: the library lets other threads run meanwhile."""
        future: Future[GrammarMatcher] = Future()

        def work() -> None:
            with self._turns:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    future.set_result(self._begin(constraint, stop_ids))
                except BaseException as error:
                    future.set_exception(error)

        threading.Thread(target=work, name="grammar", daemon=True).start()
        return future

    def _begin(self, constraint: Constraint, stop_ids: Sequence[int]) -> GrammarMatcher:
        from xgrammar import GrammarMatcher

        matcher = GrammarMatcher(self._compile(constraint), override_stop_tokens=list(stop_ids))
        _fill(matcher, np.empty(-(-self._vocab // 32), np.int32))
        return matcher

    def load(self) -> None:
        """Import the library and give it the vocabulary, unless that has been done."""
        self._loaded()

    def _loaded(self) -> XGrammarCompiler:
        with self._lock:
            if self._compiler is None:
                import xgrammar

                self._compiler = xgrammar.GrammarCompiler(
                    self._tokenizer_info(),
                    max_threads=1,
                    cache_limit_bytes=_CACHE_BYTES,
                    enable_dynamic_compilation=True,
                )
            return self._compiler

    def _tokenizer_info(self) -> TokenizerInfo:
        from xgrammar import TokenizerInfo, VocabType

        tokens = list(self._tokens())[: self._vocab]
        # Each request names its own stop tokens; without any, the library would guess.
        return TokenizerInfo(tokens, VocabType.RAW, vocab_size=self._vocab, stop_token_ids=[])

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        compiler = self._loaded()
        match constraint:
            case JsonObject():
                found = self._schema({"type": "object"}, strict=False)
            case JsonSchema(schema):
                found = self._schema(schema.schema, strict=schema.strict is not False)
            case Regex(regex):
                found = compiler.compile_regex(regex)
            case Choice(choice):
                found = compiler.compile_grammar("root ::= " + " | ".join(map(_literal, choice)))
            case EbnfGrammar(grammar):
                found = compiler.compile_grammar(grammar)
            case StructuralTag(form):
                found = compiler.compile_structural_tag(_json({"type": "structural_tag", "format": form}))
        return found

    def _schema(self, schema: Any, strict: bool) -> CompiledGrammar:
        return self._loaded().compile_json_schema(_json(schema), strict_mode=strict, max_whitespace_cnt=_WHITESPACE)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _literal(text: str) -> str:
    """*text* as EBNF's string."""
    return json.dumps(text, ensure_ascii=False)


def _refusal(error: RuntimeError, param: str) -> RequestError:
    """What the library said, without the place in its own source."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error)).strip()
    text = re.sub(r"^Check failed: .*? is false: ", "", text)
    return RequestError(f"{param}: {text.rstrip('.')}", param=param)
