"""How far the server's probabilities of sampled tokens are from the trainer's, and where the difference comes from.

``token_mult_prob_error`` is the mean over tokens of ``exp(|server - trainer|)`` of their log-probabilities; 1 is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gtp_serve.config import ModelConfig
from gtp_serve.errors import LayoutMismatch, UsageError
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.spans import Box, Shape, Shard
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops.batch import Taps
from gtp_serve.ops.choice import choose_ops
from gtp_serve.ops.logprobs import logprobs_of
from gtp_serve.refit.apply import apply_plan
from gtp_serve.refit.offer import whole_shard
from gtp_serve.refit.plan import build_plan
from gtp_serve.training.attention import BLOCK_SIZE, whole_batch
from gtp_serve.training.exchange import slices
from gtp_serve.training.mesh import Mesh, default_mesh
from gtp_serve.training.publish import Pairs, publish


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbError:
    """Of one series of log-probabilities against another."""

    mean: float
    """Of ``exp(|a - b|)``: token_mult_prob_error."""
    largest: float
    """``|a - b|`` of the worst token."""
    tokens: int
    equal: int
    """Tokens whose two log-probabilities are the same number."""

    def __str__(self) -> str:
        return f"{self.mean:.6f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorSplit:
    """The whole error and its parts; they need not add up, for errors can cancel."""

    total: ProbError
    """Sampled by the server, against the trainer's own forward."""
    refit: ProbError
    """The same computation on the weights that serve and on the trainer's, loaded cold: anything but 1 is a bug."""
    kernel: ProbError
    """Sampled by the server, against the trainer's functions on the server's numbers."""
    precision: ProbError
    """The trainer's functions on the server's numbers, against the trainer's on its own."""

    def __str__(self) -> str:
        return f"{self.total} (refit {self.refit}, kernel {self.kernel}, precision {self.precision})"


def prob_error(server: Tensor, trainer: Tensor) -> ProbError:
    """Compare log-probabilities of the same tokens.

    :raises UsageError: when there are none, or not equally many, or some are no numbers.
    """
    a, b = server.detach().double().flatten(), trainer.detach().double().flatten()
    if a.shape != b.shape or not a.numel():
        raise UsageError(f"{a.numel()} log-probabilities of the server and {b.numel()} of the trainer")
    difference = (a - b).abs()
    if not difference.isfinite().all():
        raise UsageError("log-probabilities that are no numbers cannot be compared")
    return ProbError(
        mean=difference.exp().mean().item(),
        largest=difference.max().item(),
        tokens=a.numel(),
        equal=int((a == b).sum().item()),
    )


def token_mult_prob_error(server: Tensor, trainer: Tensor) -> float:
    """``prob_error`` as the one number that people compare."""
    return prob_error(server, trainer).mean


def split_error(*, sampled: Tensor, served: Tensor, cold: Tensor, same_numbers: Tensor, trained: Tensor) -> ErrorSplit:
    """Log-probabilities of the same tokens, from five places.

    :param sampled: told by the server when it sampled them.
    :param served: told by the server when it scored each sequence alone; ``sampled`` where it is deterministic.
    :param cold: of ``sequence_logprobs`` of a ``cold_decoder`` of the trainer's weights.
    :param same_numbers: of the trainer's model on weights in the server's dtype.
    :param trained: of the trainer's model as it trains.
    """
    return ErrorSplit(
        total=prob_error(sampled, trained),
        refit=prob_error(served, cold),
        kernel=prob_error(sampled, same_numbers),
        precision=prob_error(same_numbers, trained),
    )


class TensorSource:
    """Whole logical tensors in memory, as a source of weights."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._held = [(whole_shard(name, x), x.detach().cpu().contiguous()) for name, x in tensors.items()]

    def shards(self) -> Sequence[Shard]:
        """See ``WeightSource``."""
        return tuple([shard for shard, _ in self._held])

    def read(self, index: int) -> memoryview:
        """See ``WeightSource``."""
        return memoryview(_bytes(self._held[index][1]))  # type: ignore[arg-type]  # numpy says Buffer from 3.12 on only

    def close(self) -> None:
        """See ``WeightSource``."""


class _Part(msgspec.Struct, frozen=True):
    """Elements of a logical tensor on their way."""

    name: str
    start: Shape
    shape: Shape
    dtype: str
    raw: bytes


def gather_weights(
    model: nn.Module | Pairs, shapes: Mapping[str, Shape], mesh: Mesh | None = None
) -> dict[str, Tensor]:
    """Every logical tensor whole, on every rank, on the CPU.  Collective; for checks, not for training.

    :param shapes: of all logical tensors.
    :raises LayoutMismatch: when the ranks together do not hold all of it.
    """
    pairs = publish(model) if isinstance(model, nn.Module) else model
    mesh = default_mesh() if mesh is None else mesh
    parts = [
        _Part(span.name, span.logical.start, span.logical.shape, shard.dtype, _raw(tensor[slices(span.local)]))
        for shard, tensor in pairs
        for span in shard.spans
    ]
    whole: dict[str, Tensor] = {}
    missing = {name: torch.ones(shape, dtype=torch.bool) for name, shape in shapes.items()}
    decoder = msgspec.msgpack.Decoder(list[_Part])
    for told in mesh.all_bytes(msgspec.msgpack.encode(parts)):
        for part in decoder.decode(told):
            dtype: torch.dtype = getattr(torch, part.dtype)
            there = slices(Box(part.start, part.shape))
            into = whole.setdefault(part.name, torch.empty(shapes[part.name], dtype=dtype))
            into[there] = torch.frombuffer(bytearray(part.raw), dtype=dtype).view(part.shape)
            missing[part.name][there] = False
    holes = [name for name, mask in missing.items() if mask.any()]
    if holes:
        raise LayoutMismatch(f"no rank has all of {holes[0]}", [("and of", f"{len(holes) - 1} more")])
    return whole


def _raw(piece: Tensor) -> bytes:
    return _bytes(piece.detach().cpu().contiguous()).tobytes()


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """Of a contiguous tensor on the CPU, its memory."""
    raw: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return raw


def cold_decoder(
    config: ModelConfig, tensors: Mapping[str, Tensor], *, dtype: torch.dtype, deterministic: bool, device: str = "cpu"
) -> Decoder:
    """A server's decoder that is filled as at a server's start."""
    ops = choose_ops(device=device, dtype=dtype, head_dim=config.head_dim, deterministic=deterministic)
    decoder = build_decoder(config, dtype=dtype, device=device, ops=ops)
    source, targets = TensorSource(tensors), decoder.targets()
    apply_plan(
        build_plan(source.shards(), [target.shard for target in targets], logical_tensors(config)), source, targets
    )
    return decoder


@torch.inference_mode()
def sequence_logprobs(decoder: Decoder, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Log-probabilities of all tokens of each sequence but its first, each sequence computed alone, in one step."""
    return [_logprobs(decoder, ids) for ids in sequences]


def _logprobs(decoder: Decoder, ids: Sequence[int]) -> Tensor:
    """As the engine scores a prompt: the rows' logits piece by piece."""
    config, placement = decoder.config, decoder.placement
    ids_T = torch.tensor(ids, device=placement.device)
    batch, num_blocks = whole_batch(ids_T, [len(ids)])
    rows = torch.arange(len(ids), device=placement.device)
    shape = (num_blocks, BLOCK_SIZE, decoder.num_kv_heads, config.head_dim)
    keys, values = (
        [torch.zeros(shape, dtype=placement.dtype, device=placement.device) for _ in range(config.num_layers)]
        for _ in range(2)
    )
    found: list[Tensor] = []

    def take(logits: Tensor) -> None:
        first = sum(piece.shape[0] for piece in found)
        targets = ids_T[1 + first : 1 + first + logits.shape[0]]
        found.append(logprobs_of(logits, targets, config.vocab_size, placement.ops.normalise))

    decoder.forward(replace(batch, score_rows_R=rows[:-1], logit_rows_S=rows[-1:]), keys, values, Taps(scored=take))
    return torch.cat(found).cpu()
