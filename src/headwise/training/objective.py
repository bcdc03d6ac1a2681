"""The next-token loss without the (tokens × vocab) logits: chunk by chunk, gradient included.

    ℓ_i = log Σ_v exp z_iv − z_i,t(i)        loss = Σ_i w_i ℓ_i
    ∂loss/∂z_iv = w_i (softmax(z_i)_v − [v = t(i)])

Logits of a chunk of tokens are made, turned into the loss and its gradient in place, pulled back to
the hidden states and the parameters, and dropped: one chunk of logits is alive at a time, in the
forward and in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["next_token_loss"]


def next_token_loss(
    hidden: Tensor,
    targets: Tensor,
    weights: Tensor,
    unembed: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    *,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Σ w_i ℓ_i, and every ℓ_i (detached), for hidden states ``token d_model``.

    ``targets`` (token,) int64, ``weights`` (token,). ``unembed`` maps hidden states to logits and
    reads no other parameters than ``parameters``, which get gradients too. Losses are computed in
    float32, or float64 if the logits are. It can be differentiated once.

    Example:
        >>> hidden, table = torch.randn(5, 3), torch.randn(7, 3)
        >>> targets, weights = torch.arange(5), torch.full((5,), 0.2)
        >>> loss, each = next_token_loss(hidden, targets, weights, lambda h: h @ table.T, [table])
        >>> plain = torch.nn.functional.cross_entropy(hidden @ table.T, targets)
        >>> bool(torch.allclose(loss, plain)), each.shape
        (True, torch.Size([5]))
    """
    return _NextTokenLoss.apply(hidden, targets, weights, unembed, chunk, *parameters)


class _NextTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        weights: Tensor,
        unembed: Callable[[Tensor], Tensor],
        chunk: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        wanted = [p for p in parameters if p.requires_grad]
        needed = any(ctx.needs_input_grad)
        gradients: list[Tensor] = []
        hidden_gradient = torch.empty_like(hidden) if needed else None
        losses = []
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            with torch.set_grad_enabled(needed):
                leaf = hidden[part].detach().requires_grad_(needed)
                logits = unembed(leaf)
            values = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
            losses.append(_loss_and_gradient(values, targets[part], weights[part], needed))
            if hidden_gradient is not None:
                # values holds the gradient of the loss with respect to the logits by now.
                pulled = torch.autograd.grad(logits, [leaf, *wanted], values.to(logits.dtype))
                hidden_gradient[part] = pulled[0]
                for total, new in zip(gradients, pulled[1:], strict=False):
                    total += new
                gradients = gradients or list(pulled[1:])
        each = torch.cat(losses)
        ctx.mark_non_differentiable(each)
        ctx.wanted = [p.requires_grad for p in parameters]
        ctx.save_for_backward(*([] if hidden_gradient is None else [hidden_gradient, *gradients]))
        return (each * weights).sum(), each

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream[0]
        plain = scale.device.type == "cpu" and scale.item() == 1  # no copy of a large table
        hidden_gradient, *gradients = (x if plain else x * scale for x in ctx.saved_tensors)
        following = iter(gradients)
        return (
            hidden_gradient if ctx.needs_input_grad[0] else None,
            *(None,) * 4,
            *(next(following) if wanted else None for wanted in ctx.wanted),
        )


def _loss_and_gradient(logits: Tensor, targets: Tensor, weights: Tensor, gradient: bool) -> Tensor:
    """The loss of each token; with ``gradient``, the logits become w (softmax − one-hot)."""
    at = targets[:, None]
    log_sum = torch.logsumexp(logits, -1, keepdim=True)
    losses = (log_sum - logits.gather(-1, at))[:, 0]
    if gradient:
        logits.sub_(log_sum).exp_()
        logits.scatter_add_(-1, at, logits.new_full((), -1).expand_as(at))
        logits.mul_(weights[:, None])
    return losses
