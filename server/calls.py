"""Reads a parsed body of ``POST /generate`` into one checked value: a ``Call`` with its ``Prompt``s.

Everything is checked before any work is done for the request.  The table of fields is ``server.schemas``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from gtp_serve.engine.limits import (
    MAX_BIAS,
    MAX_BIASED,
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_LISTED,
    MAX_SALT_CHARS,
)
from gtp_serve.errors import RequestRejected
from gtp_serve.request import Grammar, LogprobOptions
from gtp_serve.server.schemas import (
    AT_DEFAULT,
    CALL,
    CALL_NUMBERS,
    EACH,
    KNOWN_CALL,
    KNOWN_SAMPLING,
    MAX_RID_CHARS,
    MAX_SEQUENCES,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TEXT_CHARS,
    MAX_TOKENS,
    SAMPLING,
    SAMPLING_AT_DEFAULT,
    Number,
    check_names,
    describe,
    read_number,
)

ANY_JSON_OBJECT = "$$ANY$$"
"""As ``json_schema``: SGLang's name for any JSON object."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One sequence that a call asks for (``n`` of them for each prompt): a text or ids."""

    rid: str
    text: str | None
    input_ids: tuple[int, ...] | None
    sampling: Sampling
    return_logprob: bool
    logprobs: LogprobOptions | None
    """What is wanted beside the chosen tokens' own; None: nothing."""
    sample: int
    """Which of the ``n`` replies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A whole ``/generate`` request, checked."""

    prompts: tuple[Prompt, ...]
    as_list: bool
    """The reply is a list."""
    stream: Literal[False, "cumulative", "delta"]
    return_text_in_logprobs: bool
    return_prompt_token_ids: bool
    return_routed_experts: bool
    routed_experts_start_len: int
    deadline_seconds: float | None
    cache_salt: str
    no_logs: bool


def parse_call(body: Mapping[str, Any], new_rid: Callable[[], str]) -> Call:
    """Hold a parsed body to the table.

    :param new_rid: names a request that has no ``rid``.
    :raises RequestRejected: naming the field, what is possible and, for a name, the nearest right one.
    """
    body = {name: value for name, value in body.items() if value is not None or name not in KNOWN_CALL}
    check_names(body, KNOWN_CALL, "", AT_DEFAULT)
    flags = {name: read_number(body, name, field, "") for name, field in (CALL | CALL_NUMBERS).items()}
    texts, ids, is_list = _read_prompts(body)
    count = len(texts or ids or ())
    sampling = _read_sampling(body.get("sampling_params", {}), count, is_list)
    stream = _read_stream(body.get("stream", False))
    several = is_list or any(one.n > 1 for one in sampling)
    total = sum(one.n for one in sampling)
    if total > MAX_SEQUENCES:
        raise RequestRejected(
            f"{total} replies in one call are too many",
            [("possible", f"prompts times n up to {MAX_SEQUENCES}")],
            param="sampling_params.n" if count <= MAX_SEQUENCES else "text" if texts else "input_ids",
        )
    rids = _read_rids(body.get("rid"), [one.n for one in sampling], is_list, new_rid)
    wanted = _read_logprobs(body, count, is_list)
    deadline = flags["deadline_seconds"]
    prompts = tuple(
        Prompt(
            rid=rids[index][sample],
            text=texts[index] if texts is not None else None,
            input_ids=ids[index] if ids is not None else None,
            sampling=sampling[index],
            return_logprob=wanted[index] is not None,
            logprobs=wanted[index],
            sample=sample,
        )
        for index in range(count)
        for sample in range(sampling[index].n)
    )
    return Call(
        prompts=prompts,
        as_list=several,
        stream=stream,
        return_text_in_logprobs=bool(flags["return_text_in_logprobs"]),
        return_prompt_token_ids=bool(flags["return_prompt_token_ids"]),
        return_routed_experts=bool(flags["return_routed_experts"]),
        routed_experts_start_len=int(flags["routed_experts_start_len"] or 0),
        deadline_seconds=None if deadline is None else float(deadline),
        cache_salt=_read_salt(body),
        no_logs=bool(flags["no_logs"]),
    )


def _read_prompts(
    body: Mapping[str, Any],
) -> tuple[list[str] | None, list[tuple[int, ...]] | None, bool]:
    """(texts, ids, whether a list was given); one of the two is None."""
    text, ids = body.get("text"), body.get("input_ids")
    if text is not None and ids is not None:
        raise RequestRejected("give either text or input_ids, not both", param="input_ids")
    if text is not None:
        is_list = isinstance(text, list)
        return _read_texts(text if is_list else [text], is_list), None, is_list
    if ids is not None:
        is_list = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
        return None, _read_ids(ids if is_list else [ids], is_list), is_list
    raise RequestRejected("a prompt is missing", [("send", "text or input_ids")], code="missing-field", param="text")


def _read_texts(texts: list[Any], is_list: bool) -> list[str]:
    _check_count(texts, "text")
    for index, text in enumerate(texts):
        param = f"text[{index}]" if is_list else "text"
        if not isinstance(text, str):
            wanted = "a string" if is_list else "a string or a list of strings"
            raise RequestRejected(f"{param} must be {wanted}, not {describe(text)}", param=param)
        if len(text) > MAX_TEXT_CHARS:
            raise RequestRejected(
                f"{param} has more than {MAX_TEXT_CHARS} characters", code="prompt-too-long", param=param
            )
    return texts


def _check_count(prompts: Sequence[object], param: str) -> None:
    if not prompts:
        raise RequestRejected(f"{param} is an empty list", code="empty-prompt", param=param)
    if len(prompts) > MAX_SEQUENCES:
        raise RequestRejected(
            f"{len(prompts)} prompts in one call are too many",
            [("possible", f"up to {MAX_SEQUENCES}")],
            param=param,
        )


def _read_ids(prompts: list[Any], is_list: bool) -> list[tuple[int, ...]]:
    _check_count(prompts, "input_ids")
    result = []
    for index, ids in enumerate(prompts):
        param = f"input_ids[{index}]" if is_list else "input_ids"
        if not isinstance(ids, list):
            raise RequestRejected(f"{param} must be a list of token ids, not {describe(ids)}", param=param)
        if not ids:
            raise RequestRejected(f"{param} has no tokens", code="empty-prompt", param=param)
        result.append(_read_token_ids(ids, param))
    return result


def _read_token_ids(ids: list[Any], param: str) -> tuple[int, ...]:
    if set(map(type, ids)) - {int}:
        at = next(index for index, value in enumerate(ids) if type(value) is not int)
        raise RequestRejected(f"{param}[{at}] must be a token id, not {describe(ids[at])}", param=param)
    if ids and (min(ids) < 0 or max(ids) > MAX_TOKENS):
        at = next(index for index, value in enumerate(ids) if not 0 <= value <= MAX_TOKENS)
        raise RequestRejected(f"{param}[{at}] is {ids[at]}, which is no token id", code="bad-token-id", param=param)
    return tuple(ids)


def _read_sampling(given: Any, count: int, is_list: bool) -> list[Sampling]:
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
    return _read_token_ids(value, param)


def _read_stream(value: Any) -> Literal[False, "cumulative", "delta"]:
    if isinstance(value, bool):
        return "cumulative" if value else False
    if value == "delta":
        return "delta"
    raise RequestRejected(f'stream must be true, false or "delta", not {describe(value)}', param="stream")


def _read_bias(value: Any, param: str) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise RequestRejected(f"{param} must be an object of token ids, not {describe(value)}", param=param)
    if len(value) > MAX_BIASED:
        raise RequestRejected(f"{param} has {len(value)} ids", [("possible", f"up to {MAX_BIASED}")], param=param)
    found: dict[int, float] = {}
    for name, bias in value.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= MAX_TOKENS):
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


def _read_salt(body: Mapping[str, Any]) -> str:
    """``extra_key`` and ``cache_salt`` as one value that no other pair gives."""
    parts = {}
    for name in ("extra_key", "cache_salt"):
        value = body.get(name, "")
        if not isinstance(value, str) or len(value) > MAX_SALT_CHARS:
            raise RequestRejected(
                f"{name} must be a string of at most {MAX_SALT_CHARS} characters, not {describe(value)}",
                param=name,
            )
        parts[name] = value
    key, salt = parts["extra_key"], parts["cache_salt"]
    return f"{len(key)}:{key}{salt}" if key else salt


def _read_logprobs(body: Mapping[str, Any], count: int, is_list: bool) -> list[LogprobOptions | None]:
    """What each prompt wants beside tokens; None: no log-probabilities."""
    wanted, starts, tops = (
        _read_each(body, name, EACH[name], count, is_list)
        for name in ("return_logprob", "logprob_start_len", "top_logprobs_num")
    )
    listed = _read_listed(body.get("token_ids_logprob"), count, is_list)
    processed = _read_mode(body.get("sampling_logprobs_mode"))
    result: list[LogprobOptions | None] = []
    for want, start, top, ids in zip(wanted, starts, tops, listed, strict=True):
        if not want and (top or ids):
            param = "top_logprobs_num" if top else "token_ids_logprob"
            raise RequestRejected(f"{param} needs return_logprob", [("send", "return_logprob: true")], param=param)
        options = LogprobOptions(
            top_n=int(top),
            token_ids=ids,
            prompt_start=None if start < 0 else int(start),
            processed=processed,
        )
        result.append(options if want else None)
    return result


def _read_each(
    body: Mapping[str, Any], name: str, field: Number, count: int, is_list: bool
) -> list[int | float | bool]:
    value = body.get(name, field.default)
    if isinstance(value, list):
        if not is_list or len(value) != count:
            raise RequestRejected(
                f"{name} as a list needs one value for each prompt of a list",
                [("saw", f"{len(value)} for {count}")],
                param=name,
            )
        values = value
    else:
        values = [value] * count
    return [read_number({name: one}, name, field, "") or 0 for one in values]


def _read_listed(value: Any, count: int, is_list: bool) -> list[tuple[int, ...]]:
    param = "token_ids_logprob"
    if value is None:
        return [()] * count
    each = is_list and isinstance(value, list) and bool(value) and all(isinstance(v, list | None) for v in value)
    if each and len(value) != count:
        raise RequestRejected(f"{param} needs one list for each prompt", param=param)
    found: list[tuple[int, ...]] = []
    for ids in value if each else [value]:
        if ids is not None and not isinstance(ids, list):
            raise RequestRejected(f"{param} must be a list of token ids, not {describe(ids)}", param=param)
        listed: list[Any] = ids or []
        if len(listed) > MAX_LISTED:
            raise RequestRejected(f"{param} has {len(listed)} ids", [("possible", f"up to {MAX_LISTED}")], param=param)
        found.append(_read_token_ids(listed, param))
    return found if each else found * count


def _read_mode(value: Any) -> bool:
    """Whether log-probabilities are of the distribution that was sampled from."""
    if value is None:
        return False
    if value not in ("raw", "processed"):
        raise RequestRejected('sampling_logprobs_mode must be "raw" or "processed"', param="sampling_logprobs_mode")
    return bool(value == "processed")


def _read_rids(value: Any, samples: Sequence[int], is_list: bool, new_rid: Callable[[], str]) -> list[list[str]]:
    """A name for each sample of each prompt, all different."""
    if value is None:
        bases = [new_rid() for _ in samples]
    elif isinstance(value, str):
        bases = [f"{value}_{index}" for index in range(len(samples))] if is_list else [value]
    elif isinstance(value, list) and is_list and len(value) == len(samples):
        bases = value
    else:
        raise RequestRejected("rid must be a string, or a list with one for each prompt of a list", param="rid")
    for base in bases:
        _check_rid(base)
    rids = [
        [f"{base}_{sample}" for sample in range(count)] if count > 1 else [base]
        for base, count in zip(bases, samples, strict=True)
    ]
    _check_distinct(rid for group in rids for rid in group)
    return rids


def _check_rid(rid: Any) -> None:
    if not isinstance(rid, str) or not 1 <= len(rid) <= MAX_RID_CHARS or not rid.isprintable():
        raise RequestRejected(f"rid must be 1 to {MAX_RID_CHARS} printable characters", param="rid")


def _check_distinct(rids: Iterable[str]) -> None:
    seen: set[str] = set()
    for rid in rids:
        if rid in seen:
            raise RequestRejected("two requests of this call have the same rid", code="duplicate-rid", param="rid")
        seen.add(rid)
