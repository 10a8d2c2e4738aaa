"""Reads what a caller of ``LLM`` wants: prompts in their forms, sampling as keywords, mapping or SamplingParams."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import msgspec

from gtp_serve.completion import TextRules
from gtp_serve.errors import UsageError
from gtp_serve.request import Grammar, SamplingParams

Prompt = str | Sequence[int]
Prompts = Prompt | Sequence[Prompt]
SamplingForm = SamplingParams | Mapping[str, Any]

_T = TypeVar("_T")

_SAMPLING = tuple(SamplingParams.__struct_fields__)
_TEXT = tuple(field.name for field in fields(TextRules))
_GRAMMARS = ("json_schema", "regex", "choice", "lark")
_NAMES = (*_SAMPLING, *_TEXT, *_GRAMMARS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """How one prompt is answered."""

    sampling: SamplingParams
    text: TextRules
    max_is_default: bool
    """``max_new_tokens`` was not given, so the context may shorten it."""


def read_prompts(prompts: Prompts) -> list[Prompt]:
    """One or several texts or lists of ids, as a list.

    :raises UsageError: for anything else.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise _no_prompt(prompts)
    if prompts and all(_is_id(one) for one in prompts):
        return [[int(one) for one in prompts]]  # type: ignore[arg-type]  # just checked
    return [_read_prompt(one) for one in prompts]


def _read_prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if _is_list(prompt) and all(_is_id(one) for one in prompt):
        return [int(one) for one in prompt]
    raise _no_prompt(prompt)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _no_prompt(value: object) -> UsageError:
    return UsageError(
        f"a prompt is a text or a list of token ids, not {type(value).__name__}",
        [("for messages", "LLM.chat"), ("for arrays", "prompt.tolist()")],
    )


def read_wanted(
    sampling: SamplingForm | Sequence[SamplingForm] | None, options: Mapping[str, Any], count: int
) -> list[Wanted]:
    """How each of ``count`` prompts is answered.

    :param sampling: for all prompts, or one for each.
    :param options: keywords, which win over ``sampling``.
    :raises UsageError: for a name that does not exist, a value of the wrong type, or a list of another length.
    """
    if sampling is None or isinstance(sampling, SamplingParams | Mapping):
        return [_read_one(sampling or {}, options)] * count
    if len(sampling) != count:
        raise UsageError(f"there are {count} prompts and {len(sampling)} sampling parameters")
    return [_read_one(one, options) for one in sampling]


def _read_one(sampling: SamplingForm, options: Mapping[str, Any]) -> Wanted:
    given = _all_fields(sampling) if isinstance(sampling, SamplingParams) else dict(sampling)
    given |= options
    for name in given:
        if name not in _NAMES:
            near = difflib.get_close_matches(str(name), _NAMES, n=1, cutoff=0.5)
            raise UsageError(f"unknown sampling parameter '{name}'", [("did you mean", near[0])] if near else ())
    given |= _read_grammar(given)
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    text = _convert({name: given[name] for name in _TEXT if name in given}, TextRules)
    if "" in text.stop:
        raise UsageError("a stop string is empty", [("needed", "1 character or more")])
    return Wanted(
        sampling=_convert({name: given[name] for name in _SAMPLING if name in given}, SamplingParams),
        text=text,
        max_is_default="max_new_tokens" not in given,
    )


def _all_fields(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in _SAMPLING}


def _read_grammar(given: Mapping[str, Any]) -> dict[str, Any]:
    """``grammar`` out of its short forms."""
    named = [name for name in ("grammar", *_GRAMMARS) if given.get(name) is not None]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)} exclude each other")
    if not named or named == ["grammar"]:
        return {}
    (kind,) = named
    value = given[kind]
    try:
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{kind} cannot be written as JSON: {error}", [("needed", "a text or JSON")]) from error
    return {"grammar": _convert({"kind": kind, "text": text}, Grammar)}


def _convert(values: dict[str, Any], kind: type[_T]) -> _T:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"a sampling parameter is not what it must be: {error}") from error
