"""What an operator, a method or a filter of a chat template costs, checked before Python does the work.

Only operations that can make much out of little need a rule of their own; all others are paid for by size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.runtime import Context
from jinja2.utils import pass_context

from gtp_serve.loaders.chat_meter import BoundExceeded, Meter, meter_of, size

_MAX_INT_BITS = 4096
_MAX_FILTER_INT = 10_000
_FORMAT_WIDTH = 1000

# Operators


def _check_add(meter: Meter, left: object, right: object) -> None:
    meter.produce(size(left) + size(right))


def _check_multiply(meter: Meter, left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    elif isinstance(left, int):
        meter.produce(size(right) * max(left, 0))
    elif isinstance(right, int):
        meter.produce(size(left) * max(right, 0))


def _check_power(meter: Meter, left: object, right: object) -> None:
    meter.spend(1)
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 1))


def _check_bits(bits: int) -> None:
    if bits > _MAX_INT_BITS:
        raise BoundExceeded(f"it makes a number of more than {_MAX_INT_BITS} bits")


def _check_modulo(meter: Meter, left: object, right: object) -> None:
    if isinstance(left, str):
        values = list(right.values()) if isinstance(right, Mapping) else right
        _check_format(meter, left, "%", values if isinstance(values, list | tuple) else [values])


#: Checks by operator, called with the meter and both operands.
OPERATOR_CHECKS: dict[str, Callable[[Meter, Any, Any], None]] = {
    "+": _check_add,
    "*": _check_multiply,
    "**": _check_power,
    "%": _check_modulo,
}
_WIDE = re.compile(r"\d{4}|%[^%a-zA-Z]*\*|\{[^{}]*\{")


def _check_format(meter: Meter, pattern: str, marker: str, values: Iterable[object]) -> None:
    """Pay for the longest text that a format can give: each field as long as the longest value."""
    if _WIDE.search(pattern.replace("{{", "")):
        raise BoundExceeded("it formats with a width that is computed or above 999")
    longest = max((len(meter.text(value)) for value in values), default=0)
    meter.produce(len(pattern) + pattern.count(marker) * (longest + _FORMAT_WIDTH))


# Methods of text, which can make much out of little


def _refused(_meter: Meter, method: Any, *_args: Any, **_kwargs: Any) -> Any:
    raise SecurityError(f"the method {getattr(method, '__name__', 'of this name')} is not available in chat templates")


def _join(meter: Meter, method: Any, owner: str, values: Iterable[Any]) -> Any:
    items = list(values)
    meter.produce(sum(size(item) for item in items) + len(owner) * len(items))
    return method(items)


def _replace(meter: Meter, method: Any, owner: str, old: str, new: str, *count: int) -> Any:
    meter.produce(_replaced_length(owner, old, new))
    return method(old, new, *count)


def _replaced_length(text: str, old: object, new: object) -> int:
    if not isinstance(old, str) or not isinstance(new, str):
        return len(text)
    return len(text) + text.count(old) * max(len(new) - len(old), 0)


def _pad(meter: Meter, method: Any, owner: str, width: int, *fill: str) -> Any:
    meter.produce(max(width, len(owner)))
    return method(width, *fill)


def _format(meter: Meter, method: Any, owner: str, *args: Any, **kwargs: Any) -> Any:
    _check_format(meter, owner, "{", [*args, *kwargs.values()])
    return method(*args, **kwargs)


#: Stand-ins by method name, called with the meter, the bound method, its owner and the arguments.
METHOD_GUARDS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("encode", "expandtabs", "format_map", "maketrans", "to_bytes", "translate"), _refused),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _pad),
    "join": _join,
    "replace": _replace,
    "format": _format,
}


# Filters

#: These make HTML, print objects or draw random numbers; no chat template needs them.
_LEFT_OUT = {"filesizeformat", "pprint", "random", "urlize", "wordwrap", "xmlattr"}
#: These turn whatever they get into text first.
_TEXT_FILTERS = {
    "capitalize",
    "center",
    "e",
    "escape",
    "forceescape",
    "format",
    "indent",
    "join",
    "lower",
    "replace",
} | {"string", "striptags", "title", "tojson", "trim", "truncate", "upper", "urlencode", "wordcount"}
#: These compare or hash the elements of what they get.
_WALKING_FILTERS = {"dictsort", "groupby", "max", "min", "sort", "unique"}
#: These read an iterator to its end, so that it is made a list before it is weighed.
_LISTED_FILTERS = (_WALKING_FILTERS - {"dictsort"}) | {"join"}
_UNBOUNDED_INT = {"d", "default", "int", "float", "abs", "truncate"}


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    passes = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @wraps(function)
    def run(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        meter = meter_of(context)
        if name in _LISTED_FILTERS:
            value = list(value)
        _check_filter(meter, name, value, [*args, *kwargs.values()])
        result = function(*_leading(passes, context), value, *args, **kwargs)
        meter.spend(size(value) + size(result))
        return result

    return pass_context(run)


def _leading(passes: str | None, context: Context) -> tuple[Any, ...]:
    """What a filter wants before its value, by Jinja's mark on the function."""
    if passes is None:
        return ()
    return ({"context": context, "eval_context": context.eval_ctx, "environment": context.environment}[passes],)


def _check_filter(meter: Meter, name: str, value: Any, args: list[Any]) -> None:
    if name not in _UNBOUNDED_INT and any(isinstance(arg, int) and abs(arg) > _MAX_FILTER_INT for arg in args):
        raise BoundExceeded(f"it gives the filter {name} a number above {_MAX_FILTER_INT}")
    if name in _TEXT_FILTERS:
        texts = [meter.text(part) for part in (value, *args)]
        meter.produce(_filter_length(meter, name, value, texts, args))
    if name in _WALKING_FILTERS:
        meter.walk(value)
    if name == "sum" and any(isinstance(arg, list | tuple) for arg in args):
        raise BoundExceeded("it adds up lists")


def _filter_length(meter: Meter, name: str, value: Any, texts: list[str], args: list[Any]) -> int:
    """Upper bound of the text that a filter makes, for those that can make much out of little."""
    text, *rest = texts
    if name == "replace" and len(rest) >= 2:
        return _replaced_length(text, rest[0], rest[1])
    if name == "join":
        return len(text) + sum(map(len, rest)) * len(value)
    if name == "indent":
        widths = (len(arg) if isinstance(arg, str) else arg for arg in args if isinstance(arg, str | int))
        return len(text) + (text.count("\n") + 1) * sum(widths)
    if name == "format":
        _check_format(meter, text, "%", args)
    return len(text)


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers gives it to templates: characters as they are, nothing escaped for HTML."""
    encoder = json.JSONEncoder(
        ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys)
    )
    meter = meter_of(context)
    pieces, total = [], 0
    for piece in encoder.iterencode(value):
        total += len(piece)
        meter.check(total)
        meter.spend(len(piece) + 1)
        pieces.append(piece)
    return "".join(pieces)


#: Jinja's filters, paid for.
FILTERS: dict[str, Callable[..., Any]] = {
    name: _metered_filter(name, function)
    for name, function in (JINJA_FILTERS | {"tojson": _tojson}).items()
    if name not in _LEFT_OUT
}
