"""Finds a tokenizer beside a checkpoint and reads what its small files say.  Standard library only.

Accepted are the fast ``tokenizer.json`` and, where they are, ``tokenizer_config.json``,
``special_tokens_map.json``, ``generation_config.json`` and ``chat_template.jinja``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gtp_serve.errors import CheckpointCorrupt, Details, NoTokenizer
from gtp_serve.loaders.files import file_size, read_json, read_whole

#: Largest ``tokenizer.json``; the largest known one has about 35 MB.
MAX_TOKENIZER_BYTES = 512 << 20
#: Largest chat template in bytes; the largest known ones have about 30 kB.
MAX_TEMPLATE_BYTES = 256 << 10

#: Fields of tokenizer_config that name one special token each; templates see them as variables.
SPECIAL_FIELDS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SLOW_FILES = (
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tokenizer.tiktoken",
    "tekken.json",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """A tokenizer on disk and the facts around it; nothing of ``tokenizer.json`` itself has been read."""

    folder: Path
    tokenizer_json: Path
    config_json: Path | None = None
    chat_template: str | None = None
    """Jinja source: ``chat_template.jinja``, else tokenizer_config's; of several, the one named default."""
    chat_template_origin: str = ""
    """File that the template came from, for messages."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Text by field name, for example ``{"eos_token": "<|im_end|>"}``."""
    other_special_tokens: tuple[str, ...] = ()
    """Further special tokens that have no field of their own."""
    eos_token_ids: tuple[int, ...] = ()
    """End tokens that generation_config.json lists; the tokenizer's own ``eos_token`` is not among them."""
    bos_token_id: int | None = None
    """As generation_config.json says."""
    clean_up_spaces: bool = False
    """tokenizer_config asks for transformers' clean-up of spaces before punctuation."""


def find_tokenizer(folder: Path) -> TokenizerFiles | None:
    """The tokenizer that belongs to a checkpoint folder, or None.

    Looked at in order: the folder, ``tokenizer/`` in it; for an ``iter_*`` folder also its parent's.

    :raises CheckpointCorrupt: when one is there and its files are damaged.
    """
    for candidate in _candidates(folder):
        if (candidate / "tokenizer.json").exists():
            return _read(candidate / "tokenizer.json")
    return None


def tokenizer_at(path: Path) -> TokenizerFiles:
    """The tokenizer that an operator named: a folder or a ``tokenizer.json`` file.

    :raises NoTokenizer: when there is none at this path.
    :raises CheckpointCorrupt: when its files are damaged.
    """
    if path.is_file():
        if path.suffix != ".json":
            raise NoTokenizer(f"{path} is not a tokenizer.json", [("needed", "a tokenizer.json file, or its folder")])
        return _read(path)
    found = find_tokenizer(path)
    if found is None:
        raise NoTokenizer(f"{path} holds no tokenizer.json", missing_tokenizer_details(path))
    return found


def missing_tokenizer_details(folder: Path) -> Details:
    """Lines for a NoTokenizer error about a folder: what lies there instead and what to do."""
    slow = [name for name in _SLOW_FILES if (folder / name).is_file()]
    lines = []
    if slow:
        lines.append(("found", f"{', '.join(slow)}: a slow tokenizer, which is not read"))
        lines.append(
            (
                "needed",
                "tokenizer.json (transformers writes it: AutoTokenizer.from_pretrained, save_pretrained)",
            )
        )
    lines.append(("try", "--tokenizer PATH of a Hugging Face folder, or --no-tokenizer (token ids only)"))
    return lines


def _candidates(folder: Path) -> Iterator[Path]:
    yield folder
    yield folder / "tokenizer"
    if folder.name.startswith("iter_"):
        yield folder.parent
        yield folder.parent / "tokenizer"


def _read(tokenizer_json: Path) -> TokenizerFiles:
    folder = tokenizer_json.parent
    root = _root(folder)
    if file_size(tokenizer_json, root) > MAX_TOKENIZER_BYTES:
        raise CheckpointCorrupt(
            f"{tokenizer_json} is larger than {MAX_TOKENIZER_BYTES >> 20} MiB",
            [("likely", "not a tokenizer")],
        )
    config = _optional(folder, root, "tokenizer_config.json")
    generation = _optional(folder, root, "generation_config.json")
    special = _optional(folder, root, "special_tokens_map.json") | config
    template, origin = _chat_template(folder, root, config)
    return TokenizerFiles(
        folder=folder,
        tokenizer_json=tokenizer_json,
        config_json=_existing(folder / "tokenizer_config.json"),
        chat_template=template,
        chat_template_origin=origin,
        special_tokens={name: text for name in SPECIAL_FIELDS if (text := _token_text(special.get(name)))},
        other_special_tokens=_other_tokens(special),
        eos_token_ids=_token_ids(generation.get("eos_token_id")),
        bos_token_id=next(iter(_token_ids(generation.get("bos_token_id"))), None),
        clean_up_spaces=config.get("clean_up_tokenization_spaces") is True,
    )


def _root(folder: Path) -> Path:
    """Where links may lead: inside the folder; for a snapshot in a hub cache, inside that model's entry."""
    real = folder.resolve()
    return real.parent.parent if real.parent.name == "snapshots" else real


def _existing(path: Path) -> Path | None:
    return path if path.exists() else None


def _optional(folder: Path, root: Path, name: str) -> dict[str, Any]:
    path = folder / name
    return read_json(path, root) if path.exists() else {}


def _token_text(value: object) -> str | None:
    """A special token is written as text or as an object with its flags."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _other_tokens(special: Mapping[str, Any]) -> tuple[str, ...]:
    extra = special.get("additional_special_tokens") or special.get("extra_special_tokens") or []
    values = extra.values() if isinstance(extra, dict) else extra
    return tuple(text for value in values if (text := _token_text(value))) if isinstance(extra, list | dict) else ()


def _token_ids(value: object) -> tuple[int, ...]:
    """One id, a list of ids or nothing; what is not an id is ignored, as a missing field is."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def _chat_template(folder: Path, root: Path, config: Mapping[str, Any]) -> tuple[str | None, str]:
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_template(path, root), str(path)
    template = _default_template(config.get("chat_template"))
    if template is not None and len(template.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
        raise CheckpointCorrupt(
            f"the chat template in {folder / 'tokenizer_config.json'} is too large", _template_limit()
        )
    return template, str(folder / "tokenizer_config.json") if template is not None else ""


def read_template(path: Path, root: Path | None = None) -> str:
    """The Jinja source in a file; UTF-8, with or without a byte-order mark.

    :raises CheckpointCorrupt: when it cannot be read, is too large, leaves ``root`` or is not UTF-8.
    """
    data = read_whole(path, root or path.resolve().parent, MAX_TEMPLATE_BYTES)
    try:
        # Jinja itself turns CRLF into LF.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointCorrupt(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _template_limit() -> Details:
    return [("limit", f"{MAX_TEMPLATE_BYTES >> 10} KiB")]


def _default_template(value: object) -> str | None:
    """Text, or a list of ``{"name", "template"}``: of that the one named default, or the only one."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    named = {
        entry["name"]: entry["template"]
        for entry in value
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    only = next(iter(named.values())) if len(named) == 1 else None
    return named.get("default", only)
