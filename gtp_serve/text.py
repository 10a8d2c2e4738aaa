"""Between text and token ids, one token at a time: an exact incremental decoder and a stop-string matcher.

``StoppingText`` joins the two for one sequence.  All take linear time over any output, and hold back only what a
later token can still change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_UNKNOWN = "\ufffd"
_CONTEXT = 6
"""Ids before the new ones that a decoder is shown; word-initial spaces depend on one of them."""
_LONGEST_WINDOW = 48
"""Ids without a clean character border before the window is cut by force."""
_TAIL = 8
"""Ids kept at a forced cut: more than the four bytes that a character can have."""


class TextTokenizer(Protocol):
    """What is needed of a tokenizer here; ``loaders.tokenizer.Tokenizer`` is one."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` hides."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are no character become U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes, as in the middle of a text."""
        ...


class ByteRuns:
    """Tokens that are one byte of a run which is decoded as a whole (SentencePiece's byte fallback).

    In such a run one bad byte turns every character of the run into U+FFFD, so nothing of it is certain
    before its end. Whether a tokenizer does this is asked of it, not read from its files.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        # U+10FFFD is in no vocabulary: its last token is a continuation byte, which alone is no character.
        rare = tokenizer.encode("\U0010fffd", add_special_tokens=False)
        control = tokenizer.encode("\x01", add_special_tokens=False)
        self._bad = rare[-1] if rare else -1
        self._exist = bool(rare and control) and self._spoils(control[-1])

    def __contains__(self, token: int) -> bool:
        if not self._exist:
            return False
        own = self._tokenizer.token_bytes(token)
        return len(own) == 1 and (own[0] >= 0x80 or self._spoils(token))

    def _spoils(self, token: int) -> bool:
        return self._tokenizer.decode([token, self._bad], skip_special_tokens=False) == 2 * _UNKNOWN


class IncrementalDecoder:
    """Turns ids into text piece by piece; all pieces joined are the one-shot decoding of all ids.

    :param context: the prompt's ids.  Text is what the new ids add to them: a space that only shows after a
        word is kept, and half a character at the prompt's end shows up in the piece that completes it,
        nowhere else.
    """

    def __init__(
        self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True, context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window = [token for token in context[-4 * _CONTEXT :] if token not in self._skip][-_CONTEXT:]
        text = self._decode(self._window)
        self._sent = text.removesuffix(_UNKNOWN)
        self._prompt_is_open = text != self._sent
        self._byte_runs = ByteRuns(tokenizer)

    def push(self, ids: Sequence[int]) -> str:
        """Text that these ids complete; may be empty."""
        return "".join([self._push_one(token) for token in ids])

    def flush(self) -> str:
        """What is still held, with broken characters as U+FFFD; afterwards the decoder is used up."""
        return self._take(self._decode(self._window), settle=True)

    def _push_one(self, token: int) -> str:
        if token in self._skip:
            return ""
        self._window.append(token)
        if token in self._byte_runs:
            return ""
        text = self._decode(self._window)
        if text.endswith(_UNKNOWN):
            new = self._take(text.rstrip(_UNKNOWN))
            return new + self._cut_by_force(text)
        new = self._take(text, settle=True)
        self._start_anew(text)
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""

    def _take(self, text: str, *, settle: bool = False) -> str:
        """The part of the window's text that was not given out yet.

        :param settle: take the text as it is even if it no longer begins with what was given out (a
            tokenizer that removes a space before a full stop, say); what was given out cannot be taken back.
        """
        if self._prompt_is_open and len(text) > len(self._sent):
            self._prompt_is_open = False
            if text.startswith(_UNKNOWN, len(self._sent)):
                self._sent += _UNKNOWN  # the prompt's own broken character, not a new one
        if not text.startswith(self._sent) and not settle:
            return ""  # a later token decides
        new = text[len(self._sent) :]
        self._sent = text
        return new

    def _start_anew(self, text: str) -> None:
        """After a clean border: keep a few ids as context for the next ones."""
        if len(self._window) <= 2 * _CONTEXT or self._sent != text:
            return
        kept = self._window[-_CONTEXT:]
        kept_text = self._decode(kept)
        if kept_text:
            self._window, self._sent = kept, kept_text

    def _cut_by_force(self, text: str) -> str:
        """Broken bytes without end: give out and drop the window's head where cutting provably changes
        nothing.
        """
        if len(self._window) <= _LONGEST_WINDOW:
            return ""
        for cut in range(len(self._window) - _TAIL, len(self._window) - 2 * _TAIL, -1):
            head, tail = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if head + tail == text and (head.startswith(self._sent) or self._sent.startswith(head)):
                new = self._take(head) if len(head) > len(self._sent) else ""
                self._window, self._sent = self._window[cut:], self._sent[len(head) :]
                return new
        return ""


class StopMatcher:
    """Finds the first stop string in a text that comes in pieces, across any borders.

    Only a suffix that is a proper prefix of a stop string is held back.  Where several stop strings end at
    one character, the longest wins.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to give out, the stop string that was matched or None).

        After a match the text before the stop string is given out and the rest is dropped.
        """
        if not self._stops:
            return text, None
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            stop = self._advance(buffer[position])
            if stop is not None:
                self._held = ""
                return buffer[: position + 1 - len(stop)], stop
        safe = len(buffer) - max(self._matched)
        self._held = buffer[safe:]
        return buffer[:safe], None

    def pass_over(self, text: str) -> str:
        """Text that is safe to give out, where no stop string may be completed yet: one that only begins here is
        still found.
        """
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            if self._advance(buffer[position]) is not None:
                for index, stop in enumerate(self._stops):
                    if self._matched[index] == len(stop):
                        self._matched[index] = self._borders[index][-1]
        safe = len(buffer) - max(self._matched, default=0)
        self._held = buffer[safe:]
        return buffer[:safe]

    def flush(self) -> str:
        """What was held and did not become a stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        found: str | None = None
        for index, stop in enumerate(self._stops):
            length = self._matched[index]
            while length and stop[length] != char:
                length = self._borders[index][length - 1]
            length += stop[length] == char
            self._matched[index] = length
            if length == len(stop) and (found is None or length > len(found)):
                found = stop
        return found


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix (Knuth, Morris,
    Pratt).
    """
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        length += text[index] == text[length]
        borders[index] = length
    return borders


class StoppingText:
    """Text of one sequence as its tokens come, up to the first stop string.

    :param tokenizer: None: the text stays empty.
    :param context: the prompt's ids.
    :param keep_stop: the stop string stays in the text.
    :param min_tokens: a stop string counts if it is completed by this token (1 is the first) or a later one.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        *,
        context: Sequence[int],
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self.pieces: list[str] = []
        """What can no longer change."""
        self._decoder = (
            None
            if tokenizer is None
            else IncrementalDecoder(tokenizer, skip_special_tokens=skip_special_tokens, context=context)
        )
        self._matcher = StopMatcher(stops)
        self._keep_stop = keep_stop
        self._min_tokens = min_tokens
        self._tokens = 0

    def push(self, token: int, *, ends: bool = False) -> str | None:
        """Add a token's text; returns the stop string that it completes.

        :param ends: this token is itself what stops the sequence: its text is shown only with ``keep_stop``.
        """
        self._tokens += 1
        if self._decoder is None or (ends and not self._keep_stop):
            return None
        return self._match(self._decoder.push([token]))

    def finish(self) -> str | None:
        """Give out what is held; returns the stop string that completes there."""
        if self._decoder is None:
            return None
        matched = self._match(self._decoder.flush())
        if matched is None:
            self.pieces.append(self._matcher.flush())
        return matched

    def _match(self, text: str) -> str | None:
        if self._tokens < self._min_tokens:
            self.pieces.append(self._matcher.pass_over(text))
            return None
        safe, matched = self._matcher.push(text)
        if matched is not None and self._keep_stop:
            safe += matched
        if safe:
            self.pieces.append(safe)
        return matched


def special_stops(stops: Sequence[str], tokenizer: TextTokenizer, vocab_size: int) -> dict[int, str]:
    """Stop strings that are one special token, by its id: the text never shows them, so the engine must stop at
    the id.
    """
    found: dict[int, str] = {}
    for stop in stops:
        ids = tokenizer.encode(stop, add_special_tokens=False)
        if len(ids) == 1 and ids[0] in tokenizer.special_ids and ids[0] < vocab_size:
            found[ids[0]] = stop
    return found
