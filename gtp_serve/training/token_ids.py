"""The check that token ids exist: a shard looks away from ids that are not its own, so nobody else would notice."""

from __future__ import annotations

import torch
from torch import Tensor

from gtp_serve.errors import UsageError


def check_ids(ids: Tensor, vocab_size: int, what: str) -> None:
    """Refuse ids outside ``0 .. vocab_size - 1``.

    On a GPU nothing is waited for: there the device's own assertion ends the process, as torch's embedding does.

    :param what: what the ids are, for the error.
    :raises UsageError: on a CPU, naming the first.
    """
    exist = (ids >= 0) & (ids < vocab_size)
    if ids.is_cuda:
        torch._assert_async(exist.all())
    elif not exist.all():
        bad = int(ids[~exist][0])
        raise UsageError(
            f"{what} has {bad}, which is no token id of this model", [("needed", f"0 to {vocab_size - 1}")]
        )
