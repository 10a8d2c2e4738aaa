"""Which table of ops a machine gets."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import torch

from gtp_serve.ops.deterministic import deterministic_ops
from gtp_serve.ops.table import PLAIN_PAGED, REFERENCE, Ops


def choose_ops(*, device: str, dtype: torch.dtype, head_dim: int, deterministic: bool = False) -> Ops:
    """The fastest table that this device and the installed packages can run; its ``name`` says which.

    :param deterministic: the one whose results do not depend on what is computed beside them, on any device.
    """
    if deterministic:
        return deterministic_ops()
    if torch.device(device).type != "cuda":
        return REFERENCE
    if find_spec("triton") is None:
        return replace(PLAIN_PAGED, name="plain torch, slow: Triton is not installed")
    # Imported here because Triton is not there on every machine.
    from gtp_serve.ops.cuda import cuda_ops

    return cuda_ops(device=device, dtype=dtype, head_dim=head_dim)
