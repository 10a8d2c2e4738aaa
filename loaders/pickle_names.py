"""Every name that a pickle inside a checkpoint may mention, as exact (module, name) pairs.

None of them is ever imported or called: each stands for an inert record.  Collected from checkpoints that
megatron-core 0.13 to 0.20 and torch 2.3 to 2.13 wrote, and from megatron-core's own ``SAFE_GLOBALS``.
"""

from __future__ import annotations

_DTYPES = (
    "bfloat16 float16 float32 float64 half float double int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "bool complex64 complex128 quint8 qint8 qint32 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)

#: Element type of each typed storage class that ``torch.save`` names.
STORAGE_DTYPES = {
    "torch.BFloat16Storage": "bfloat16",
    "torch.HalfStorage": "float16",
    "torch.FloatStorage": "float32",
    "torch.DoubleStorage": "float64",
    "torch.CharStorage": "int8",
    "torch.ShortStorage": "int16",
    "torch.IntStorage": "int32",
    "torch.LongStorage": "int64",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}

_CHECKPOINT = "torch.distributed.checkpoint."
_MCORE = "megatron.core."

_GROUPS: tuple[tuple[str, str], ...] = (
    ("torch", "Size device"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_tensor_v2 _rebuild_parameter"),
    ("torch._C", "Generator"),
    ("torch.storage", "UntypedStorage TypedStorage"),
    (_CHECKPOINT + "filesystem", "_StorageInfo"),
    (
        _CHECKPOINT + "metadata",
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
        "_MEM_FORMAT_ENCODING MetadataIndex StorageMeta",
    ),
    (_CHECKPOINT + "planner", "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData"),
    (_MCORE + "dist_checkpointing.strategies.torch", "MCoreSavePlan MCoreMetadata"),
    (_MCORE + "enums", "ModelType Fp8Recipe Fp4Recipe"),
    (
        _MCORE + "transformer.enums",
        "AttnBackend AttnMaskType AttnType LayerType CudaGraphModule CudaGraphScope InferenceCudaGraphScope ModelType",
    ),
    (_MCORE + "optimizer.optimizer_config", "OptimizerConfig"),
    (_MCORE + "optimizer", "OptimizerConfig"),
    (_MCORE + "rerun_state_machine", "RerunDiagnostic RerunMode RerunState"),
    (_MCORE + "transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout"),
    ("argparse", "Namespace"),
    ("collections", "OrderedDict"),
    ("signal", "Signals"),
    ("types", "SimpleNamespace"),
    ("pathlib", "PosixPath PurePosixPath Path PurePath WindowsPath PureWindowsPath"),
    ("pathlib._local", "PosixPath PurePosixPath Path PurePath WindowsPath PureWindowsPath"),
    ("_io", "BytesIO"),
    ("io", "BytesIO"),
    ("numpy", "dtype ndarray"),
    ("numpy.dtypes", "UInt32DType"),
    ("numpy.core.multiarray", "_reconstruct scalar"),
    ("numpy._core.multiarray", "_reconstruct scalar"),
    ("_codecs", "encode"),
    ("__builtin__", "set"),
    ("builtins", "set"),
)

ALLOWED: frozenset[tuple[str, str]] = frozenset(
    [
        *((module, name) for module, names in _GROUPS for name in names.split()),
        *(("torch", name) for name in _DTYPES.split()),
        *(("torch", storage.removeprefix("torch.")) for storage in STORAGE_DTYPES),
    ]
)
