"""TransformerEngine's own Linear, LayerNormLinear and GroupedLinear on a machine without a GPU.

``load`` imports the pure-Python wheel and puts torch code in place of the native functions that those layers call, so
that their constructors and autograd functions run on a CPU in float32 and bfloat16.  It changes the process for good:
call it in a process that does nothing else.  Quantisation, attention and Userbuffers are not there.

TransformerEngine is NVIDIA's, under the Apache License 2.0, and no statement of it is restated here: the functions that
insist on a GPU (``TransformerEngineBaseModule.__init__`` and ``prepare_forward``, ``get_dummy_wgrad``,
``general_grouped_gemm``) are compiled anew from the installed source with the phrases of ``_EDITS`` replaced, and a
version that lacks a phrase is refused.  The values of the enumerations are those of its public headers
transformer_engine.h and fused_attn.h.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import inspect
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ROOT = "transformer_engine.pytorch"


def is_installed() -> bool:
    """Whether there is something to load; imports nothing."""
    return importlib.util.find_spec("transformer_engine") is not None


def load() -> Any:
    """``transformer_engine.pytorch``, ready to run."""
    if "transformer_engine_torch" not in sys.modules:
        _import()
        _make_runnable()
    return sys.modules[ROOT]


def _import() -> None:
    before = {name: os.environ.get(name) for name in ("NVTE_PROJECT_BUILDING", "NVTE_FRAMEWORK")}
    os.environ.update(NVTE_PROJECT_BUILDING="1", NVTE_FRAMEWORK="none")  # no shared objects, no word about it
    try:
        common: Any = importlib.import_module("transformer_engine.common")
        common.load_framework_extension = lambda framework: None
        sys.modules["transformer_engine_torch"] = _native_module()
        for name in _foreign_modules(Path(common.__file__).parent.parent / "pytorch"):
            sys.modules[name] = _Hollow(name)
        importlib.import_module(ROOT)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _foreign_modules(folder: Path) -> list[str]:
    """Modules that need packages of their own."""
    kernels = [path.stem for path in (folder / "triton").glob("*.py") if path.stem != "__init__"]
    return [f"{ROOT}.onnx_extensions", f"{ROOT}.triton", *(f"{ROOT}.triton.{name}" for name in kernels)]


class _Hollow(ModuleType):
    """Has every name, and nothing behind it."""

    __path__: list[str] = []  # noqa: RUF012  # a package's

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{self.__name__}.{name}")


def _missing(name: str) -> Any:
    """A class, as some names are used in type unions."""

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{name} is not there without a GPU")

    return type(name.rpartition(".")[2], (), {"__init__": refuse})


# What the native module has

_ENUMS = {
    "DType": {
        "kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6,
        "kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10,
    },
    "FP8FwdTensors": [
        "GEMM1_INPUT", "GEMM1_WEIGHT", "GEMM1_OUTPUT", "GEMM2_INPUT", "GEMM2_WEIGHT", "GEMM2_OUTPUT",
        "GEMM3_INPUT", "GEMM3_WEIGHT", "GEMM3_OUTPUT",
    ],
    "FP8BwdTensors": [
        "GRAD_OUTPUT1", "GRAD_INPUT1", "GRAD_OUTPUT2", "GRAD_INPUT2", "GRAD_OUTPUT3", "GRAD_INPUT3",
    ],
    "NVTE_Fused_Attn_Backend": {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
    "NVTE_QKV_Layout": [
        f"NVTE_{layout}"
        for layout in (
            "SB3HD", "SBH3D", "SBHD_SB2HD", "SBHD_SBH2D", "SBHD_SBHD_SBHD",
            "BS3HD", "BSH3D", "BSHD_BS2HD", "BSHD_BSH2D", "BSHD_BSHD_BSHD",
            "T3HD", "TH3D", "THD_T2HD", "THD_TH2D", "THD_THD_THD",
            "SBHD_BSHD_BSHD", "BSHD_SBHD_SBHD", "THD_BSHD_BSHD", "THD_SBHD_SBHD",
            "Paged_KV_BSHD_BSHD_BSHD", "Paged_KV_BSHD_SBHD_SBHD", "Paged_KV_SBHD_BSHD_BSHD",
            "Paged_KV_SBHD_SBHD_SBHD", "Paged_KV_THD_BSHD_BSHD", "Paged_KV_THD_SBHD_SBHD", "BHSD_BHSD_BHSD",
            "QKV_Layout_NOT_SET",
        )
    ],
    "NVTE_QKV_Format": [
        "NVTE_SBHD", "NVTE_BSHD", "NVTE_THD", "NVTE_BSHD_2SBHD", "NVTE_SBHD_2BSHD", "NVTE_THD_2BSHD",
        "NVTE_THD_2SBHD", "NVTE_BHSD", "NVTE_QKV_Format_NOT_SET",
    ],
    "NVTEScalingMode": {"NVTE_DELAYED_TENSOR_SCALING": 0, "NVTE_MXFP8_1D_SCALING": 1, "NVTE_INVALID_SCALING": 100},
    "NVTE_Bias_Type": ["NVTE_NO_BIAS", "NVTE_PRE_SCALE_BIAS", "NVTE_POST_SCALE_BIAS", "NVTE_ALIBI"],
    "NVTE_Mask_Type": [
        "NVTE_NO_MASK", "NVTE_PADDING_MASK", "NVTE_CAUSAL_MASK", "NVTE_PADDING_CAUSAL_MASK",
        "NVTE_CAUSAL_BOTTOM_RIGHT_MASK", "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    ],
    "NVTE_Softmax_Type": ["NVTE_VANILLA_SOFTMAX", "NVTE_OFF_BY_ONE_SOFTMAX", "NVTE_LEARNABLE_SOFTMAX"],
}  # fmt: skip

#: Looked up when TransformerEngine is imported, and never called by the layers that run here.
_LOOKED_UP = [
    "CommOverlap", "CommOverlapP2P", "CommOverlapType",
    "FP8TensorMeta", "bulk_overlap_ag_with_external_gemm", "dbias_dgelu",
    "dbias_drelu", "multi_tensor_adam", "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master", "multi_tensor_adam_fp8", "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_compute_scale_inv_e8m0", "multi_tensor_l2norm", "multi_tensor_scale",
    "multi_tensor_scale_tensor", "multi_tensor_sgd", "multi_tensor_unscale_l2norm",
]  # fmt: skip


def _native_module() -> ModuleType:
    """Stands in for the built extension ``transformer_engine_torch``."""
    module = ModuleType("transformer_engine_torch")
    functions = [layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd, generic_gemm, te_general_grouped_gemm]
    names: dict[str, Any] = {function.__name__: function for function in functions}
    names |= {name: _missing(name) for name in _LOOKED_UP}
    for name, members in _ENUMS.items():
        values = members if isinstance(members, dict) else {member: n for n, member in enumerate(members)}
        names[name] = enum.IntEnum(name, values)
    vars(module).update(names, __all__=list(names))  # TransformerEngine star-imports it
    return module


def _product(a: Tensor, transa: bool, b: Tensor, transb: bool, dtype: torch.dtype) -> Tensor:
    """op(B) op(A), summed up in float32 when that is what comes out."""
    left, right = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
    if dtype == torch.float32:
        left, right = left.float(), right.float()
    return ((left.t() if transb else left) @ (right.t() if transa else right)).to(dtype)


def _store(value: Tensor, out: Tensor, accumulate: bool) -> None:
    if accumulate:
        out.add_(value)
    else:
        out.copy_(value)


def generic_gemm(
    a: Tensor,
    transa: bool,
    b: Tensor,
    transb: bool,
    out: Tensor | None,
    quantizer: None,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **overlap: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """(result, gradient of the bias, None, None); with ``grad`` the bias only says that its gradient is wanted."""
    assert quantizer is None
    assert not gelu
    assert overlap["comm_overlap"] is None
    assert overlap["alpha"] == 1
    constants: Any = sys.modules[f"{ROOT}.constants"]
    kind = out.dtype if out is not None else a.dtype if out_dtype is None else constants.TE_DType_To_Torch[out_dtype]
    value = _product(a, transa, b, transb, kind)
    bias_grad = None
    if bias is not None and grad:
        bias_grad = b.reshape(-1, b.shape[-1]).sum(0).to(bias.dtype)
    elif bias is not None:
        value = value + bias
    if out is None:
        return value, bias_grad, None, None
    _store(value, out, accumulate)
    return out, bias_grad, None, None


def te_general_grouped_gemm(
    a: Sequence[Tensor],
    transa: bool,
    b: Sequence[Tensor],
    transb: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_in: Sequence[Tensor],
    grad: bool,
    workspaces: Sequence[Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    streams: int,
) -> Sequence[Tensor]:
    """One product after another; a ``bias`` without elements is none, and with ``grad`` it is filled."""
    places = torch.split(out[0], [int(count) for count in m_splits]) if single_output else out
    for one_a, one_b, place, one_bias in zip(a, b, places, bias, strict=True):
        value = _product(one_a, transa, one_b, transb, place.dtype)
        if one_bias.numel() and grad:
            one_bias.copy_(one_b.sum(0))
        elif one_bias.numel():
            value = value + one_bias
        _store(value, place, accumulate)
    return bias


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: None,
    out_dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed, mean, 1 / standard deviation)."""
    wide = x.float()
    mean = wide.mean(-1)
    rsigma = (wide.var(-1, correction=0) + eps).rsqrt()
    normed = (wide - mean[:, None]) * rsigma[:, None] * _scale(weight, zero_centered) + bias.float()
    return normed.to(x.dtype), mean, rsigma


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    quantizer: None,
    out_dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[Tensor, None, Tensor]:
    """(normed, None, 1 / root mean square)."""
    wide = x.float()
    rsigma = (wide.square().mean(-1) + eps).rsqrt()
    return (wide * rsigma[:, None] * _scale(weight, zero_centered)).to(x.dtype), None, rsigma


def layernorm_bwd(
    dy: Tensor, x: Tensor, mean: Tensor, rsigma: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    unit = (x.float() - mean[:, None]) * rsigma[:, None]
    scaled = dy.float() * _scale(weight, zero_centered)
    inner = scaled - scaled.mean(-1, keepdim=True) - unit * (scaled * unit).mean(-1, keepdim=True)
    dweight = (dy.float() * unit).sum(0).to(weight.dtype)
    return (inner * rsigma[:, None]).to(x.dtype), dweight, dy.float().sum(0).to(weight.dtype)


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, sm_margin: int, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    unit = x.float() * rsigma[:, None]
    scaled = dy.float() * _scale(weight, zero_centered)
    inner = scaled - unit * (scaled * unit).mean(-1, keepdim=True)
    return (inner * rsigma[:, None]).to(x.dtype), (dy.float() * unit).sum(0).to(weight.dtype)


def _scale(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


# What of TransformerEngine's Python insists on a GPU

#: (module, class or "", function): phrases of its source and what stands for them.
_EDITS = {
    ("module.base", "TransformerEngineBaseModule", "__init__"): {
        "not torch.cuda.is_available()": "False",
        "super().__init__()": "torch.nn.Module.__init__(self)",  # compiled outside its class
    },
    ("module.base", "TransformerEngineBaseModule", "prepare_forward"): {"not inp.is_cuda": "False"},
    ("module.base", "", "get_dummy_wgrad"): {'device="cuda"': 'device="cpu"'},
    ("cpp_extensions.gemm", "", "general_grouped_gemm"): {'device="cuda"': 'device="cpu"'},
}


def _make_runnable() -> None:
    for (module_name, class_name, name), phrases in _EDITS.items():
        module = sys.modules[f"{ROOT}.{module_name}"]
        owner: Any = getattr(module, class_name) if class_name else module
        edited = _edited(getattr(owner, name), phrases, vars(module))
        if class_name:
            setattr(owner, name, edited)
        else:
            _replace(name, edited)
    states: Any = sys.modules[f"{ROOT}.quantization"]
    states.FP8GlobalStateManager.fp8_graph_capturing = classmethod(lambda cls: False)
    _replace("_empty_tensor", lambda: torch.empty(0))
    _replace("get_sm_count", lambda: 1)
    _replace(
        "get_cublas_workspace",
        lambda device, ub, grouped: [torch.empty(0, dtype=torch.uint8)] if grouped else torch.empty(0),
    )


def _edited(function: Any, phrases: dict[str, str], names: dict[str, Any]) -> Any:
    source = textwrap.dedent(inspect.getsource(function))
    for phrase, instead in phrases.items():
        assert phrase in source, f"{function.__qualname__} of this TransformerEngine has no {phrase!r}"
        source = source.replace(phrase, instead)
    made: dict[str, Any] = {}
    future = "from __future__ import annotations\n"  # what its annotations name need not be there
    exec(compile(future + source, inspect.getfile(function), "exec"), names, made)
    return made[function.__name__]


def _replace(name: str, instead: Any) -> None:
    """In every module that has imported it."""
    found = [m for key, m in list(sys.modules.items()) if key.startswith(ROOT) and name in vars(m)]
    assert found, f"this TransformerEngine has no {name}"
    for module in found:
        setattr(module, name, instead)
