"""Completeness of checkpoints that store tensors whole: each needed one is there and each there is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gtp_serve.errors import LayoutMismatch
from gtp_serve.layout.spans import Shape
from gtp_serve.loaders.files import shown

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Found:
    """A stored tensor: its name in the file, its shape and the file."""

    stored_name: str
    shape: Shape
    path: Path


def check_complete(found: Mapping[str, Found], expected: Mapping[str, Shape], where: Path) -> None:
    """Compare by logical name.

    :param expected: every tensor that the model needs.
    :raises LayoutMismatch: naming tensors, both shapes and the file.
    """
    missing = [name for name in expected if name not in found]
    if missing:
        raise LayoutMismatch(
            f"{where} lacks {len(missing)} weight(s): {_list(missing)}",
            [("needed", "every weight of the model")],
        )
    unknown = [f"{shown(one.stored_name)} in {one.path.name}" for name, one in found.items() if name not in expected]
    if unknown:
        raise LayoutMismatch(
            f"{where} holds {len(unknown)} tensor(s) that the model does not have: {_list(unknown)}",
            [("needed", "a configuration and weights that belong together")],
            code="ckpt-unknown-key",
        )
    for name, shape in expected.items():
        one = found[name]
        if one.shape != shape:
            raise LayoutMismatch(
                f"{one.path}: {one.stored_name} has the shape {list(one.shape)}, the model has {list(shape)}",
                [("needed", "a configuration and weights that belong together")],
            )


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
