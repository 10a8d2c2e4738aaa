"""A conversation as a request gives it, and its token ids.

A reply's own ids can come back on its message (``prompt_token_ids`` and ``generation_token_ids``, as trainers of agents
send them): the prompt then begins with exactly these, and only what follows them is encoded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gtp_serve.errors import RequestRejected
from gtp_serve.loaders.chat_prompt import ChatTokenizer, encode_chat
from gtp_serve.server.openai.fields import MAX_MESSAGES, ROLE, TEMPLATE_NUMBERS
from gtp_serve.server.openai.tool_choice import Offer, read_offer
from gtp_serve.server.openai.tools import plain_calls
from gtp_serve.server.prepare import CHARS_PER_TOKEN
from gtp_serve.server.sampling_fields import read_token_ids
from gtp_serve.server.schemas import describe, read_number
from gtp_serve.server.state import Serving

CARRIED = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_ROLE = re.compile(ROLE)
_OWN_FIELDS = ("add_generation_prompt", "continue_final_message", "tools", "documents")


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """Ids that the prompt begins with: all up to the end of the reply in message ``index``."""

    index: int
    ids: tuple[int, ...]
    param: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Messages and what else a template sees, checked."""

    messages: tuple[dict[str, Any], ...]
    variables: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    carried: Carried | None
    offer: Offer


def read_conversation(given: Mapping[str, Any]) -> Conversation:
    """The fields of a chat that its prompt is made of.

    :raises RequestRejected: naming the field at fault.
    """
    raw = given.get("messages")
    if raw is None:
        raise RequestRejected("messages is missing", code="missing-field", param="messages")
    if not isinstance(raw, list) or not 1 <= len(raw) <= MAX_MESSAGES:
        seen = f"{len(raw)} of them" if isinstance(raw, list) else describe(raw)
        raise RequestRejected(f"messages must be a list of 1 to {MAX_MESSAGES} messages, not {seen}", param="messages")
    carried = _read_carried(raw, given)
    messages = tuple(_read_message(message, f"messages[{index}]") for index, message in enumerate(raw))
    offer = read_offer(given)
    flags = {name: read_number(given, name, field, "") for name, field in TEMPLATE_NUMBERS.items()}
    goes_on = bool(flags["continue_final_message"])
    if goes_on and flags["add_generation_prompt"]:
        raise RequestRejected(
            "add_generation_prompt begins a new message, continue_final_message goes on with the last one",
            [("send", "only one of them")],
            param="continue_final_message",
        )
    if goes_on and messages[-1]["role"] != "assistant":
        raise RequestRejected(
            "continue_final_message needs a last message of the assistant", param="continue_final_message"
        )
    return Conversation(
        messages=messages,
        variables=_read_variables(given, list(offer.tools)),
        add_generation_prompt=flags["add_generation_prompt"] is not False,
        continue_final_message=goes_on,
        carried=carried,
        offer=offer,
    )


def _read_variables(given: Mapping[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any]:
    documents, more = given.get("documents"), given.get("chat_template_kwargs", {})
    if not isinstance(more, dict):
        raise RequestRejected(
            f"chat_template_kwargs must be an object, not {describe(more)}", param="chat_template_kwargs"
        )
    for name in _OWN_FIELDS:
        if name in more:
            raise RequestRejected(
                f"chat_template_kwargs.{name} is a field of its own",
                [("send", name)],
                param=f"chat_template_kwargs.{name}",
            )
    if documents is not None and not (isinstance(documents, list) and all(isinstance(one, dict) for one in documents)):
        raise RequestRejected("documents must be a list of objects", param="documents")
    effort = given.get("reasoning_effort")
    if effort is not None and not isinstance(effort, str):
        raise RequestRejected(f"reasoning_effort must be a string, not {describe(effort)}", param="reasoning_effort")
    found: dict[str, Any] = {"reasoning_effort": effort} if effort is not None else {}
    return found | {"tools": tools or None, "documents": documents} | more


def _read_message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestRejected(f"{path} must be an object, not {describe(message)}", param=path)
    role = message.get("role")
    if not isinstance(role, str) or _ROLE.fullmatch(role) is None:
        raise RequestRejected(
            f"{path}.role must be a word such as system, user, assistant or tool", param=f"{path}.role"
        )
    plain = {name: value for name, value in message.items() if name not in CARRIED and value is not None}
    return plain_calls({**plain, "content": _read_content(message.get("content"), path)}, path)


def _read_content(content: Any, path: str) -> str:
    """The text; parts are joined by line ends, and a message without content has an empty one."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRejected(
            f"{path}.content must be a string or a list of parts, not {describe(content)}", param=f"{path}.content"
        )
    texts = []
    for index, part in enumerate(content):
        param = f"{path}.content[{index}]"
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestRejected(
                f'{param} is not supported: only parts of type "text" are taken', code="not-supported", param=param
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _read_carried(messages: Sequence[Any], given: Mapping[str, Any]) -> Carried | None:
    prefix = given.get("required_prefix_token_ids")
    replies = [i for i, one in enumerate(messages) if isinstance(one, dict) and one.get("role") == "assistant"]
    if prefix is not None:
        param = "required_prefix_token_ids"
        if not replies:
            raise RequestRejected(f"{param} needs a message of the assistant", param=param)
        return Carried(index=replies[-1], ids=_ids(prefix, param), param=param)
    for index in reversed(replies):
        message = messages[index]
        if message.get("generation_token_ids") is not None:
            path = f"messages[{index}]"
            ids = (*_ids(message.get("prompt_token_ids"), f"{path}.prompt_token_ids"),)
            made = _ids(message["generation_token_ids"], f"{path}.generation_token_ids")
            return Carried(index=index, ids=ids + made, param=f"{path}.generation_token_ids")
    return None


def _ids(value: Any, param: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise RequestRejected(f"{param} must be a list of token ids, not {describe(value)}", param=param)
    return read_token_ids(value, param)


async def conversation_ids(conversation: Conversation, serving: Serving) -> list[int]:
    """The prompt's ids.

    :raises RequestRejected: when there is no template, or it refuses the messages.
    """
    tokenizer = serving.tokenizer
    if tokenizer is None:
        raise RequestRejected(
            "messages need a tokenizer, and this server has none",
            [("try", "/generate or /v1/completions with token ids")],
            code="no-tokenizer",
            param="messages",
        )
    return await asyncio.to_thread(_encode, conversation, tokenizer, serving)


def _encode(conversation: Conversation, tokenizer: ChatTokenizer, serving: Serving) -> list[int]:
    carried = conversation.carried
    most_chars = serving.engine.max_context * CHARS_PER_TOKEN
    if carried is not None and conversation.continue_final_message and carried.index == len(conversation.messages) - 1:
        return _without_end(list(carried.ids), serving)
    ids = encode_chat(
        tokenizer,
        conversation.messages,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        variables=conversation.variables,
        most_chars=most_chars,
    )
    return ids if carried is None else _spliced(ids, carried, conversation, tokenizer, serving)


def _spliced(
    ids: list[int], carried: Carried, conversation: Conversation, tokenizer: ChatTokenizer, serving: Serving
) -> list[int]:
    """The carried ids, then what the template puts after the end token of their reply."""
    ends = frozenset(serving.engine.model.eos_token_ids)
    until = encode_chat(
        tokenizer,
        conversation.messages[: carried.index + 1],
        add_generation_prompt=False,
        variables=conversation.variables,
    )
    # Templates write an earlier reply in another way once more messages follow; they end as many messages.
    places = [index for index, token in enumerate(ids) if token in ends]
    count = sum(token in ends for token in until)
    if not 0 < count <= len(places):
        raise RequestRejected(
            "the chat template does not end a reply with an end token, so token ids cannot be carried over",
            code="chat-template-refused",
            param=carried.param,
        )
    end = places[count - 1]
    known = list(carried.ids)
    return [*known, *ids[end + (known[-1] in ends) :]]


def _without_end(ids: list[int], serving: Serving) -> list[int]:
    return ids[:-1] if ids[-1] in serving.engine.model.eos_token_ids else ids
