"""Which table of ops a machine gets."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import torch

from gtp_serve.config import AttentionBackend
from gtp_serve.errors import EnvironmentFault, UsageError
from gtp_serve.ops.cpu.library import find_library, shared_threads
from gtp_serve.ops.cpu.native import COMPUTED, native_ops
from gtp_serve.ops.deterministic import deterministic_ops
from gtp_serve.ops.flash_attn import flash_attn_ops
from gtp_serve.ops.flashinfer import flashinfer_ops
from gtp_serve.ops.table import PLAIN_PAGED, REFERENCE, Ops, plan_single_tokens

_FIRST_CAPABILITY = (8, 0)
"""Of the GPUs that FlashInfer and flash-attn serve."""


def choose_ops(
    *,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int = 16,
    attention: AttentionBackend = "auto",
    deterministic: bool = False,
) -> Ops:
    """The fastest table that this device and the installed packages can run; its ``name`` says which.

    :param attention: what is to compute attention.  "auto" never picks an extra: which packages happen to be
        installed decides no bit of an answer.  On a CPU "torch" stands for all ops.
    :param deterministic: the one whose results do not depend on what is computed beside them, on any device.
    :raises UsageError: the attention that was named does not serve this engine.
    :raises EnvironmentFault: its package is not there.
    """
    if deterministic and attention != "auto":
        raise UsageError(
            f"--deterministic computes attention in an order of its own, not by --attention-backend {attention}",
            [("try", "one of the two")],
        )
    if torch.device(device).type == "cuda":
        return deterministic_ops() if deterministic else _on_a_gpu(device, dtype, head_dim, block_size, attention)
    if attention not in ("auto", "torch"):
        raise UsageError(
            f"--attention-backend {attention} needs a GPU, and the device is {device}",
            [("try", "--attention-backend auto")],
        )
    if attention == "torch":
        return REFERENCE
    return _on_a_cpu(dtype, deterministic=deterministic)


def _on_a_cpu(dtype: torch.dtype, *, deterministic: bool) -> Ops:
    """The native ops, which are deterministic; torch where they are not there."""
    library = find_library()
    if dtype not in COMPUTED:
        library = f"the native CPU ops do not compute in {str(dtype).removeprefix('torch.')}"
    if not isinstance(library, str):
        return native_ops(shared_threads(library, torch.get_num_threads()))
    plain = deterministic_ops() if deterministic else REFERENCE
    return replace(plain, name=f"{plain.name}, slow: {library}")


def _on_a_gpu(device: str, dtype: torch.dtype, head_dim: int, block_size: int, attention: AttentionBackend) -> Ops:
    if find_spec("triton") is None:
        if attention == "triton":
            raise EnvironmentFault("--attention-backend triton needs Triton, which is not installed")
        base = auto = replace(PLAIN_PAGED, name="plain torch, slow: Triton is not installed")
    else:
        # Imported here because Triton is not there on every machine.
        from gtp_serve.ops.cuda import cuda_ops, triton_ops

        base, auto = triton_ops(None), cuda_ops(device=device, dtype=dtype, head_dim=head_dim)
    match attention:
        case "auto":
            return auto
        case "triton":
            return base
        case "torch":
            name = f"{base.name.split(',')[0]}, attention by plain torch, slow"
            return replace(base, name=name, plan_attention=plan_single_tokens)
    if torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        raise UsageError(
            f"--attention-backend {attention} does not serve {torch.cuda.get_device_name(device)}",
            [("needed", "an Ampere GPU or a newer one"), ("try", "--attention-backend auto")],
        )
    if attention == "flashinfer":
        return flashinfer_ops(base, dtype=dtype, head_dim=head_dim)
    return flash_attn_ops(base, dtype=dtype, head_dim=head_dim, block_size=block_size)
