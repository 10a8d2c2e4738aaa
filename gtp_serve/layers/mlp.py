"""The dense feed-forward layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from torch import Tensor

from gtp_serve.layers.linear import RowLinear, gate_up_linear
from gtp_serve.layers.placement import Placement
from gtp_serve.refit.apply import Target


class Mlp:
    """SwiGLU; each rank holds equally many of the ``ffn_size`` inner features."""

    def __init__(self, prefix: str, hidden_size: int, ffn_size: int, *, bias: bool, placement: Placement) -> None:
        self.tp, self.ops = placement.tp, placement.ops
        self.gate_up = gate_up_linear(prefix, ffn_size, hidden_size, bias=bias, placement=placement)
        self.down = RowLinear(f"{prefix}.down_proj", hidden_size, ffn_size, bias=bias, placement=placement)

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, D]."""
        return self.tp.all_reduce(self.partial(x_TD))

    def partial(self, x_TD: Tensor) -> Tensor:
        """This rank's summand, [T, D]."""
        if self.ops.gated_linear is None:
            return self.down.partial(self.ops.swiglu(self.gate_up(x_TD)))
        return self.down.partial(self.ops.gated_linear(x_TD, self.gate_up.weight, self.gate_up.bias))

    def matrices(self) -> list[Tensor]:
        """See ``Decoder.matrices``."""
        return [self.gate_up.weight, self.down.weight]

    def targets(self) -> list[Target]:
        """All parameters."""
        return [*self.gate_up.targets(), *self.down.targets()]
