"""The decoder-only transformer as a trainer holds it: the serving model's layers and order of operations, over shards.

With the server's table of ops and its dtype its logits have the server's bits, where that table's results do not
depend on what is computed together (``docs/determinism.md``).
Legend: T tokens of all sequences, S rows whose logits are wanted, D hidden, V vocabulary rows of this TP rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gtp_serve.config import ModelConfig
from gtp_serve.errors import UsageError
from gtp_serve.layout.gtp import alignment_for
from gtp_serve.layout.huggingface import EMBEDDING, FINAL_NORM, HEAD, logical_tensors
from gtp_serve.layout.rows import Rows
from gtp_serve.ops.choice import choose_ops
from gtp_serve.ops.rope import inverse_frequencies
from gtp_serve.ops.table import Ops
from gtp_serve.refit.apply import apply_plan
from gtp_serve.refit.plan import build_plan
from gtp_serve.refit.source import WeightSource
from gtp_serve.training.attention import Pack, TrainAttention, pack_sequences
from gtp_serve.training.data_parallel import reduce_over_data
from gtp_serve.training.differentiable import with_gradients
from gtp_serve.training.embedding import VocabParallelEmbedding, VocabParallelHead
from gtp_serve.training.gather import GatherChain
from gtp_serve.training.groups import ParallelGroups, axis, size_of
from gtp_serve.training.init import initialise
from gtp_serve.training.layer import targets_of
from gtp_serve.training.linear import NormColumnLinear, RowParallelLinear
from gtp_serve.training.moe import TrainMoe
from gtp_serve.training.norm import RMSNorm
from gtp_serve.training.placement import TrainPlacement


class DenseFeedForward(nn.Module):
    """A norm and SwiGLU between two matrices."""

    def __init__(self, prefix: str, norm: str, config: ModelConfig, placement: TrainPlacement) -> None:
        super().__init__()
        self.ops = placement.ops
        size, bias = config.ffn_size, config.mlp_bias
        first, count = placement.cut(size, f"rows of {prefix}.gate_proj")
        parts = (Rows(0, count, f"{prefix}.gate_proj", first), Rows(count, count, f"{prefix}.up_proj", first))
        self.gate_up = NormColumnLinear(
            f"{prefix}.gate_up_proj",
            norm,
            config.hidden_size,
            2 * size,
            placement,
            eps=config.norm_eps,
            bias=bias,
            parts=parts,
        )
        self.down = RowParallelLinear(f"{prefix}.down_proj", size, config.hidden_size, placement, bias=bias)

    def forward(self, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(what the layer adds, the stream that it is to be added to), [T, D] each."""
        gate_up, x_TD = self.gate_up.after_adding(x_TD, delta_TD)
        return self.down(self.ops.swiglu(gate_up)), x_TD


class MoeFeedForward(nn.Module):
    """A norm and a mixture of experts."""

    def __init__(self, prefix: str, norm: str, config: ModelConfig, placement: TrainPlacement) -> None:
        super().__init__()
        assert config.moe is not None
        self.norm = RMSNorm(norm, config.hidden_size, placement, eps=config.norm_eps)
        self.moe = TrainMoe(prefix, config.hidden_size, config.moe, placement)

    def forward(self, x_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(what the layer adds, the stream that it is to be added to), [T, D] each."""
        normed_TD, x_TD = self.norm.after_adding(x_TD, delta_TD)
        return self.moe(normed_TD), x_TD


class TrainLayer(nn.Module):
    """Attention and feed-forward; what it adds to the residual stream is handed on apart from it."""

    def __init__(self, prefix: str, config: ModelConfig, placement: TrainPlacement) -> None:
        super().__init__()
        self.attention = TrainAttention(f"{prefix}.self_attn", f"{prefix}.input_layernorm", config, placement)
        kind = DenseFeedForward if config.moe is None else MoeFeedForward
        self.ffn = kind(f"{prefix}.mlp", f"{prefix}.post_attention_layernorm", config, placement)

    def forward(self, x_TD: Tensor, delta_TD: Tensor | None, pack: Pack) -> tuple[Tensor, Tensor]:
        """The residual stream and what is still to be added to it."""
        mixed_TD, x_TD = self.attention(x_TD, delta_TD, pack)
        out_TD, x_TD = self.ffn(x_TD, mixed_TD)
        return x_TD, out_TD


class TrainDecoder(nn.Module):
    """One rank's model.  Weights are zero until ``load_weights``, ``initialise`` or a checkpoint fills them.

    Sequences are packed one behind another, without padding; nobody sees another's tokens.

    :param recompute: keep only each layer's input for the backward pass and compute the rest again.
    :raises UsageError: for a grid that the model cannot be cut for, and for pipeline or context parallelism.
    """

    def __init__(self, config: ModelConfig, placement: TrainPlacement, *, recompute: bool = False) -> None:
        super().__init__()
        for name in ("pp", "cp"):
            if size_of(axis(placement.groups, name)) > 1:
                raise UsageError(f"this model is not cut along {name}", [("needed", f"groups without {name}")])
        self.config, self.placement, self.recompute = config, placement, recompute
        size = config.hidden_size
        self.embedding = VocabParallelEmbedding(EMBEDDING, config.vocab_rows, size, placement)
        self.layers = nn.ModuleList(
            [TrainLayer(f"model.layers.{index}", config, placement) for index in range(config.num_layers)]
        )
        self.norm = RMSNorm(FINAL_NORM.removesuffix(".weight"), size, placement, eps=config.norm_eps)
        tied = self.embedding.weight if config.tied else None
        self.head = VocabParallelHead(EMBEDDING if config.tied else HEAD, config.vocab_rows, size, placement, tied=tied)
        self.inv_freq_R = inverse_frequencies(config.rope, config.head_dim).to(placement.device)
        placement.chain.watch(self)

    @property
    def chain(self) -> GatherChain:
        """The model's gathers and reductions."""
        return self.placement.chain

    def finish_gradients(self) -> None:
        """Reduce what all micro-batches have left, over GTP and data-parallel ranks.  Collective; once a step, before
        anything looks at a gradient."""
        self.chain.finish_gradients()
        reduce_over_data(self)

    def forward(self, ids_T: Tensor, lengths: Sequence[int], rows_S: Tensor | None = None) -> Tensor:
        """Logits [S, V] float32 of this TP rank's vocabulary rows; ``loss.target_logprobs`` goes on from there.

        :param lengths: tokens of each sequence, T together.
        :param rows_S: of T; None for all.
        """
        pack = pack_sequences(ids_T, lengths, self.config, self.inv_freq_R, self.placement)
        x_TD, delta_TD = self.embedding(ids_T), None
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                x_TD, delta_TD = checkpoint(layer, x_TD, delta_TD, pack, use_reentrant=False)
            else:
                x_TD, delta_TD = layer(x_TD, delta_TD, pack)
        if rows_S is not None:
            x_TD, delta_TD = x_TD[rows_S], None if delta_TD is None else delta_TD[rows_S]
        normed, _ = self.norm.after_adding(x_TD, delta_TD)
        logits: Tensor = self.head(normed).float()
        return logits

    def load_weights(self, source: WeightSource) -> None:
        """Fill all parameters of this rank from a checkpoint's source, or any other that has the whole model.

        :raises LayoutMismatch: when the source is not this model.
        """
        targets = targets_of(self)
        plan = build_plan(source.shards(), [target.shard for target in targets], logical_tensors(self.config))
        apply_plan(plan, source, targets)
        self.chain.invalidate()

    def initialise(self, seed: int) -> None:
        """Draw all parameters; the bits depend on the seed and on no grid."""
        initialise(self, logical_tensors(self.config), seed=seed)
        self.chain.invalidate()


def build_train_decoder(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    groups: object | None = None,
    chain: GatherChain | None = None,
    alignment: int | None = None,
    deterministic: bool = False,
    ops: Ops | None = None,
    recompute: bool = False,
) -> TrainDecoder:
    """A rank's model with the functions that a server on such a device would use.

    :param groups: see ``groups.build_training_groups``; None for one rank.
    :param deterministic: compute as a server with ``--deterministic`` does, bit for bit.
    :param ops: a table to compute by instead.
    """
    table = ops or choose_ops(device=device, dtype=dtype, head_dim=config.head_dim, deterministic=deterministic)
    placement = TrainPlacement(
        dtype=dtype,
        device=device,
        groups=ParallelGroups() if groups is None else groups,
        chain=chain or GatherChain(),
        alignment=alignment_for("bf16", alignment),
        ops=with_gradients(table),
        sums_in_rank_order=deterministic,
    )
    return TrainDecoder(config, placement, recompute=recompute)
