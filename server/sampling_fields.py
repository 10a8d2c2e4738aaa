"""Reads ``sampling_params`` of ``POST /generate``, field by field, into one checked ``Sampling``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gtp_serve.engine.limits import (
    MAX_ALLOWED,
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASED,
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
)
from gtp_serve.errors import RequestRejected
from gtp_serve.request import Grammar
from gtp_serve.server.schemas import (
    KNOWN_SAMPLING,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TOKENS,
    SAMPLING,
    SAMPLING_AT_DEFAULT,
    check_names,
    describe,
    read_number,
)

ANY_JSON_OBJECT = "$$ANY$$"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """``sampling_params`` of one prompt, checked.  Field names are the table's."""

    max_new_tokens: int
    max_is_default: bool
    """The client did not say, so the context may shorten it."""
    min_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    sampling_seed: int | None
    n: int
    ignore_eos: bool
    skip_special_tokens: bool
    no_stop_trim: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logit_bias: tuple[tuple[int, float], ...]
    """(token id, bias), ascending."""
    grammar: Grammar | None
    """As given: not compiled yet."""
    allowed_token_ids: tuple[int, ...]
    """Ascending; empty: all."""
    bad_words: tuple[str | tuple[int, ...], ...]
    """Texts, not tokenized yet, and sequences of ids."""


def read_sampling(given: Any, count: int, is_list: bool) -> list[Sampling]:
    """``sampling_params`` for ``count`` prompts: one object for all, or a list with one for each.

    :raises RequestRejected: naming the field at fault.
    """
    if isinstance(given, list):
        if not is_list or len(given) != count:
            raise RequestRejected(
                "sampling_params as a list needs one object for each prompt of a list",
                [("saw", f"{len(given)} for {count}")],
                param="sampling_params",
            )
        return [_read_one_sampling(one, f"sampling_params[{index}].") for index, one in enumerate(given)]
    return [_read_one_sampling(given, "sampling_params.")] * count


def _read_one_sampling(given: Any, prefix: str) -> Sampling:
    if given is None:
        given = {}
    if not isinstance(given, dict):
        raise RequestRejected(f"{prefix[:-1]} must be an object, not {describe(given)}", param=prefix[:-1])
    check_names(given, KNOWN_SAMPLING, prefix, SAMPLING_AT_DEFAULT)
    given = _rename_seed(given, prefix)
    values: dict[str, Any] = {name: read_number(given, name, field, prefix) for name, field in SAMPLING.items()}
    if values["min_new_tokens"] > values["max_new_tokens"]:
        least, most = values["min_new_tokens"], values["max_new_tokens"]
        raise RequestRejected(
            f"{prefix}min_new_tokens {least} is more than max_new_tokens {most}",
            param=f"{prefix}min_new_tokens",
        )
    return Sampling(
        max_is_default=given.get("max_new_tokens") is None,
        stop=_read_stops(given.get("stop"), f"{prefix}stop"),
        stop_token_ids=_read_stop_ids(given.get("stop_token_ids"), f"{prefix}stop_token_ids"),
        logit_bias=_read_bias(given.get("logit_bias"), f"{prefix}logit_bias"),
        grammar=_read_grammar(given, prefix),
        allowed_token_ids=_read_allowed(given.get("allowed_token_ids"), f"{prefix}allowed_token_ids"),
        bad_words=_read_bad_words(given.get("bad_words"), f"{prefix}bad_words"),
        **values,
    )


def _rename_seed(given: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """``seed`` is taken for ``sampling_seed``."""
    if given.get("seed") is None:
        return given
    if given.get("sampling_seed") is not None:
        raise RequestRejected("give either seed or sampling_seed, not both", param=f"{prefix}seed")
    read_number(given, "seed", SAMPLING["sampling_seed"], prefix)
    return {**given, "sampling_seed": given["seed"]}


def _read_stops(value: Any, param: str) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RequestRejected(f"{param} must be a string or a list of strings", param=param)
    if len(stops) > MAX_STOPS:
        raise RequestRejected(f"{param} has {len(stops)} strings", [("possible", f"up to {MAX_STOPS}")], param=param)
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise RequestRejected(
                f"{param} has a string of {len(stop)} characters",
                [("possible", f"1 to {MAX_STOP_CHARS}")],
                param=param,
            )
    return tuple(stops)


def _read_stop_ids(value: Any, param: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RequestRejected(f"{param} must be a list of token ids, not {describe(value)}", param=param)
    if len(value) > MAX_STOP_IDS:
        raise RequestRejected(f"{param} has {len(value)} ids", [("possible", f"up to {MAX_STOP_IDS}")], param=param)
    return read_token_ids(value, param)


def _read_allowed(value: Any, param: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ALLOWED:
        seen = f"{len(value)} of them" if isinstance(value, list) else describe(value)
        raise RequestRejected(f"{param} must be a list of 1 to {MAX_ALLOWED} token ids, not {seen}", param=param)
    return tuple(sorted({*read_token_ids(value, param)}))


def _read_bad_words(value: Any, param: str) -> tuple[str | tuple[int, ...], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_BAD_WORDS // 2:
        seen = f"{len(value)} of them" if isinstance(value, list) else describe(value)
        raise RequestRejected(f"{param} must be a list of up to {MAX_BAD_WORDS // 2} words, not {seen}", param=param)
    return tuple(_read_bad_word(word, f"{param}[{index}]") for index, word in enumerate(value))


def _read_bad_word(word: Any, param: str) -> str | tuple[int, ...]:
    if isinstance(word, list) and 1 <= len(word) <= MAX_BAD_WORD_IDS:
        return read_token_ids(word, param)
    if isinstance(word, str) and len(word) <= MAX_STOP_CHARS and word.strip():
        return word
    raise RequestRejected(
        f"{param} must be a text of 1 to {MAX_STOP_CHARS} characters, not only white space, "
        f"or a list of 1 to {MAX_BAD_WORD_IDS} token ids",
        param=param,
    )


def _read_bias(value: Any, param: str) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise RequestRejected(f"{param} must be an object of token ids, not {describe(value)}", param=param)
    if len(value) > MAX_BIASED:
        raise RequestRejected(f"{param} has {len(value)} ids", [("possible", f"up to {MAX_BIASED}")], param=param)
    found: dict[int, float] = {}
    for name, bias in value.items():
        # One spelling for each id: of "3" and "03", the last would win without a word.
        plain = name.isascii() and name.isdigit() and len(name) <= 10 and str(int(name)) == name
        if not (plain and int(name) <= MAX_TOKENS):
            raise RequestRejected(f"{param} has '{name[:40]}', which is no token id", code="bad-token-id", param=param)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise RequestRejected(
                f"{param} of {int(name)} must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}, not {describe(bias)}",
                param=param,
            )
        found[int(name)] = float(bias)
    return tuple(sorted(found.items()))


def _read_grammar(given: Mapping[str, Any], prefix: str) -> Grammar | None:
    """The one grammar that the output must match."""
    names = [name for name in ("json_schema", "regex", "ebnf", "choice") if given.get(name) is not None]
    if len(names) > 1:
        raise RequestRejected(
            f"give only one of {prefix}{' and '.join(names)}", code="bad-grammar", param=f"{prefix}{names[1]}"
        )
    if not names:
        return None
    name, value = names[0], given[names[0]]
    param = f"{prefix}{name}"
    if name == "choice":
        return _read_choice(value, param)
    if name == "json_schema" and isinstance(value, dict):
        value = _as_json(value, param)
    if not isinstance(value, str) or not value:
        wanted = "an object or a string" if name == "json_schema" else "a string"
        raise RequestRejected(f"{param} must be {wanted} that is not empty", param=param)
    if len(value) > MAX_GRAMMAR_CHARS:
        raise RequestRejected(
            f"{param} has {len(value)} characters",
            [("possible", f"up to {MAX_GRAMMAR_CHARS}")],
            code="bad-grammar",
            param=param,
        )
    if name == "json_schema":
        any_object = value == ANY_JSON_OBJECT
        return Grammar(kind="json_object") if any_object else Grammar(kind="json_schema", text=value)
    return Grammar(kind="regex" if name == "regex" else "lark", text=value)


def _as_json(value: dict[str, Any], param: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except (orjson.JSONEncodeError, RecursionError):
        raise RequestRejected(f"{param} is nested too deeply", code="bad-grammar", param=param) from None


def _read_choice(value: Any, param: str) -> Grammar:
    if (
        not isinstance(value, list)
        or not 1 <= len(value) <= MAX_CHOICES
        or not all(isinstance(one, str) and one for one in value)
    ):
        raise RequestRejected(f"{param} must be a list of 1 to {MAX_CHOICES} strings", param=param)
    return Grammar(kind="choice", text=orjson.dumps(value).decode())


def read_token_ids(ids: list[Any], param: str) -> tuple[int, ...]:
    """A list of token ids, each an integer that could be one.

    :raises RequestRejected: naming the element at fault.
    """
    if set(map(type, ids)) - {int}:
        at = next(index for index, value in enumerate(ids) if type(value) is not int)
        raise RequestRejected(f"{param}[{at}] must be a token id, not {describe(ids[at])}", param=param)
    if ids and (min(ids) < 0 or max(ids) > MAX_TOKENS):
        at = next(index for index, value in enumerate(ids) if not 0 <= value <= MAX_TOKENS)
        raise RequestRejected(f"{param}[{at}] is {ids[at]}, which is no token id", code="bad-token-id", param=param)
    return tuple(ids)
