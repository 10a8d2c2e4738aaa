"""Fields of an admin request's body or query, read one by one: names first, then each value.

An unknown name is refused with the nearest right one, a wrong value with what is possible.  ``null`` is the
default, as on ``/generate``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.datastructures import QueryParams

from gtp_serve.errors import RequestRejected
from gtp_serve.server.schemas import Number, describe, read_number

_SHOWN = 64
_MAX_TEXT_CHARS = 4096


def check_names(
    given: Iterable[str], known: Sequence[str], prefix: str = "", synonyms: Mapping[str, str] | None = None
) -> None:
    """Refuse a name that is none of the known ones.

    :param prefix: of the field's path, for example ``source.``.
    :param synonyms: other names that people try: ours.
    """
    for name in given:
        if name in known:
            continue
        shown = name if len(name) <= _SHOWN else name[:_SHOWN] + "..."
        right = (synonyms or {}).get(name) or _nearest(name, known)
        message = f"unknown field '{shown}'" + (f" in {prefix[:-1]}" if prefix else "")
        message += f"; here it is '{right}'" if right else f"; possible are {', '.join(known)}"
        raise RequestRejected(message, code="unknown-field", param=f"{prefix}{shown}", did_you_mean=right)


def _nearest(name: str, known: Sequence[str]) -> str | None:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6) if len(name) <= _SHOWN else []
    return near[0] if near else None


def read_text(
    given: Mapping[str, Any], name: str, *, prefix: str = "", needed: bool = False, limit: int = _MAX_TEXT_CHARS
) -> str | None:
    """A string; None when it is not there.

    :param needed: refuse when it is not there.
    """
    value = given.get(name)
    path = f"{prefix}{name}"
    if value is None:
        if needed:
            raise RequestRejected(f"{path} is missing", code="missing-field", param=path)
        return None
    if not isinstance(value, str) or not 1 <= len(value) <= limit:
        raise RequestRejected(f"{path} must be a string of 1 to {limit} characters, not {describe(value)}", param=path)
    return value


def read_choice(given: Mapping[str, Any], name: str, choices: Sequence[str], default: str, prefix: str = "") -> str:
    """One of a few words."""
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or value not in choices:
        seen = f"'{value[:_SHOWN]}'" if isinstance(value, str) else describe(value)
        raise RequestRejected(
            f"{prefix}{name} must be {', '.join(choices[:-1])} or {choices[-1]}, not {seen}",
            param=f"{prefix}{name}",
            did_you_mean=_nearest(value, choices) if isinstance(value, str) else None,
        )
    return value


def read_flag(given: Mapping[str, Any], name: str) -> bool:
    """True or false; false when it is not there."""
    return bool(read_number(given, name, Number(kind="bool", default=False), ""))


def from_query(query: QueryParams, kinds: Mapping[str, Number]) -> dict[str, Any]:
    """The fields of a query with numbers and flags parsed; whatever is none stays text, for the check to refuse.

    :param kinds: the fields that are not texts.
    :raises RequestRejected: for a field that comes twice.
    """
    found: dict[str, Any] = {}
    for name, text in query.multi_items():
        if name in found:
            raise RequestRejected(
                f"'{name[:_SHOWN]}' comes twice in the query", code="duplicate-key", param=name[:_SHOWN]
            )
        found[name] = _parsed(text, kinds[name]) if name in kinds else text
    return found


def _parsed(text: str, kind: Number) -> object:
    if kind.kind == "bool":
        return {"true": True, "1": True, "": True, "false": False, "0": False}.get(text.lower(), text)
    try:
        return int(text) if kind.kind == "int" else float(text)
    except ValueError:
        return text
