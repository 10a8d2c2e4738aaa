"""Control tokens as a grammar sees them: by their ids alone, never by how they are spelled.

A grammar's text is text.  llguidance, where only one text can follow, has the tokenizer say which token that is; and
a tokenizer takes ``<|im_end|>`` or ``</s>`` in a text for the control token.  So a choice of that text would be
the end of the reply, and a reply that is not what the grammar says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_MARK = "\U000ffffd"
"""A character of a private plane around an id: what a control token is called here."""
_LARK_PARTS = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|<[^<>\[\]\s"]+>')


def unspelled(tokenizer_json: str) -> tuple[str, dict[str, int]]:
    """(the text of a ``tokenizer.json`` with the same ids, whose control tokens no text spells; their ids by name)."""
    document = json.loads(tokenizer_json)
    model = document["model"]
    merged = {piece for merge in model.get("merges") or () for piece in _pieces(merge)}
    control = [token for token in document["added_tokens"] if token["special"] and token["content"] not in merged]
    ids: dict[str, int] = {token["content"]: token["id"] for token in control}
    names = {name: f"{_MARK}{token}{_MARK}" for name, token in ids.items()}
    for token in control:
        token["content"] = names[token["content"]]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): token for piece, token in vocab.items()}
    else:  # a list of pieces with their scores
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    document["post_processor"] = None  # it knows control tokens by name, and adds them to whole prompts only
    return json.dumps(document, ensure_ascii=False), ids


def _pieces(merge: Any) -> tuple[str, ...]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right


def named_by_id(lark: str, ids: Mapping[str, int]) -> str:
    """The same grammar with ``<[2]>`` where it names a control token outside quotes (``<|im_end|>``)."""

    def by_id(part: re.Match[str]) -> str:
        return f"<[{ids[part[0]]}]>" if part[0] in ids else part[0]

    return _LARK_PARTS.sub(by_id, lark)
