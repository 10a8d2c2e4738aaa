"""Structured output: grammars by llguidance, their limits, and one parser a sequence that says which ids may follow.

What a grammar may cost is bounded here in size, in the compiler's and the parser's own fuel, and (by
``server.grammar_check``, for grammars of strangers) in time.  No torch.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from math import isfinite, prod
from typing import Any

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from gtp_serve.engine.control_tokens import named_by_id, unspelled
from gtp_serve.engine.limits import MAX_CHOICES, MAX_GRAMMAR_CHARS
from gtp_serve.engine.tool_grammar import ToolCalls, calls_lark
from gtp_serve.errors import RequestRejected
from gtp_serve.request import Grammar

MAX_SCHEMA_DEPTH = 64
"""Nested objects and lists of a JSON schema."""
MAX_MULTIPLE = 10_000
"""Product of all ``multipleOf`` of a schema, as whole numbers; the automaton that counts has so many states."""
MAX_CACHED = 64
"""Compiled grammars that are kept for the next request."""
COMPILE_THREADS = 1

_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
_JSON_OPTIONS: Mapping[str, Any] = {"whitespace_pattern": r"[ \n\t]{0,32}", "lenient": False}
"""Free white space, but no more than a model can come back from; an unknown keyword is an error."""
_NAMES = {
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "regex",
    "choice": "choice",
    "lark": "grammar",
    "tool_calls": "description of the tools",
}
_LARK_DIRECTIVE = re.compile(r"%(?!ignore\b)[a-z_]+")


def grammar_source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form.

    :raises RequestRejected: code ``bad-grammar``: too large, too deep, not valid on its surface.
    """
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise refused(f"the {_NAMES[grammar.kind]} has {len(grammar.text)} characters", f"up to {MAX_GRAMMAR_CHARS}")
    match grammar.kind:
        case "json_schema":
            return _json_source(_read_json(grammar))
        case "json_object":
            return _json_source({"type": "object"})
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            return LLMatcher.grammar_from_lark(_choice_lark(_read_json(grammar)))
        case "lark":
            return LLMatcher.grammar_from_lark(_checked_lark(grammar.text))
        case "tool_calls":
            return LLMatcher.grammar_from_lark(_tools_lark(_read_json(grammar)))


def plain_grammar(grammar: Grammar) -> Grammar:
    """The same grammar, with EBNF (``root ::= ...``) rewritten as Lark.

    :raises RequestRejected: when it is neither.
    """
    if grammar.kind != "lark" or "::=" not in grammar.text:
        return grammar
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise refused(f"the grammar has {len(grammar.text)} characters", f"up to {MAX_GRAMMAR_CHARS}")
    try:
        _refuse_directives(grammar.text)
        return Grammar(kind="lark", text=any_to_lark(grammar.text).replace("%llguidance {}", "", 1))
    except RequestRejected:
        raise
    except RecursionError:
        raise refused("the grammar is nested too deeply") from None
    except Exception as error:  # the package raises its own and bare ones
        raise refused(f"the grammar is neither Lark nor EBNF: {_brief(str(error))}") from None


def refused(message: str, possible: str = "") -> RequestRejected:
    """The error for a grammar that is not served."""
    return RequestRejected(message, [("possible", possible)] if possible else (), code="bad-grammar")


def _brief(text: str) -> str:
    return " ".join(text.replace("<non-verbose/>", "").split())[:300]


def _read_json(grammar: Grammar) -> Any:
    try:
        value = json.loads(grammar.text, object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except RecursionError:
        raise refused(f"the {_NAMES[grammar.kind]} is nested too deeply") from None
    except ValueError as error:
        raise refused(f"the {_NAMES[grammar.kind]} is not valid JSON: {error}") from None
    _check_depth(value, _NAMES[grammar.kind])
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice in one object")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError("a number is too large")
    return value


def _check_depth(value: Any, kind: str) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise refused(f"the {kind} is nested too deeply", f"up to {MAX_SCHEMA_DEPTH} levels")
        level = [inner for outer in level for inner in _inside(outer)]


def _inside(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in inner if isinstance(one, dict | list)]


def _json_source(schema: Any) -> str:
    if not isinstance(schema, dict | bool):
        raise refused("a JSON schema is an object")
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    _check_multiples(schema)
    # The options come last and win over a client's own "x-guidance".
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=dict(_JSON_OPTIONS))  # type: ignore[arg-type]


def _tools_lark(value: Any) -> str:
    _check_multiples(value)
    try:
        calls = msgspec.convert(value, ToolCalls)
        # As above, the options win over a client's own.
        return calls_lark(calls, lambda schema: f"%json {json.dumps({**schema, 'x-guidance': dict(_JSON_OPTIONS)})}")
    except (msgspec.ValidationError, ValueError) as error:
        raise refused(f"the {_NAMES['tool_calls']} is not valid: {error}") from None


def _check_multiples(value: Any) -> None:
    if prod(set(_multiples(value))) > MAX_MULTIPLE:
        raise refused("multipleOf is too large to be enforced", f"a product up to {MAX_MULTIPLE}")


def _multiples(value: Any) -> list[int]:
    """Each multipleOf without its decimal point."""
    found: list[int] = []
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            step = one.get("multipleOf")
            if isinstance(step, int | float) and not isinstance(step, bool):
                found.append(_digits(step))
        pending += _inside(one)
    return found


def _digits(step: int | float) -> int:
    try:
        digits = f"{abs(step):.12f}".replace(".", "").strip("0") or "1"
    except (OverflowError, ValueError):
        return MAX_MULTIPLE + 1
    return max(int(digits[:9]), abs(int(step))) if len(digits) <= 9 else MAX_MULTIPLE + 1


def _choice_lark(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise refused("a choice is a list of strings that are not empty")
    if len(choices) > MAX_CHOICES:
        raise refused(f"{len(choices)} choices", f"up to {MAX_CHOICES}")
    return "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)


def _checked_lark(text: str) -> str:
    _refuse_directives(text)
    return plain_grammar(Grammar(kind="lark", text=text)).text


def _refuse_directives(text: str) -> None:
    directive = _LARK_DIRECTIVE.search(text)
    if directive is not None:
        raise refused(f"'{directive.group()[:40]}' is not supported in a grammar", "rules, terminals and %ignore")


class GrammarCompiler:
    """Compiles grammars for one tokenizer, beside whatever else the process does.

    :param tokenizer_json: gives the text of ``tokenizer.json``; called once, on the compiling thread.
    :param vocab_size: ids of the model; those beyond the tokenizer's are in no grammar.
    :param eos_token_ids: the model's end tokens: allowed exactly where a grammar is complete.
    """

    def __init__(self, tokenizer_json: Callable[[], str], *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._tokenizer_json = tokenizer_json
        self._tokenizer: LLTokenizer | None = None
        self._control_ids: dict[str, int] = {}
        self._warming: threading.Timer | None = None
        self._pool = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        self._compiled: dict[Grammar, LLMatcher] = {}
        self.executor = LLExecutor(num_threads=2)

    def warm(self) -> Future[LLTokenizer]:
        """Read the tokenizer now, so that the first grammar need not wait for it."""
        return self._pool.submit(self._the_tokenizer)

    def warm_after(self, seconds: float) -> None:
        """``warm`` in so many seconds.

        It holds the interpreter for half a second in all, which a start is better without.
        """
        self._warming = threading.Timer(seconds, self._warm)
        self._warming.daemon = True
        self._warming.start()

    def _warm(self) -> None:
        with suppress(RuntimeError):  # closed meanwhile
            self.warm()

    def compile(self, grammar: Grammar) -> Future[GrammarParser]:
        """A parser at the grammar's start.  The future raises RequestRejected for a grammar that is not served."""
        return self._pool.submit(self._compile, grammar)

    def close(self) -> None:
        """Take nothing more; what is being compiled is not waited for."""
        if self._warming is not None:
            self._warming.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _the_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            text, self._control_ids = unspelled(self._tokenizer_json())
            self._tokenizer = LLTokenizer(text, n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids) or None)
        return self._tokenizer

    def _compile(self, grammar: Grammar) -> GrammarParser:
        matcher = self._compiled.pop(grammar, None)
        if matcher is None:
            matcher = self._new_matcher(grammar)
        self._compiled[grammar] = matcher  # the newest last
        if len(self._compiled) > MAX_CACHED:
            del self._compiled[next(iter(self._compiled))]
        return GrammarParser(matcher.deep_copy(), self)

    def _new_matcher(self, grammar: Grammar) -> LLMatcher:
        tokenizer = self._the_tokenizer()
        if grammar.kind == "lark":
            grammar = Grammar(kind="lark", text=named_by_id(grammar.text, self._control_ids))
        try:
            matcher = LLMatcher(tokenizer, grammar_source(grammar), log_level=0, limits=_LIMITS)
        except RequestRejected:
            raise
        except BaseException as error:  # its Rust code may panic, which is no Exception and would pass every handler
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise refused(f"the {_NAMES[grammar.kind]} is not supported: {_brief(str(error))}") from error
        if not matcher.is_error():
            matcher.deep_copy().compute_bitmask()  # finds what only the first step meets
        if matcher.is_error():
            raise refused(f"the {_NAMES[grammar.kind]} is not supported: {_brief(matcher.get_error())}")
        return matcher


class GrammarParser:
    """Where one sequence is in its grammar."""

    def __init__(self, matcher: LLMatcher, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._fed = 0
        self.matcher = matcher

    def feed(self, tokens: Sequence[int], prompt_len: int) -> None:
        """Bring the parser up to the output, ``tokens[prompt_len:]``, of which it takes what is new."""
        new = list(tokens[prompt_len + self._fed :])
        self._fed += len(new)
        if new:
            self.matcher.consume_tokens(new)

    @property
    def complete(self) -> bool:
        """The output matches the whole grammar."""
        return not self.failed and self.matcher.is_accepting()

    @property
    def failed(self) -> bool:
        """A limit was met, or an id that the grammar does not allow."""
        return self.matcher.is_error()

    def settle(
        self,
        mask_W: NDArray[np.int32],
        *,
        end_ids: Sequence[int],
        banned: Sequence[int],
        allowed_W: NDArray[np.int32] | None = None,
    ) -> bool:
        """Correct a mask that the matcher filled in; returns whether any id is left.

        :param mask_W: 32 ids in each word.
        :param end_ids: ids that end this sequence: allowed where the grammar is complete, and the model's own end
            tokens nowhere else.
        :param banned: ids that must not be chosen now.
        :param allowed_W: a mask of the ids that can be chosen at all; None: of all.
        """
        if self.failed:
            return False
        if self.complete:
            for token in end_ids:
                _set(mask_W, token)
        for token in {*self._compiler.eos_token_ids} - {*end_ids}:
            _clear(mask_W, token)
        for token in banned:
            _clear(mask_W, token)
        if allowed_W is not None:
            mask_W &= allowed_W
        return bool(mask_W.any())


def mask_of(ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """A mask with these ids."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def fill_masks(executor: LLExecutor, parsers: Sequence[GrammarParser], vocab_size: int) -> NDArray[np.int32]:
    """One mask for each parser, [parsers, words of 32 ids]; drops the interpreter lock while it works."""
    words = -(-vocab_size // 32)
    masks = np.zeros((len(parsers), words), np.int32)
    jobs = [(parser.matcher, row) for row, parser in enumerate(parsers) if not parser.failed]
    if jobs:
        executor.unsafe_compute_mask_ptr(jobs, masks.ctypes.data, 4 * words, len(parsers))
    return masks


def _set(mask_W: NDArray[np.int32], token: int) -> None:
    view = mask_W.view(np.uint32)
    view[token // 32] |= np.uint32(1 << token % 32)


def _clear(mask_W: NDArray[np.int32], token: int) -> None:
    view = mask_W.view(np.uint32)
    view[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
