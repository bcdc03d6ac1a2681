"""What a function for multi-head attention has to do, each requirement judged alone.

Each check takes the function and one case, and says in a sentence what is wrong there. Where it
can, it compares the function with itself, so that one mistake does not fail every requirement: the
scale is read off the weights, heads are compared with single heads under weights that no scale can
change, masks by what reaches what.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headwise.attention.heads import merge_heads, split_heads
from headwise.theorems.grading_cases import (
    Case,
    Inputs,
    MaskKind,
    cases,
    defined,
    relative,
    rounding,
)
from headwise.theorems.grading_masks import causal, empty_row, padding
from headwise.theorems.grading_subject import Failed, Raised, Subject, Unjudged

__all__ = ["REQUIREMENTS", "Requirement"]

_SHARP: Final = 1e3  # least gap of two logits after any scale: e^−1000 is 0 in float64
_LARGE: Final = 3e3  # a logit whose exp is infinite in float64


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement: its name, what it asks, and how a case of it is judged.

    ``heads_apart``: where heads are not split and merged rightly, one head alone is judged.
    """

    name: str
    asks: str
    check: Callable[[Subject, Case], None]
    mask: MaskKind = "none"
    least_n: int = 1
    least_batch: int = 1
    least_heads: int = 1
    grouped: bool = False
    heads_apart: bool = True

    def cases(self, most_heads: int | None = None) -> list[Case]:
        """Its cases, smallest first."""
        found = cases(
            mask=self.mask,
            grouped=self.grouped,
            least_n=self.least_n,
            least_batch=self.least_batch,
            least_heads=self.least_heads,
        )
        return [each for each in found if most_heads is None or each.heads <= most_heads]


def _shape(subject: Subject, case: Case) -> None:
    subject(case.inputs())


def _finite(subject: Subject, case: Case) -> None:
    inputs = case.inputs()
    q, k = (split_heads(inputs.x @ w, case.heads) for w in (inputs.w_q, inputs.w_k))
    largest = float((q @ k.mT).abs().amax((2, 3)).min())
    sizes = (("ordinary logits", 1.0), ("large logits", _LARGE * case.d / largest))
    for words, factor in sizes:
        found = subject(inputs.with_(w_q=inputs.w_q * factor))
        if not bool(torch.isfinite(found).all()):
            advice = "" if factor == 1.0 else ": subtract the largest logit of a row before exp"
            raise Failed(f"NaN or infinity for {words}{advice}")


def _kept(subject: Subject, case: Case) -> None:
    inputs = case.inputs()
    before = {name: tensor.clone() for name, tensor in inputs.tensors.items()}
    subject.called(inputs)
    for name, tensor in inputs.tensors.items():
        if not torch.equal(tensor, before[name]):
            raise Failed(f"it changes its input {name} in place")


def _repeatable(subject: Subject, case: Case) -> None:
    inputs = case.inputs()
    if not torch.equal(subject.finite(inputs), subject.finite(inputs)):
        raise Failed("two calls with one input give different outputs: there is dropout or noise")


def _dtype(subject: Subject, case: Case) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = subject(case.inputs(dtype)).dtype
        if found != dtype:
            raise Failed(f"inputs of {_word(dtype)} give an output of {_word(found)}")


def _rows(subject: Subject, case: Case) -> None:
    """With W_V = W_O = I, outputs are means of x: a column of ones stays, no column leaves x."""
    eye = torch.eye(case.d, dtype=torch.float64)
    inputs = case.inputs().with_(w_v=eye, w_o=eye)
    ones = inputs.x.clone()
    ones[..., 0] = 1.0
    inputs = inputs.with_(x=ones)
    found, near = subject.finite(inputs), rounding(inputs)
    sums = found[..., 0]
    worst = sums.flatten()[(sums - 1).abs().argmax()]
    if float((worst - 1).abs()) > near:
        raise Failed(
            f"the weights of a row sum to {float(worst):.3g}, not 1: values that are all 1 give"
            f" {float(worst):.3g}"
        )
    low, high = ones.amin(1, keepdim=True), ones.amax(1, keepdim=True)
    outside = float(torch.maximum(low - found, found - high).max())
    if outside > near:
        raise Failed(
            f"an output lies {outside:.3g} outside the range of the values, so a weight is negative"
        )


def _scale(subject: Subject, case: Case) -> None:
    """Values e_j make the outputs the weights; the slope of ln a_ij on q_i·k_j is the scale.

    Means of rows and of columns are taken away, so that it does not matter over what the softmax
    runs; W_Q and W_K are symmetric, so that x W and x Wᵀ are the same.
    """
    if case.d_head < case.n:
        return
    inputs = case.inputs()
    generator = case.generator()
    head = torch.randn(1, case.n, case.d_head, generator=generator, dtype=torch.float64)
    head[..., : case.n] = torch.eye(case.n, dtype=torch.float64)
    eye = torch.eye(case.d, dtype=torch.float64)
    w_q, w_k = ((w + w.mT) / 2 for w in (inputs.w_q, inputs.w_k))
    inputs = inputs.with_(x=head.repeat(1, 1, case.heads), w_q=w_q, w_k=w_k, w_v=eye, w_o=eye)
    slopes = [_slope(subject, inputs.with_(w_q=factor * w_q)) for factor in (1, 2)]
    if not math.isclose(*slopes, rel_tol=1e-6) or not slopes[0]:
        raise Unjudged("its weights are not a softmax of a multiple of q·k")
    if not math.isclose(slopes[0], case.d_head**-0.5, rel_tol=1e-6):
        raise Failed(
            f"the logits are {slopes[0]:.4g} q·k, not q·k/√d_k = {case.d_head**-0.5:.4g} q·k"
        )


def _slope(subject: Subject, inputs: Inputs) -> float:
    """Of ln a_ij on q_i·k_j, where the values of every head are e_1 … e_n."""
    n = inputs.x.shape[1]
    a = split_heads(subject.finite(inputs), inputs.heads)[..., :n]
    if float(a.min()) <= 0:
        raise Unjudged("its weights are not positive, so that no logits can be read off them")
    q, k = (split_heads(inputs.x @ w, inputs.heads) for w in (inputs.w_q, inputs.w_k))
    dots, logs = (_centred(each) for each in (q @ k.mT, a.log()))
    slope = float((dots * logs).sum() / dots.square().sum())
    # ln a is known to 1e-13 at weights above 1e-3; the slope of another function is 1e-3 away.
    if float((logs - slope * dots).abs().max()) > 1e-6 * float(1 + logs.abs().max()):
        raise Unjudged("its logits are not a multiple of q·k")
    return 0.0 if abs(slope) < 1e-6 else slope


def _centred(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x - x.mean(-2, keepdim=True)


def _heads(subject: Subject, case: Case) -> None:
    """The heads together are the sum of each alone: W of one head, zeros beside it, heads = 1.

    Uniform weights (W_Q = 0) and one-hot weights (logits far apart) are what they are under any
    scale, so that only splitting and merging can make a difference.
    """
    inputs = case.inputs()
    factors = [("uniform", 0.0)]
    sharp = _SHARP * case.d / _gap(inputs)
    if all(_settled(subject, inputs, m, sharp) for m in range(case.heads)):
        factors.append(("one-hot", sharp))
    for words, factor in factors:
        whole = inputs.with_(w_q=inputs.w_q * factor)
        summed = sum(subject.finite(_alone(whole, m)) for m in range(case.heads))
        difference = float((subject.finite(whole) - summed).abs().max())
        near = rounding(inputs.with_(w_q=inputs.w_q * min(factor, 1.0)))
        if difference > near:
            raise Failed(
                f"with {words} weights, {case.heads} heads together differ by {difference:.3g} from"
                " the sum of each head alone"
            )


def _settled(subject: Subject, inputs: Inputs, m: int, sharp: float) -> bool:
    """Whether the weights of head m are one-hot: twice the logits change nothing."""
    one, other = (
        subject.finite(_alone(inputs.with_(w_q=inputs.w_q * factor), m))
        for factor in (sharp, 2 * sharp)
    )
    return float((one - other).abs().max()) <= rounding(inputs)


def _gap(inputs: Inputs) -> float:
    """The smallest gap between the two largest logits of a row or a column of any head."""
    if inputs.x.shape[1] == 1:
        return 1.0
    q, k = (split_heads(inputs.x @ w, inputs.heads) for w in (inputs.w_q, inputs.w_k))
    s = q @ k.mT
    tops = [each.topk(2).values for each in (s, s.mT)]
    return max(1e-6, min(float((top[..., 0] - top[..., 1]).min()) for top in tops))


def _alone(inputs: Inputs, m: int) -> Inputs:
    """Head m with zeros beside it, as one head."""
    width = inputs.w_o.shape[0] // inputs.heads
    here = torch.zeros(inputs.w_o.shape[0], dtype=torch.float64)
    here[m * width : (m + 1) * width] = 1.0
    columns = {name: getattr(inputs, name) * here for name in ("w_q", "w_k", "w_v")}
    return inputs.with_(w_o=inputs.w_o * here[:, None], heads=1, **columns)


def _permutation(subject: Subject, case: Case) -> None:
    inputs = case.inputs()
    order = torch.arange(case.n).roll(1)
    moved = subject.finite(inputs.with_(x=inputs.x[:, order]))
    difference = float((moved - subject.finite(inputs)[:, order]).abs().max())
    if difference > 2 * rounding(inputs):
        raise Failed(
            f"tokens in another order change their outputs by {difference:.3g}: without a mask"
            " nothing may depend on the order"
        )


def _batch(subject: Subject, case: Case) -> None:
    inputs = case.inputs()
    whole = subject.finite(inputs)
    for b in range(case.batch):
        alone = subject.finite(inputs.with_(x=inputs.x[b : b + 1]))[0]
        difference = float((whole[b] - alone).abs().max())
        if difference > 2 * rounding(inputs):
            raise Failed(
                f"a sequence alone and in a batch of {case.batch} differ by {difference:.3g}"
            )


def _torch(subject: Subject, case: Case) -> None:
    inputs = case.inputs()
    q, k, v = (split_heads(inputs.x @ w, case.heads) for w in (inputs.w_q, inputs.w_k, inputs.w_v))
    attended = scaled_dot_product_attention(q, k, v, attn_mask=inputs.mask)
    difference = float((subject.finite(inputs) - merge_heads(attended) @ inputs.w_o).abs().max())
    if difference > 2 * rounding(inputs):
        raise Failed(f"its output differs by {difference:.3g} from torch's attention")


def _gradients(subject: Subject, case: Case) -> None:
    inputs = case.inputs()
    if float((subject.finite(inputs) - defined(inputs)).abs().max()) > 2 * rounding(inputs):
        raise Unjudged("its outputs are not those of the definition, so neither are its gradients")
    upstream = torch.randn(inputs.x.shape, generator=case.generator(), dtype=torch.float64)
    right = _gradients_of(defined, inputs, upstream)
    found = _gradients_of(subject.called, inputs, upstream)
    size = max(float(each.abs().max()) for each in right.values() if each is not None)
    # The softmax Jacobian and three more products; sums of gradients may cancel to below 1.
    near = 16 * relative(inputs) * (1 + size)
    for name, gradient in found.items():
        wanted = right[name]
        assert wanted is not None
        if gradient is None:
            raise Failed(f"no gradient reaches {name}: the output is cut off from it")
        difference = float((gradient - wanted).abs().max())
        if not difference <= near:
            raise Failed(f"the gradient of {name} is wrong by {difference:.3g}")


def _gradients_of(
    function: Callable[[Inputs], Tensor], inputs: Inputs, upstream: Tensor
) -> dict[str, Tensor | None]:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.tensors.items()}
    output = function(inputs.with_(**leaves))
    if not output.requires_grad:
        return dict.fromkeys(leaves)
    try:
        found = torch.autograd.grad(output, list(leaves.values()), upstream, allow_unused=True)
    except RuntimeError as error:
        raise Raised(
            f"the backward pass raised RuntimeError: {str(error).splitlines()[0]}"
        ) from None
    return dict(zip(leaves, found, strict=True))


def _grouped(subject: Subject, case: Case) -> None:
    """Key-value heads repeated in the weights, so that there are as many as query heads."""
    inputs = case.inputs()
    assert case.kv_heads is not None
    group = case.heads // case.kv_heads
    shape = (case.d, case.kv_heads, case.d_head)
    w_k, w_v = (
        w.view(shape).repeat_interleave(group, 1).flatten(1) for w in (inputs.w_k, inputs.w_v)
    )
    whole = subject.finite(inputs.with_(w_k=w_k, w_v=w_v, kv_heads=None))
    difference = float((subject.finite(inputs) - whole).abs().max())
    if difference > 2 * rounding(inputs):
        raise Failed(
            f"{case.heads} heads over {case.kv_heads} key-value heads differ by {difference:.3g}"
            f" from heads whose keys and values are repeated {group} times in place"
        )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


REQUIREMENTS: Final = (
    Requirement("shape", "it runs, and returns batch n d", _shape, heads_apart=False),
    Requirement("finite", "no NaN or infinity, also for large logits", _finite, heads_apart=False),
    Requirement("inputs kept", "it changes no input in place", _kept, heads_apart=False),
    Requirement("repeatable", "the same input gives the same output", _repeatable),
    Requirement("dtype", "the output has the dtype of x", _dtype, heads_apart=False),
    Requirement(
        "heads", "heads together are the sum of each head alone", _heads, least_heads=2,
        heads_apart=False,
    ),
    Requirement("rows", "every output is a weighted mean: weights ≥ 0 that sum to 1", _rows),
    Requirement("scale", "the logits are q·k/√d_k", _scale, least_n=2),
    Requirement("permutation", "without a mask, reordered tokens keep their outputs", _permutation,
                least_n=2),
    Requirement("batch", "sequences of a batch do not meet", _batch, least_batch=2),
    Requirement("causal mask", "a query sees the keys where the mask is True, no other", causal,
                mask="causal", least_n=2),
    Requirement("padding", "hidden keys at the end change nothing", padding, mask="padding",
                least_n=2),
    Requirement("empty row", "a row that may see nothing gives 0, or the function says so",
                empty_row, mask="empty row", least_n=2),
    Requirement("agreement", "it agrees with torch's scaled_dot_product_attention in float64",
                _torch, heads_apart=False),
    Requirement("masked agreement", "so it does under a causal mask", _torch, mask="causal",
                heads_apart=False),
    Requirement("gradients", "its gradients are those of the definition in float64", _gradients,
                heads_apart=False),
    Requirement("grouped heads", "fewer key-value heads, each shared by neighbouring query heads",
                _grouped, grouped=True, heads_apart=False),
)  # fmt: skip
