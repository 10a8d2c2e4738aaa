"""Text to token ids and back, on the ``tokenizers`` package; imports neither torch nor transformers.

Ids and texts come from clients and models: no id makes this raise, and what text cannot be encoded is a
`RequestRejected`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from gtp_serve.config import ModelConfig
from gtp_serve.errors import CheckpointCorrupt, RequestRejected, UsageError
from gtp_serve.loaders.chat_template import ChatTemplate
from gtp_serve.loaders.token_bytes import TokenBytes
from gtp_serve.loaders.tokenizer_files import TokenizerFiles

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: transformers' clean-up of spaces, for tokenizers that split text at punctuation.
_CLEAN_UP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def load_tokenizer(files: TokenizerFiles, *, chat_template: str | None = None) -> Tokenizer:
    """Load a tokenizer.

    :param chat_template: Jinja source that the operator gave; it wins over the folder's.
    :raises CheckpointCorrupt: when ``tokenizer.json`` is damaged.
    :raises UsageError: when the operator's template is not valid.  A broken template of the folder does not
        stop the load: text and token ids still work, and `Tokenizer.render_chat` says what is wrong.
    """
    try:
        backend = _read_backend(files.tokenizer_json)
        backend.decode(backend.encode("a", add_special_tokens=True).ids)  # what only the first text would meet
    except BaseException as error:  # the package raises bare Exception for whatever is wrong with the file
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise CheckpointCorrupt(
            f"{files.tokenizer_json} is not a tokenizer that can be read", [("reason", str(error)[:300])]
        ) from error
    # A file may carry a maximum length or a padding; both would change prompts without a word.
    backend.no_truncation()
    backend.no_padding()
    _mark_special(backend, files)
    if chat_template is not None:
        return Tokenizer(backend, files, ChatTemplate(chat_template, special_tokens=files.special_tokens))
    try:
        return Tokenizer(backend, files, _folder_template(files))
    except UsageError as error:
        return Tokenizer(backend, files, None, chat_problem=error.message)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    # Read here: the package takes a byte-order mark for a part of the JSON, and no path that is not valid text.
    return tokenizers.Tokenizer.from_buffer(path.read_bytes().removeprefix(_BYTE_ORDER_MARK))


def _is_panic(error: BaseException) -> bool:
    """A panic of the package's Rust code, which is no ``Exception``: left alone, nothing would catch it."""
    return type(error).__name__ == "PanicException"


def _mark_special(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Tokens that tokenizer_config calls special become special, if they have an id: none is added."""
    names = [*files.special_tokens.values(), *files.other_special_tokens]
    added = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([n for n in names if n not in added and backend.token_to_id(n) is not None])


def _folder_template(files: TokenizerFiles) -> ChatTemplate | None:
    if files.chat_template is None:
        return None
    return ChatTemplate(files.chat_template, special_tokens=files.special_tokens, origin=files.chat_template_origin)


class Tokenizer:
    """A loaded tokenizer with its chat template.  Immutable; safe to use from many threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        files: TokenizerFiles,
        template: ChatTemplate | None,
        *,
        chat_problem: str = "",
    ) -> None:
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self._template = template
        self._chat_problem = chat_problem
        self._bytes = TokenBytes(_decoder(backend), {index: token.content for index, token in added.items()})
        # transformers ignores the setting for BPE, where it would take spaces that the model wrote
        self._clean_up = files.clean_up_spaces and not isinstance(backend.model, tokenizers.models.BPE)
        self._size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._special_texts = tuple(token.content for token in added.values() if token.special)
        self._special_tokens = dict(files.special_tokens)
        self._bos_id = self._id_of(files.special_tokens.get("bos_token"), files.bos_token_id)
        self._eos_ids = self._end_tokens(files)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that exists, added tokens included."""
        return self._size

    def to_json(self) -> str:
        """The text of a ``tokenizer.json`` that means the same, special tokens marked."""
        return self._backend.to_str()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence: generation_config's list and the tokenizer's own, ascending."""
        return self._eos_ids

    @property
    def bos_token_id(self) -> int | None:
        """The id that begins a sequence, if there is one (`encode` adds it if tokenizer.json says so)."""
        return self._bos_id

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out."""
        return self._special_ids

    @property
    def special_texts(self) -> tuple[str, ...]:
        """How the tokens of `special_ids` are spelled."""
        return self._special_texts

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Those that have a part: how each is spelled, by ``eos_token`` and the like."""
        return self._special_tokens

    @property
    def has_chat_template(self) -> bool:
        """`render_chat` can work."""
        return self._template is not None

    @property
    def chat_source(self) -> str:
        """The chat template as it is written; empty when there is none."""
        return "" if self._template is None else self._template.source

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        :param add_special_tokens: add those that tokenizer.json's post-processor adds, no others.
        :raises RequestRejected: for text that holds half of a surrogate pair, and for text that the tokenizer's
            own pattern gives up on.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestRejected(
                f"the text holds half of a surrogate pair at character {error.start}", code="invalid-text"
            ) from error
        # Unlike encode, encode_batch_fast lets other threads run meanwhile (and does not compute offsets).
        try:
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            raise _not_a_panic(error, "the model's tokenizer cannot take this text apart") from error
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids that do not exist give no text, bytes that are not UTF-8 give U+FFFD."""
        known = [int(i) for i in ids if 0 <= i < self._size]
        try:
            text: str = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise _not_a_panic(error, "the model's tokenizer cannot put these tokens together") from error
        return _clean_up(text) if self._clean_up else text

    def token_text(self, token_id: int) -> str:
        """One token's own text, special tokens included; empty for an id that does not exist."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes, as in the middle of a text; empty for an id that does not exist."""
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self._size else None
        return b"" if token is None else self._bytes.of(token_id, token)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt text for a conversation; encode it with ``add_special_tokens=False``.

        :param messages: objects with ``role`` and ``content``, of JSON's types only.
        :param kwargs: further variables of the template (``tools``, ``documents``, a request's own).
        :raises RequestRejected: when there is no template, and as `ChatTemplate.render`.
        """
        if self._template is None:
            raise self._no_template()
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, variables=kwargs)

    def _no_template(self) -> RequestRejected:
        found = f"the model's chat template cannot be used: {self._chat_problem}"
        return RequestRejected(
            found if self._chat_problem else "this model has no chat template",
            [("try", "start the server with --chat-template FILE, or send a plain prompt")],
            code="no-chat-template",
            param="messages",
        )

    def _id_of(self, text: str | None, otherwise: int | None = None) -> int | None:
        found: int | None = None if text is None else self._backend.token_to_id(text)
        return otherwise if found is None else found

    def _end_tokens(self, files: TokenizerFiles) -> tuple[int, ...]:
        own = self._id_of(files.special_tokens.get("eos_token"))
        return tuple(sorted({*files.eos_token_ids} if own is None else {*files.eos_token_ids, own}))


def model_with_tokenizer(model: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """The model with the end tokens of its configuration and of its tokenizer, a begin token if either has one,
    and only the ids that the tokenizer knows: a row of the head beyond them is padding, whatever its logit.
    """
    if tokenizer is None:
        return model
    model = replace(model, vocab_size=min(model.vocab_size, tokenizer.vocab_size))
    ends = {token for token in (*model.eos_token_ids, *tokenizer.eos_token_ids) if token < model.vocab_size}
    begin = model.bos_token_id if model.bos_token_id is not None else tokenizer.bos_token_id
    return replace(model, eos_token_ids=tuple(sorted(ends)), bos_token_id=begin)


def _not_a_panic(error: BaseException, message: str) -> BaseException:
    """What to raise: the error itself, or in place of a panic a refusal, which costs one request."""
    return RequestRejected(message, code="invalid-text") if _is_panic(error) else error


def _decoder(backend: tokenizers.Tokenizer) -> Any:
    """The decoder's part of tokenizer.json (writing out the whole vocabulary for it would take a second)."""
    return None if backend.decoder is None else json.loads(backend.decoder.__getstate__())


def _clean_up(text: str) -> str:
    for spaced, tight in _CLEAN_UP:
        text = text.replace(spaced, tight)
    return text
