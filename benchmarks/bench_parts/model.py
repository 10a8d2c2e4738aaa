"""The model that is measured: its sizes, and prompts of real text in its tokens."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

from tokenizers import Tokenizer

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What a step has to read and to multiply."""

    parameters: int
    """That a decode step multiplies with; a tied head counts, the embedding's rows do not."""
    layer_parameters: int
    """The same without the head, which a prompt needs for its last token only."""
    matrix_parameters: int
    """Those that quantising shrinks."""
    bytes: int
    """Of the checkpoint."""

    def weight_bytes(self, dtype: str) -> int:
        """That a decode step reads: two for a parameter, or one where matrices are quantised to 8 bits."""
        if dtype.startswith("bf16"):
            return 2 * self.parameters
        shares = {"int8": 1.0, "q8_0": 34 / 32, "int4": 0.5625, "fp32": 4.0}
        return int(shares[dtype] * self.matrix_parameters) + 2 * (self.parameters - self.matrix_parameters)


def model_size(folder: Path) -> Size:
    """From the headers of a folder's safetensors files.

    :raises FileNotFoundError: it has none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no *.safetensors")
    shapes: dict[str, list[int]] = {}
    for path in files:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: facts["shape"] for name, facts in header.items() if name != "__metadata__"}
    counts = {name: math.prod(shape) for name, shape in shapes.items()}
    head = counts.get("lm_head.weight", counts[_EMBEDDING])
    layers = sum(count for name, count in counts.items() if name not in (_EMBEDDING, "lm_head.weight"))
    matrices = head + sum(
        counts[n] for n, s in shapes.items() if len(s) > 1 and n not in (_EMBEDDING, "lm_head.weight")
    )
    return Size(
        parameters=layers + head,
        layer_parameters=layers,
        matrix_parameters=matrices,
        bytes=sum(path.stat().st_size for path in files),
    )


class Prompts:
    """Pieces of the documentation that comes with Python, none of them twice."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        text = "\n\n".join(topics[name] for name in sorted(topics))
        self._text = text
        self._ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        self._at = 0

    def take(self, count: int, length: int) -> list[list[int]]:
        """So many prompts of that many tokens; begins anew at the text's end."""
        found = []
        for _ in range(count):
            if self._at + length > len(self._ids):
                self._at = 0
            found.append(self._ids[self._at : self._at + length])
            self._at += length
        return found

    def texts(self, count: int, length: int) -> list[str]:
        """So many different pieces of text of that many characters."""
        room = len(self._text) - length
        return [self._text[at : at + length] for at in (number * 7919 % room for number in range(count))]
