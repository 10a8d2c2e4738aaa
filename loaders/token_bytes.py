"""The bytes behind one token's spelling.

Vocabularies spell tokens in one of three ways: bytes as printable characters (GPT-2's table), text with a
mark for spaces and ``<0x41>`` for lone bytes (SentencePiece), text with ``##`` before word parts (WordPiece).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_LONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[int, str]:
    """GPT-2's character for each byte: itself where it prints, else the next one from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}


_BYTE_OF = {character: byte for byte, character in byte_alphabet().items()}


class TokenBytes:
    """Turns spellings into bytes.

    :param decoder: the ``decoder`` object of tokenizer.json, which tells how tokens are spelled.
    :param added: text by id of the added tokens, which are spelled as they are.
    """

    def __init__(self, decoder: Any, added: Mapping[int, str]) -> None:
        decoders = list(_parts(decoder))
        kinds = {part.get("type") for part in decoders}
        self._added = dict(added)
        self._byte_level = "ByteLevel" in kinds
        self._lone_bytes = "ByteFallback" in kinds
        self._replaced = [pair for part in decoders if (pair := _replacement(part)) is not None]
        self._word_prefix = next((str(p.get("prefix", "##")) for p in decoders if p.get("type") == "WordPiece"), None)

    def of(self, token_id: int, token: str) -> bytes:
        """The bytes of a token with this id and this spelling."""
        if token_id in self._added:
            return self._added[token_id].encode("utf-8")
        if self._byte_level:
            return _from_alphabet(token)
        if self._lone_bytes and (match := _LONE_BYTE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return self._spaced(token).encode("utf-8")

    def _spaced(self, token: str) -> str:
        if self._word_prefix is not None:
            prefix = self._word_prefix
            return token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
        for old, new in self._replaced:
            token = token.replace(old, new)
        return token


def _from_alphabet(token: str) -> bytes:
    """A token with a character outside the alphabet was added by hand and is plain text."""
    values = [_BYTE_OF.get(character) for character in token]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else token.encode("utf-8")


def _parts(decoder: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(decoder, Mapping):
        return
    if decoder.get("type") == "Sequence":
        for part in decoder.get("decoders", []):
            yield from _parts(part)
    else:
        yield decoder


def _replacement(part: Mapping[str, Any]) -> tuple[str, str] | None:
    """What a decoder writes instead of a mark: Replace with a plain pattern, or Metaspace."""
    if part.get("type") == "Metaspace":
        return str(part.get("replacement", "\u2581")), " "
    pattern = part.get("pattern")
    if part.get("type") == "Replace" and isinstance(pattern, Mapping) and "String" in pattern:
        return str(pattern["String"]), str(part.get("content", ""))
    return None
