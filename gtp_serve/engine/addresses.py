"""Where the memory lies that captured steps read: noted at capture, compared after each weight update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gtp_serve.errors import EngineFault

_SHOWN = 5

NamedTensors = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Address:
    """All that a captured step has taken from a tensor; its values may change, this may not."""

    pointer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> Address:
        """Of a live tensor."""
        return Address(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


class AddressRegistry:
    """Addresses of parameters and KV caches.

    :param current: names and tensors as the model holds them at the time of the call.
    """

    def __init__(self, current: Callable[[], NamedTensors]) -> None:
        self._current = current
        self._noted: dict[str, Address] | None = None

    def register(self) -> int:
        """Note where everything lies now; returns how many tensors that is."""
        self._noted = self._addresses()
        return len(self._noted)

    def check(self) -> None:
        """Compare with what was noted; nothing noted is nothing to compare.

        :raises EngineFault: a tensor moved, came or went; it is named, and captured steps must not run again.
        """
        if self._noted is None:
            return
        now = self._addresses()
        wrong = [_difference(name, self._noted.get(name), now.get(name)) for name in self._noted | now]
        found = [text for text in wrong if text]
        if found:
            more = [("and", f"{len(found) - _SHOWN} more")] if len(found) > _SHOWN else []
            raise EngineFault(
                f"{found[0]} since the decode step was captured, which would go on reading the old memory",
                [*(("also", text) for text in found[1:_SHOWN]), *more],
                code="moved-parameter",
            )

    def _addresses(self) -> dict[str, Address]:
        return {name: Address.of(tensor) for name, tensor in self._current()}


def _difference(name: str, noted: Address | None, now: Address | None) -> str:
    if noted is None:
        return f"{name} has appeared"
    if now is None:
        return f"{name} has gone"
    if noted == now:
        return ""
    if noted.pointer != now.pointer:
        return f"{name} has moved"
    return f"{name} has changed from {_form(noted)} to {_form(now)}"


def _form(address: Address) -> str:
    return f"{address.dtype} {list(address.shape)} with strides {list(address.stride)}"
