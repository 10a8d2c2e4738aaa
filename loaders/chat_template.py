"""Chat templates: from messages to the text that a model was trained to see.

A template comes from the model's folder or from the operator, never from a request, and is untrusted all the
same: it runs in a sandbox (`chat_sandbox`) with bounds on output, work and time.  Exceeding them costs one
request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import CodeType
from typing import Any

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from gtp_serve.errors import RequestRejected, UsageError
from gtp_serve.loaders.chat_meter import BoundExceeded, Meter
from gtp_serve.loaders.chat_sandbox import BUILT_IN_NAMES, BoundedEnvironment

#: Names that a request's template arguments may not take, besides Jinja's own.
_OWN_NAMES = frozenset({"messages", "add_generation_prompt", "raise_exception", "strftime_now"})
_NEVER_NAMES = frozenset({"chat_template", "tokenize", "conversation", "return_tensors", "return_dict"})
_MAX_VARIABLES = 64
_MAX_DEPTH = 64
_MAX_REASON = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateLimits:
    """Bounds of one render."""

    output_bytes: int = 8 << 20
    """UTF-8 bytes of the whole result; also the characters of any text on the way."""
    work: int = 64 << 20
    """Characters made plus operations done."""
    seconds: float = 2.0
    """Wall time."""


class _Refused(TemplateError):
    """The template itself said no, by ``raise_exception``."""


def _raise_exception(message: object) -> None:
    raise _Refused(message if isinstance(message, str) else repr(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 100:
        raise BoundExceeded("it formats the date with more than 100 characters")
    return datetime.now().strftime(pattern)


_HELPERS = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}


class ChatTemplate:
    """A compiled template.  Safe to use from many threads: each render has its own environment.

    :param source: Jinja, as transformers understands it.
    :param special_tokens: variables that each render sees, for example ``bos_token``.
    :param origin: where the source came from, for messages.
    :raises UsageError: when it is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        origin: str = "the chat template",
        limits: TemplateLimits | None = None,
    ) -> None:
        self._limits = limits or TemplateLimits()
        self._special_tokens = dict(special_tokens or {})
        self.source = source
        self._code = _compile(source, origin, self._environment())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        :param variables: further names for the template: ``tools``, ``documents``, and what a client passes.
        :raises RequestRejected: for a name that is taken, values that are not JSON, and a template that
            refuses the messages, fails, or exceeds its bounds.
        """
        values = self._variables(messages, add_generation_prompt, variables or {})
        environment = self._environment()
        template = Template.from_code(environment, self._code, environment.make_globals(None))
        try:
            return self._collect(template, values)
        except BoundExceeded as error:
            raise _rejected("chat-template-limit", "the chat template was stopped", error) from error
        except _Refused as error:
            raise _rejected("chat-template-refused", "the chat template refuses these messages", error) from error
        except SecurityError as error:
            raise _rejected("chat-template-unsafe", "the chat template does what is not allowed", error) from error
        except Exception as error:  # the template is untrusted code: whatever it raises is its own failure
            raise _rejected("chat-template-failed", "the chat template failed", error) from error

    def _environment(self) -> BoundedEnvironment:
        limits = self._limits
        meter = Meter(characters=limits.output_bytes, work=limits.work, seconds=limits.seconds)
        return BoundedEnvironment(meter, helpers=_HELPERS)

    def _collect(self, template: Template, values: Mapping[str, Any]) -> str:
        pieces, total = [], 0
        for piece in template.generate(values):
            total += len(piece.encode("utf-8", "surrogatepass"))
            if total > self._limits.output_bytes:
                raise BoundExceeded(f"it makes a prompt of more than {self._limits.output_bytes} bytes")
            pieces.append(piece)
        return "".join(pieces)

    def _variables(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> dict[str, Any]:
        self._check_names(variables)
        plain = {name: _plain(value, name, 0) for name, value in variables.items()}
        defaults: dict[str, Any] = {"tools": None, "documents": None}
        return (
            self._special_tokens
            | defaults
            | plain
            | {"messages": _plain_messages(messages), "add_generation_prompt": bool(add_generation_prompt)}
        )

    def _check_names(self, variables: Mapping[str, Any]) -> None:
        if len(variables) > _MAX_VARIABLES:
            raise RequestRejected(f"{len(variables)} template arguments, at most {_MAX_VARIABLES} are taken")
        taken = _OWN_NAMES | _NEVER_NAMES | BUILT_IN_NAMES | self._special_tokens.keys()
        for name in variables:
            if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
                raise RequestRejected(
                    f"{str(name)[:80]!r} cannot be the name of a template argument",
                    param="chat_template_kwargs",
                )
            if name in taken:
                raise RequestRejected(
                    f"a request cannot set the template argument {name!r}",
                    param=f"chat_template_kwargs.{name}",
                )


def _compile(source: str, origin: str, environment: BoundedEnvironment) -> CodeType:
    try:
        return environment.compile_bounded(source)
    except TemplateSyntaxError as error:
        raise UsageError(
            f"{origin} is not a valid Jinja template: {_reason(error)}",
            [("line", str(error.lineno))],
            code="chat-template",
        ) from error
    except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
        raise UsageError(f"{origin} cannot be compiled: {_reason(error)}", code="chat-template") from error


def _rejected(code: str, what: str, error: Exception) -> RequestRejected:
    return RequestRejected(f"{what}: {_reason(error)}", code=code, param="messages")


def _reason(error: Exception) -> str:
    """The error's text on one line, of bounded length; never a class name or a path."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, MemoryError):
        return "out of memory"
    text = " ".join(str(error).split()) or "no reason given"
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 3] + "..."


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as plain dicts; keys that are None are left out, as transformers does."""
    plain = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestRejected(f"messages[{number}] is not an object", param=f"messages[{number}]")
        copied: dict[str, Any] = _plain(message, f"messages[{number}]", 0)
        plain.append({key: value for key, value in copied.items() if value is not None})
    return plain


def _plain(value: Any, where: str, depth: int) -> Any:
    """A copy made of JSON's own types, so that a template never holds an object with other methods."""
    if depth > _MAX_DEPTH:
        raise RequestRejected(f"{where} is nested more than {_MAX_DEPTH} deep", param=where)
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    raise RequestRejected(f"{where} holds something that is not JSON: a {type(value).__name__}", param=where)


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise RequestRejected(f"{where} has a key that is not text", param=where)
    return str.__str__(key)
