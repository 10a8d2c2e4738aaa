"""Reads what the bodies of OpenAI's routes have in common, and says it as a call of ``/generate``.

Values are checked by the readers of ``/generate``; what they refuse is told in the names of this API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gtp_serve.errors import PromptTooLong, RequestRejected
from gtp_serve.request import Grammar
from gtp_serve.server.answer import new_rid
from gtp_serve.server.calls import Call, parse_call
from gtp_serve.server.fields import check_names, read_choice, read_text
from gtp_serve.server.openai.fields import (
    CALLED,
    GRAMMARS,
    MAX_NAME_CHARS,
    OPTION_NUMBERS,
    OPTIONS_AT_DEFAULT,
    SAMPLED,
    AtDefault,
    synonyms_of,
)
from gtp_serve.server.sampling_fields import ANY_JSON_OBJECT
from gtp_serve.server.schemas import MAX_TOKENS, Number, check_at_default, describe, read_number

TOO_LONG = "This model's maximum context length was exceeded"
"""Clients look for these words."""
_OURS = re.compile(
    r"sampling_params\.(?P<inside>\w+)"
    r"|\b(?P<plain>max_new_tokens|min_new_tokens|top_logprobs_num|input_ids|return_logprob|sampling_seed|rid)\b"
    r"|^(?P<start>text)\b"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Fields of ``/generate`` under their names here."""

    names: Mapping[str, str]

    def explain(self, error: BaseException) -> BaseException:
        """The same error in these names; what it quotes of the client's own names stays."""
        if not isinstance(error, RequestRejected) or error.code == "unknown-field":
            return error
        error.message = _OURS.sub(self._renamed, error.message)
        error.details = tuple((label, _OURS.sub(self._renamed, text)) for label, text in error.details)
        if error.param is not None:
            error.param = _OURS.sub(self._renamed, error.param)
        if isinstance(error, PromptTooLong) and not error.message.startswith(TOO_LONG):
            error.message = f"{TOO_LONG}: {error.message}"
        return error

    def _renamed(self, found: re.Match[str]) -> str:
        ours = found["inside"] or found["plain"] or found["start"]
        return self.names.get(ours, ours)


def names_here(prompt: str, logprobs: str, grammar: str = "structured_outputs", most: str = "max_tokens") -> Names:
    """Names of a route.

    :param prompt: the field that the prompt comes from.
    :param logprobs: the field that asks for other tokens' log-probabilities.
    :param grammar: the field that a grammar came from.
    :param most: the field that limits the reply.
    """
    grammars = dict.fromkeys(("json_schema", "regex", "ebnf", "choice", "tool_calls"), grammar)
    others = {"text": prompt, "input_ids": prompt, "top_logprobs_num": logprobs, "return_logprob": "logprobs"}
    others["max_new_tokens"] = most
    return Names(names={ours: theirs for theirs, ours in {**SAMPLED, **CALLED}.items()} | grammars | others)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What an answer is to hold beside the text."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: int | None
    """So many other tokens at each of the reply's; None: no log-probabilities."""
    prompt_logprobs: int | None
    echo: bool
    token_ids: bool
    weight_versions: bool
    tokens_as_ids: bool
    warning: str | None = None


def read_fields(
    body: Mapping[str, Any], names: Sequence[str], at_default: AtDefault, numbers: Mapping[str, Number]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the body without nulls, its numbers and flags).

    :raises RequestRejected: for a name that there is not, and for what is only taken at its default.
    """
    check_names(body, names, synonyms=synonyms_of(names))
    given = {name: value for name, value in body.items() if value is not None}
    check_at_default(given, "", at_default)
    read_text(given, "model", limit=MAX_NAME_CHARS)
    return given, {name: read_number(given, name, field, "") for name, field in numbers.items()}


def read_wanted(
    given: Mapping[str, Any], numbers: Mapping[str, Any], *, logprobs: int | None, echo: bool = False
) -> Wanted:
    """The answer's shape."""
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise RequestRejected(f"stream_options must be an object, not {describe(options)}", param="stream_options")
    check_names(options, [*OPTION_NUMBERS, *OPTIONS_AT_DEFAULT], "stream_options.")
    check_at_default(options, "stream_options.", OPTIONS_AT_DEFAULT)
    flags = {name: read_number(options, name, field, "stream_options.") for name, field in OPTION_NUMBERS.items()}
    if "stream_options" in given and not numbers["stream"]:
        raise RequestRejected("stream_options needs stream", [("send", "stream: true")], param="stream_options")
    return Wanted(
        stream=bool(numbers["stream"]),
        include_usage=bool(flags["include_usage"]),
        continuous_usage=bool(flags["continuous_usage_stats"]),
        logprobs=logprobs,
        prompt_logprobs=numbers["prompt_logprobs"],
        echo=echo,
        token_ids=bool(numbers["return_token_ids"]),
        weight_versions=bool(numbers["return_weight_versions"]),
        tokens_as_ids=bool(numbers["return_tokens_as_token_ids"]),
    )


def make_call(
    given: Mapping[str, Any],
    prompt: Mapping[str, Any],
    wanted: Wanted,
    *,
    most: int,
    scored: bool,
    grammar: Grammar | None = None,
) -> Call:
    """The call of ``/generate`` that this one stands for.

    :param prompt: ``text`` or ``input_ids``.
    :param most: tokens to make where the client does not say; the context may shorten it.
    :param scored: log-probabilities of chosen tokens are needed.
    :param grammar: of the reply, where the body has none of its own.
    :raises RequestRejected: in the names of ``/generate``.
    """
    sampling = {ours: given[theirs] for theirs, ours in SAMPLED.items() if theirs in given}
    if type(sampling.get("top_k")) is int and sampling["top_k"] == 0:
        sampling["top_k"] = -1
    sampling |= read_grammar(given)
    if "max_new_tokens" not in sampling:
        least = sampling.get("min_new_tokens", 0)
        least = least if type(least) is int and least <= MAX_TOKENS else 0  # what cannot be is refused under its name
        sampling["max_new_tokens"] = max(most, least)
    of_prompt = wanted.prompt_logprobs is not None or (wanted.echo and wanted.logprobs is not None)
    body = {
        **prompt,
        **{ours: given[theirs] for theirs, ours in CALLED.items() if theirs in given},
        "sampling_params": sampling,
        "stream": "delta" if wanted.stream else False,
        "return_logprob": scored or of_prompt or wanted.logprobs is not None,
        "logprob_start_len": 0 if of_prompt else -1,
        "top_logprobs_num": max(wanted.logprobs or 0, wanted.prompt_logprobs or 0),
    }
    call = parse_call(body, new_rid)
    changed: dict[str, Any] = {} if "max_tokens" in given else {"max_is_default": True}
    changed |= {} if grammar is None else {"grammar": grammar}
    prompts = (replace(one, sampling=replace(one.sampling, **changed)) for one in call.prompts)
    return replace(call, prompts=tuple(prompts), as_list=False)


def grammar_field(given: Mapping[str, Any]) -> str:
    """The field that a grammar comes from."""
    return "structured_outputs" if "structured_outputs" in given else "response_format"


def read_grammar(given: Mapping[str, Any]) -> dict[str, Any]:
    """The grammar as a field of ``sampling_params``; empty: any text."""
    form, outputs = given.get("response_format"), given.get("structured_outputs")
    found = {} if form is None else _read_format(form)
    if outputs is None:
        return found
    if found:
        raise RequestRejected("give either response_format or structured_outputs, not both", param="structured_outputs")
    if not isinstance(outputs, dict):
        raise RequestRejected(
            f"structured_outputs must be an object, not {describe(outputs)}", param="structured_outputs"
        )
    check_names(outputs, [*GRAMMARS], "structured_outputs.")
    return _read_outputs({name: value for name, value in outputs.items() if value not in (None, False)})


def _read_outputs(outputs: Mapping[str, Any]) -> dict[str, Any]:
    if len(outputs) != 1:
        raise RequestRejected(
            f"structured_outputs needs exactly one of {', '.join(GRAMMARS)}, not {len(outputs)}",
            code="bad-grammar",
            param="structured_outputs",
        )
    ((name, value),) = outputs.items()
    if name == "json_object":
        read_number(outputs, name, Number(kind="bool", default=False), "structured_outputs.")
        return {"json_schema": ANY_JSON_OBJECT}
    return {{"json": "json_schema", "grammar": "ebnf"}.get(name, name): value}


def _read_format(form: Any) -> dict[str, Any]:
    if not isinstance(form, dict):
        raise RequestRejected(f"response_format must be an object, not {describe(form)}", param="response_format")
    check_names(form, ("type", "json_schema"), "response_format.")
    if form.get("type") is None:
        raise RequestRejected("response_format.type is missing", code="missing-field", param="response_format.type")
    kinds = ("text", "json_object", "json_schema")
    kind = read_choice(form, "type", kinds, "text", "response_format.")
    if kind != "json_schema":
        return {"json_schema": ANY_JSON_OBJECT} if kind == "json_object" else {}
    described = form.get("json_schema")
    path = "response_format.json_schema"
    if not isinstance(described, dict):
        raise RequestRejected(f"{path} must be an object, not {describe(described)}", param=path)
    check_names(described, ("name", "description", "schema", "strict"), f"{path}.")
    schema = described.get("schema")
    if not isinstance(schema, dict):
        raise RequestRejected(f"{path}.schema must be an object, not {describe(schema)}", param=f"{path}.schema")
    return {"json_schema": schema}
