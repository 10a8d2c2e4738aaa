"""Frozen, keyword-only configuration values.  No torch; "auto" is settled once by whoever builds the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DType = Literal["float32", "bfloat16", "float16"]
AttentionBackend = Literal["auto", "torch", "triton", "flashinfer", "flash-attn"]
Quant = Literal["none", "int8"]
RefitMemory = Literal["staged", "inplace"]
"""New weights fill a second set while the first serves, or the live set itself while nothing runs."""
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

#: Model families that are served, by their Hugging Face ``model_type``.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding; halves rotate (not interleaved pairs).

    ``scaling`` names one of Hugging Face's variants; ``linear`` uses ``factor`` only, ``llama3`` the two frequency
    factors and ``original_context``, ``yarn`` the betas, ``dynamic`` ``original_context``.
    """

    theta: float = 10000.0
    scaling: Literal["none", "linear", "dynamic", "llama3", "yarn"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """yarn's multiplier of cos and sin; None means ``0.1 ln(factor) + 1``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Routed experts.  Router: softmax in float32, then the top ``top_k``."""

    num_experts: int
    top_k: int
    ffn_size: int
    """Rows of one expert's gate projection."""
    normalise_top_k: bool = True
    """Divide the chosen probabilities by their sum (equal to a softmax over the chosen logits)."""
    shared_ffn_size: int = 0
    """Rows of the shared expert's gate projection; 0 means none."""
    shared_gate: bool = False
    """The shared expert's output is multiplied by a sigmoid gate (Qwen2-MoE)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One decoder-only model, in logical (unsharded, unpadded) sizes."""

    family: str
    """One of FAMILIES; it names the checkpoint's kind, the fields below decide the computation."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Rows of the dense gate projection; 0 when each layer is MoE."""
    vocab_size: int
    """Token ids that exist; ids from here up to ``vocab_rows`` are padding and can never be sampled."""
    vocab_rows: int
    """Rows of the embedding and the output head (``>= vocab_size``)."""
    norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tied: bool = False
    """The output head is the embedding."""
    qkv_bias: bool = False
    proj_bias: bool = False
    """Bias on the attention output projection (Llama ``attention_bias``)."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each query and key head before the rotary embedding (Qwen3)."""
    sliding_window: int | None = None
    """Attend to the last this many positions, the current one included; None means all."""
    max_context: int = 2048
    dtype: DType = "bfloat16"
    """As saved."""
    moe: MoeConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def q_rows(self) -> int:
        """Rows of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the key (or value) projection."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV cache of one rank."""

    num_blocks: int
    block_size: int = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything that the engine decides by; each limit is a hard one."""

    model: ModelConfig
    cache: CacheConfig
    dtype: DType
    """Of weights, activations and KV in the engine."""
    device: str = "cpu"
    tp: int = 1
    max_context: int = 2048
    """Prompt plus new tokens of one request."""
    max_running: int = 64
    """Sequences in one step."""
    max_step_tokens: int = 2048
    """Tokens in one step, prefill chunks and decodes together."""
    max_waiting: int = 1024
    """Requests in the queue before QueueFull."""
    prefix_cache: bool = True
    """Full KV blocks are kept and reused by whatever begins with the same tokens."""
    graphs: bool = True
    """Capture decode steps where the device and the model allow it."""
    attention: AttentionBackend = "auto"
    """What computes attention on a GPU; "auto" is this package's own kernels and torch's, whatever else is there."""
    quant: Quant = "none"
    """Form of the weights that products read; "int8" is derived from the parameters and kept beside them."""
    deterministic: bool = False
    """A token's log-probability has the same bits whatever is computed beside it."""
    refit_memory: RefitMemory = "staged"
    """Whether there is memory for a second set of weights."""
    weight_version: str = "0"
