"""The feed-forward layer: the same two-layer network at every position.

    MLP        down(f(up x))
    GatedMLP   down(f(gate x) · up x)          SwiGLU with f = SiLU, GEGLU with f = GELU

Vaswani et al. 2017 (arXiv:1706.03762), section 3.3; GELU: Hendrycks and Gimpel 2016
(arXiv:1606.08415); gated: Shazeer 2020 (arXiv:2002.05202), section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ACTIVATIONS", "MLP", "Activation", "GatedMLP"]

Activation = Callable[[Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


# Word -> function. "gelu" is x·Φ(x); "gelu_tanh" its tanh form, which is another function.
ACTIVATIONS: Final[dict[str, Activation]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": functional.silu,
}


class MLP(nn.Module):
    """down(f(up x)): ``… d_model -> … d_ff -> … d_model``.

    Example:
        >>> network = MLP(nn.Linear(3, 7), nn.Linear(7, 3), functional.relu)
        >>> network(Tensor([[1, 2, 3]])).shape
        torch.Size([1, 3])
    """

    def __init__(self, up: nn.Module, down: nn.Module, activation: Activation) -> None:
        super().__init__()
        self.up, self.down, self.activation = up, down, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class GatedMLP(nn.Module):
    """down(f(gate x) · up x): ``… d_model -> … d_ff -> … d_model``.

    Example:
        >>> gate, up = nn.Linear(3, 7), nn.Linear(3, 7)
        >>> GatedMLP(gate, up, nn.Linear(7, 3), functional.silu)(Tensor([[1, 2, 3]])).shape
        torch.Size([1, 3])
    """

    def __init__(
        self, gate: nn.Module, up: nn.Module, down: nn.Module, activation: Activation
    ) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.activation = gate, up, down, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))
