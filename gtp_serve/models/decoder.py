"""The decoder-only transformer of all served families; what differs between them is in ``ModelConfig``.

Legend: T tokens, S rows whose logits are wanted, W these and rows that are scored, D hidden, V vocabulary rows,
N cache blocks of P positions, K KV heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.errors import UsageError
from gtp_serve.layers.attention import Attention, Step
from gtp_serve.layers.mlp import Mlp
from gtp_serve.layers.norm import RMSNorm
from gtp_serve.layers.parameter import targets_of
from gtp_serve.layers.placement import Collective, Placement, SingleRank
from gtp_serve.layers.rotary import Rotary
from gtp_serve.layers.vocabulary import VocabularyTable
from gtp_serve.layout.ranks import possible_ranks
from gtp_serve.models.moe import MoeBlock
from gtp_serve.ops.batch import SCORE_PIECE_ROWS, Batch, FixedAttention, Taps
from gtp_serve.ops.choice import choose_ops
from gtp_serve.ops.table import Ops
from gtp_serve.refit.apply import Target


class DecoderLayer:
    """Attention and feed-forward, each after a norm.

    What a layer adds to the residual stream is handed on apart from it: addition and norm are one step.
    """

    def __init__(self, prefix: str, config: ModelConfig, placement: Placement) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self.input_norm = RMSNorm(f"{prefix}.input_layernorm", size, eps, placement)
        self.attention = Attention(f"{prefix}.self_attn", config, placement)
        self._take = placement.ops.embedding
        self.ffn_norm = RMSNorm(f"{prefix}.post_attention_layernorm", size, eps, placement)
        self.ffn = _feed_forward(f"{prefix}.mlp", config, placement)

    def __call__(
        self,
        x_TD: Tensor,
        delta_TD: Tensor | None,
        step: Step,
        keys_NPKE: Tensor,
        values_NPKE: Tensor,
        routes: list[Tensor] | None = None,
        wanted_W: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and what is still to be added to it.

        :param wanted_W: both of these rows alone; the others are in the cache then and nowhere else.
        """
        normed_TD, x_TD = self.input_norm.after_adding(x_TD, delta_TD)
        mixed_TD = self.attention(normed_TD, step, keys_NPKE, values_NPKE, wanted_W)
        if wanted_W is not None:
            x_TD = self._take(wanted_W, x_TD)
        normed_TD, x_TD = self.ffn_norm.after_adding(x_TD, mixed_TD)
        if isinstance(self.ffn, MoeBlock):
            return x_TD, self.ffn(normed_TD, routes)
        return x_TD, self.ffn(normed_TD)

    def matrices(self) -> list[Tensor]:
        """See ``Decoder.matrices``."""
        return [self.attention.qkv.weight, self.attention.out.weight, *self.ffn.matrices()]

    def targets(self) -> list[Target]:
        """All parameters."""
        return targets_of(self.input_norm, self.attention, self.ffn_norm, self.ffn)


def _feed_forward(prefix: str, config: ModelConfig, placement: Placement) -> Mlp | MoeBlock:
    if config.moe is not None:
        return MoeBlock(prefix, config.hidden_size, config.moe, placement)
    return Mlp(prefix, config.hidden_size, config.ffn_size, bias=config.mlp_bias, placement=placement)


class Decoder:
    """One rank's model.  Parameters start uninitialised: a plan fills ``targets()`` before ``forward``."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        self.config, self.placement = config, placement
        self.embedding = VocabularyTable("model.embed_tokens.weight", config.vocab_rows, config.hidden_size, placement)
        self.layers = [DecoderLayer(f"model.layers.{index}", config, placement) for index in range(config.num_layers)]
        self.norm = RMSNorm("model.norm", config.hidden_size, config.norm_eps, placement)
        self.head = (
            self.embedding
            if config.tied
            else VocabularyTable("lm_head.weight", config.vocab_rows, config.hidden_size, placement)
        )
        self.rotary = Rotary(config.rope, config.head_dim, placement)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this rank: what its cache must hold."""
        return self.layers[0].attention.kv_heads

    def forward(
        self, batch: Batch, keys: Sequence[Tensor], values: Sequence[Tensor], taps: Taps | None = None
    ) -> Tensor:
        """Logits [S, V] float32 of ``batch.logit_rows_S``, the same on all ranks.

        :param keys: for each layer the cache [N, P, K, E]; this step's keys are written at ``batch.slots_T``.
        :param values: the same for values.
        :param taps: what else is wanted.  Ranks may differ in it: ``score_rows_R`` are computed on each.
        """
        routes = None if taps is None else taps.routes
        return self.logits(self.hidden(batch, keys, values, routes), batch, taps)

    def hidden(
        self,
        batch: Batch,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        routes: list[Tensor] | None = None,
    ) -> Tensor:
        """What the head reads of ``batch.wanted_rows()``, [W, D]: ``forward`` as far as the last norm.

        :raises ValueError: routes are to be found, and the batch does not say so.
        """
        if routes is not None and not batch.all_routes:
            raise ValueError("the experts of all rows are wanted of a batch without all_routes")
        step = self._step(batch, block_size=keys[0].shape[1])
        wanted_W = batch.wanted_rows()
        # After the last layer's attention nobody reads the other rows any more.
        passing = [None] * (len(self.layers) - 1) + [None if batch.all_routes else wanted_W]
        x_TD, delta_TD = self.embedding.embed(batch.token_ids_T), None
        for layer, layer_keys, layer_values, rows in zip(self.layers, keys, values, passing, strict=True):
            x_TD, delta_TD = layer(x_TD, delta_TD, step, layer_keys, layer_values, routes, rows)
        hidden = self.norm.after_adding(x_TD, delta_TD)[0]
        return self.placement.ops.embedding(wanted_W, hidden) if batch.all_routes and wanted_W is not None else hidden

    def logits(self, hidden_WD: Tensor, batch: Batch, taps: Taps | None = None) -> Tensor:
        """The rest of ``forward``."""
        scored = 0 if batch.score_rows_R is None else len(batch.score_rows_R)
        for piece in range(0, scored, SCORE_PIECE_ROWS):
            logits = self.head.logits(hidden_WD[piece : min(piece + SCORE_PIECE_ROWS, scored)])
            if taps is not None and taps.scored is not None:
                taps.scored(logits)
        return self.head.logits(hidden_WD[scored : scored + len(batch.logit_rows_S)])

    def _step(self, batch: Batch, block_size: int) -> Step:
        cos_TR, sin_TR = self.rotary(batch.positions_T, max(batch.context_lens))
        plan = batch.attention
        if plan is None:
            plan = self.placement.ops.plan_attention(batch, block_size, self.config.sliding_window)
        return Step(slots_T=batch.slots_T, cos_TR=cos_TR, sin_TR=sin_TR, attention=plan)

    def fix_attention(self, batch: Batch, block_size: int) -> FixedAttention | None:
        """Attention for recorded steps over the buffers of ``batch``; None where a step's own plan can be recorded.

        What such steps only read, but which is made once, is made here.
        """
        self.rotary.prepare(max(batch.context_lens))
        fix = self.placement.ops.fix_attention
        return None if fix is None else fix(batch, block_size, self.config.sliding_window)

    def matrices(self) -> list[Tensor]:
        """Parameters that activations are multiplied with, [.., K]; not the routers, whose choice must not turn."""
        return [matrix for layer in self.layers for matrix in layer.matrices()] + [self.head.weight]

    def targets(self) -> list[Target]:
        """All parameters of this rank with their spans; a tied head is not a parameter of its own."""
        return targets_of(self.embedding, *self.layers, self.norm, None if self.config.tied else self.head)


def build_decoder(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: str,
    tp_rank: int = 0,
    tp_size: int = 1,
    collective: Collective | None = None,
    ops: Ops | None = None,
) -> Decoder:
    """One rank's decoder, its parameters allocated and not yet filled.

    :param collective: joins the ranks; needed when ``tp_size`` is more than 1.
    :param ops: functions to build with; by default what ``choose_ops`` finds for the device.
    :raises UsageError: when the model cannot be cut for this many ranks, or ranks and collective disagree.
    """
    tp = SingleRank() if collective is None else collective
    if (tp.rank, tp.size) != (tp_rank, tp_size):
        raise UsageError(
            f"rank {tp_rank} of {tp_size} was asked for with a collective that is rank {tp.rank} of {tp.size}"
        )
    if ops is None:
        ops = choose_ops(device=device, dtype=dtype, head_dim=config.head_dim)
    try:
        return Decoder(config, Placement(dtype=dtype, device=device, tp=tp, ops=ops))
    except UsageError as refused:
        fitting = ", ".join(map(str, possible_ranks(config)))
        raise UsageError(refused.message, [("try", f"--tp with one of {fitting}")]) from refused
