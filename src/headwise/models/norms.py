"""Norms: each position is brought to one scale, then stretched by a learned gain.

    LayerNorm   (x − mean x) / √(var x + ε) · gain (+ bias)
    RMSNorm     x / √(mean x² + ε) · gain

The functions are the definitions; the modules compute the same with torch's fused forms. Half
precision is normalised in float32; where it is rounded is that of the released models, and said
at each module.

Ba et al. 2016 (arXiv:1607.06450), equation 3; Zhang and Sennrich 2019 (arXiv:1910.07467),
equation 4; a gain stored as its distance from one: Gemma (arXiv:2403.08295), released code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["AcrossHeads", "LayerNorm", "OffsetRMSNorm", "RMSNorm", "layer_norm", "rms_norm"]


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """(x − mean x) / √(var x + ε) · gain + bias over the last axis; var is the biased variance.

    Example:
        >>> layer_norm(torch.tensor([1.0, 3.0]), torch.ones(2), eps=0.0).tolist()
        [-1.0, 1.0]
    """
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps) * gain
    return y if bias is None else y + bias


def rms_norm(x: Tensor, gain: Tensor, *, eps: float = 1e-6) -> Tensor:
    """x / √(mean x² + ε) · gain over the last axis: nothing is subtracted.

    Example:
        >>> rms_norm(torch.tensor([3.0, 3.0]), torch.tensor([1.0, 2.0]), eps=0.0).tolist()
        [1.0, 2.0]
    """
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * gain


class LayerNorm(nn.Module):
    """``layer_norm`` with learned ``weight`` (the gain) and ``bias``: ``… width``, same out.

    Example:
        >>> LayerNorm(4)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def __init__(self, width: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


class RMSNorm(nn.Module):
    """``rms_norm`` with a learned ``weight``, which is the gain: ``… width``, same out.

    Example:
        >>> RMSNorm(2, eps=0.0)(torch.tensor([3.0, 3.0])).tolist()
        [1.0, 1.0]
    """

    def __init__(self, width: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.bfloat16, torch.float16):
            # As the models were trained: the gain multiplies what was rounded to half precision.
            plain = functional.rms_norm(x.float(), self.weight.shape, None, self.eps)
            return self.weight * plain.to(x.dtype)
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


class OffsetRMSNorm(nn.Module):
    """``rms_norm`` whose gain is 1 + ``weight``, so that zeros are the identity's gain.

    Example:
        >>> OffsetRMSNorm(2, eps=0.0)(torch.tensor([3.0, 3.0])).tolist()
        [1.0, 1.0]
    """

    def __init__(self, width: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        # As the models were trained: half precision is rounded after the gain, once.
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        gain = 1 + self.weight.to(wide.dtype)
        return functional.rms_norm(wide, self.weight.shape, gain, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


class AcrossHeads(nn.Module):
    """A norm of queries or keys over all heads at once: ``batch head position dim``, same out.

    OLMo 2 (arXiv:2501.00656), section 3.2, normalises so; a norm of width d_head, applied to heads
    as they are, normalises each head alone.

    Example:
        >>> AcrossHeads(RMSNorm(6))(torch.ones(1, 2, 5, 3)).shape
        torch.Size([1, 2, 5, 3])
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        together = x.transpose(1, 2)
        return self.norm(together.flatten(2)).view(together.shape).transpose(1, 2)
