"""How amounts of memory are read and written."""

from __future__ import annotations

import re

from gtp_serve.errors import UsageError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)

GIB = 1 << 30


def parse_size(text: str) -> int:
    """Bytes in ``4GiB``, ``512M`` (binary), ``2GB`` (decimal) or ``1073741824``.

    :raises UsageError: when the text is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is not None:
        number, unit = match.group(1), match.group(2).lower()
        factor = _DECIMAL.get(unit) or _UNITS.get(unit.removesuffix("ib").removesuffix("b"))
        if factor is not None and float(number) * factor >= 1:
            return int(float(number) * factor)
    raise UsageError(f"'{text}' is not a size", [("write", "for example 4GiB, 512MiB or 2.5GB")])


def format_gib(count: int) -> str:
    """``15.3 GiB``; small sizes in MiB so that they do not read as zero."""
    return f"{count / GIB:.1f} GiB" if count >= GIB // 10 else f"{count / (1 << 20):.1f} MiB"
