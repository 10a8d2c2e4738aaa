"""From a conversation to token ids in which only the template's own control tokens are control tokens.

Whatever a message, a tool or a template argument says is text: a user who writes ``<|im_end|>`` gets the characters,
never the token.  Each control token that is spelled in them is replaced by a random word before the template sees it,
and put back as plain text when the template's output is encoded.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gtp_serve.errors import PromptTooLong, RequestRejected
from gtp_serve.text import TextTokenizer

_MAX_DEPTH = 64
_LEADS = ("\n", "a")
"""What text is encoded after, so that no space is put before it; the first that does not join it is taken."""


class ChatTokenizer(TextTokenizer, Protocol):
    """A tokenizer with a chat template."""

    @property
    def special_texts(self) -> tuple[str, ...]:
        """How the control tokens are spelled."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Those that have a part: how each is spelled, by ``eos_token`` and the like."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """`render_chat` can work."""
        ...

    @property
    def chat_source(self) -> str:
        """The chat template as it is written; empty when there is none."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        ...

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt's text."""
        ...


def encode_chat(
    tokenizer: ChatTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    most_chars: int | None = None,
) -> list[int]:
    """The prompt's ids.

    :param continue_final_message: the prompt ends where the last message's content ends, so that the reply goes on
        with it; ``add_generation_prompt`` is then not looked at.
    :param variables: further names for the template.
    :param most_chars: refuse a longer text before it is encoded.
    :raises RequestRejected: as ``ChatTemplate.render``; when the template changes what it must print as it is.
    """
    masks = _Masks(tokenizer.special_texts)
    masked = [masks.hide(message) for message in messages]
    if continue_final_message:
        masked[-1] = {**masked[-1], "content": f"{masked[-1].get('content') or ''}{masks.end}"}
        add_generation_prompt = False
    rendered = tokenizer.render_chat(masked, add_generation_prompt=add_generation_prompt, **masks.hide(variables or {}))
    if continue_final_message:
        rendered = masks.cut(rendered)
    if most_chars is not None and len(rendered) > most_chars:
        raise PromptTooLong(
            f"a conversation of {len(rendered)} characters cannot fit the context",
            [("possible", f"up to {most_chars} characters, and fewer where tokens are shorter")],
            param="messages",
        )
    return masks.encode(tokenizer, rendered)


class _Masks:
    """Random words that stand for control tokens while a template works."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._core = secrets.token_hex(12)
        self._nonce = f"x{self._core}"
        self._texts = sorted((text for text in texts if text), key=len, reverse=True)
        self._index = {text: index for index, text in enumerate(self._texts)}
        self._spelled = re.compile("|".join(map(re.escape, self._texts))) if self._texts else None
        self.end = f"{self._nonce}endx"
        """Marks where a message's content ends."""

    def hide(self, value: Any, depth: int = 0) -> Any:
        """The value with every control token in its texts replaced."""
        if self._spelled is None or depth > _MAX_DEPTH:
            return value
        if isinstance(value, str):
            return self._spelled.sub(lambda found: f"{self._nonce}{self._index[found[0]]}x", value)
        if isinstance(value, Mapping):
            return {self.hide(key, depth + 1): self.hide(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item, depth + 1) for item in value]
        return value

    def cut(self, rendered: str) -> str:
        """The text up to the end mark."""
        head, mark, _ = rendered.rpartition(self.end)
        if not mark:
            raise RequestRejected(
                "the chat template does not print the last message as it is, so it cannot be continued",
                code="chat-template-refused",
                param="continue_final_message",
            )
        return head

    def encode(self, tokenizer: ChatTokenizer, rendered: str) -> list[int]:
        """Ids of a template's output, with the words turned back into plain text."""
        parts = re.split(rf"{self._nonce}(\d+)x", rendered)
        if any(self._core in part.lower() for part in parts[::2]):
            raise RequestRejected(
                "the chat template changes how a control token in a message is spelled, so it cannot be kept as text",
                code="chat-template-refused",
                param="messages",
            )
        ids = tokenizer.encode(parts[0], add_special_tokens=False)
        for index, text in zip(parts[1::2], parts[2::2], strict=True):
            ids += _as_text(tokenizer, self._texts[int(index)])
            ids += _continuing(tokenizer, text)
        return ids


def _as_text(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Ids of a control token's spelling as characters: it is encoded in pieces in which it cannot be found."""
    for pieces in ([text[:1], text[1:]], list(text)):
        ids = [token for piece in pieces for token in _continuing(tokenizer, piece)]
        if tokenizer.special_ids.isdisjoint(ids):
            return ids
    raise RequestRejected(
        "a message holds a control token that this tokenizer cannot write as text",
        code="control-token",
        param="messages",
    )


def _continuing(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Ids of a text that follows other text."""
    for lead in _LEADS:
        before = tokenizer.encode(lead, add_special_tokens=False)
        both = tokenizer.encode(lead + text, add_special_tokens=False)
        if both[: len(before)] == before:
            return both[len(before) :]
    return tokenizer.encode(text, add_special_tokens=False)
