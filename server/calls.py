"""Reads a parsed body of ``POST /generate`` into one checked value: a ``Call`` with its ``Prompt``s.

Everything is checked before any work is done for the request.  The table of fields is ``server.schemas``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gtp_serve.engine.limits import (
    MAX_LISTED,
    MAX_SALT_CHARS,
)
from gtp_serve.errors import RequestRejected
from gtp_serve.request import LogprobOptions
from gtp_serve.server.sampling_fields import Sampling, read_sampling, read_token_ids
from gtp_serve.server.schemas import (
    AT_DEFAULT,
    CALL,
    CALL_NUMBERS,
    EACH,
    KNOWN_CALL,
    MAX_RID_CHARS,
    MAX_SEQUENCES,
    MAX_TEXT_CHARS,
    Number,
    check_names,
    describe,
    read_number,
)

"""As ``json_schema``: SGLang's name for any JSON object."""


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
    sampling = read_sampling(body.get("sampling_params", {}), count, is_list)
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
        result.append(read_token_ids(ids, param))
    return result


def _read_stream(value: Any) -> Literal[False, "cumulative", "delta"]:
    if isinstance(value, bool):
        return "cumulative" if value else False
    if value == "delta":
        return "delta"
    raise RequestRejected(f'stream must be true, false or "delta", not {describe(value)}', param="stream")


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
        found.append(read_token_ids(listed, param))
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
