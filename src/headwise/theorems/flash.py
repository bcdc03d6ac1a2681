"""Attention in tiles: exact, forward and backward, in memory that grows as n."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from headwise.attention import streaming
from headwise.attention.definition import attention, scores, weights
from headwise.attention.masks import Causal, Everything, Mask, Window
from headwise.attention.state import LOG2E, State
from headwise.theorems.measured import Measured, exact, slope, within
from headwise.theorems.saved_bytes import Attention, attention_bytes, materialised
from headwise.theorems.statement import (
    Control,
    Curve,
    Effort,
    Evidence,
    Kind,
    NotApplicable,
    Plot,
    Textbook,
    Theorem,
)
from headwise.theorems.trained import Trained

__all__ = ["THEOREMS", "memory_slopes"]


def _draw(effort: Effort, n: int, d: int, sigma: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(effort.seed)
    q, k, v = (torch.randn(1, 2, n, d, generator=generator) for _ in range(3))
    return sigma * q, k, v


def _bound(q: Tensor, k: Tensor, v: Tensor) -> float:
    """32 u (1 + max |s|) max |v|: how far two orders of summation may be apart.

    An error ds of a logit moves an output by at most 2 |ds| max |v|, and |ds| is about √d_k u |s|;
    the exponential and the sums add some u. Worst cases, which never occur, are larger.
    """
    u = torch.finfo(q.dtype).eps / 2
    largest = float(scores(q.double(), k.double()).abs().max())
    return 32 * u * (1 + largest) * float(v.abs().max())


def _without_rescale(q: Tensor, k: Tensor, v: Tensor, tile: int, *, total: bool = False) -> Tensor:
    """Attention in tiles that forgets exp(m_old − m_new): on the output, or on the ``total``."""
    out = torch.empty_like(v)
    for h in range(q.shape[1]):
        state = State.empty(q.shape[2], v.shape[3])
        factor = LOG2E / math.sqrt(q.shape[3])
        for start in range(0, k.shape[2], tile):
            part = slice(start, start + tile)
            right = state.absorb(factor * q[0, h] @ k[0, h, part].T, v[0, h, part])
            missed = torch.exp2(state.top - right.top)
            weighted, sums = right.weighted, right.total
            if total:
                sums = sums + torch.where(state.total > 0, (1 - missed) * state.total, 0.0)
            else:
                weighted = weighted + (1 - missed) * state.weighted
            state = State(right.top, sums, weighted)
        out[0, h] = state.finish()[0]
    return out


def _exact(effort: Effort) -> Evidence:
    n, d = effort.pick((1307, 13), (2039, 61))  # more keys than one tile has
    measured: list[Measured] = []
    masks: tuple[tuple[str, Mask], ...] = (
        ("everything", Everything()),
        ("causal", Causal()),
        ("a window of 101", Window(101)),
    )
    for sigma, chosen in ((1.0, masks), (4.0, masks[:2])):
        q, k, v = _draw(effort, n, d, sigma)
        for name, mask in chosen:
            true = attention(q.double(), k.double(), v.double(), mask=mask)
            found = float((streaming.attend(q, k, v, mask=mask) - true).abs().max())
            measured.append(
                exact(f"largest |o − definition|, {name}, σ_q = {sigma:g}", found,
                      tolerance=_bound(q, k, v))
            )  # fmt: skip
    q, k, v = _draw(effort, n, d, 1.0)
    true = attention(q.double(), k.double(), v.double())
    wrong = {
        "o without the factor exp(m_old − m_new)": _without_rescale(q, k, v, 127),
        "l without that factor": _without_rescale(q, k, v, 127, total=True),
        "weights kept in bfloat16": weights(scores(q, k)).bfloat16().float() @ v,
    }
    controls = tuple(
        Control(
            name=name,
            measured=(
                exact("largest |o − definition|", float((o - true).abs().max()),
                      tolerance=_bound(q, k, v)),
            ),
        )
        for name, o in wrong.items()
    )  # fmt: skip
    errors = [control.measured[0].value for control in controls]
    return Evidence(
        measured=tuple(measured),
        controls=controls,
        finding=(
            f"In float32 tiles are within {measured[0].value:.1e} of the definition in float64"
            f" ({max(each.value for each in measured):.1e} with logits four times as large);"
            f" without the rescaling of o they are off by {errors[0]:.2g}, without that of l by"
            f" {errors[1]:.2g}."
        ),
    )


def _exact_model(model: Trained) -> Evidence:
    layers = [each for each in model.heads if each.plain and each.sinks is None]
    if not layers:
        raise NotApplicable("its logits are not q·k alone: a softcap, a bias or a learned sink")
    worst: list[Measured] = []
    wrong: list[Measured] = []
    for layer in layers:
        q, k, v = (x[None].float() for x in (layer.q, layer.k, layer.v))
        causal = not bool(layer.keep[0, -1])
        if not torch.equal(layer.keep, _dense(layer.keep, causal)):
            continue
        mask = Causal() if causal else Everything()
        true = attention(q.double(), k.double(), v.double(), mask=mask, scale=layer.scale)
        found = streaming.attend(q, k, v, mask=mask, scale=layer.scale)
        tolerance = _bound(q, k, v) * max(1.0, layer.scale * math.sqrt(q.shape[3]))
        name = f"largest |o − definition|, {layer.module}"
        worst.append(exact(name, float((found - true).abs().max()), tolerance=tolerance))
        rough = attention(*(x.bfloat16().double() for x in (q, k, v)), mask=mask, scale=layer.scale)
        wrong.append(exact(name, float((rough - true).abs().max()), tolerance=tolerance))
    if not worst:
        raise NotApplicable("its masks are neither causal nor empty")
    first = max(worst, key=lambda each: each.value / (each.tolerance or 1.0))
    last = max(wrong, key=lambda each: each.value / (each.tolerance or 1.0))
    return Evidence(
        measured=(first,),
        controls=(Control(name="queries, keys and values in bfloat16", measured=(last,)),),
        finding=(
            f"With the queries, keys and values of every head, tiles in float32 stay within"
            f" {max(each.value for each in worst):.1e} of the definition in float64; rounding them"
            f" to bfloat16 moves outputs by up to {max(each.value for each in wrong):.1e}."
        ),
    )


def _dense(keep: Tensor, causal: bool) -> Tensor:
    every = torch.ones_like(keep)
    return every.tril() if causal else every


def _gradients(effort: Effort) -> Evidence:
    n, d = effort.pick((131, 7), (509, 31))
    generator = torch.Generator().manual_seed(effort.seed)
    q, k, v, d_o = (
        torch.randn(1, 3, n, d, generator=generator, dtype=torch.float64) for _ in range(4)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    ours = torch.autograd.grad(streaming.attend(q, k, v, mask=Causal()), inputs, d_o)
    true = torch.autograd.grad(attention(q, k, v, mask=Causal()), inputs, d_o)
    with torch.no_grad():
        a = weights(scores(q, k), torch.ones(n, n, dtype=torch.bool).tril())
        d_a = d_o @ v.mT
        no_row = a * d_a @ k / math.sqrt(d)
    # Each entry is a sum of n products whose factors are themselves sums over d; two orders of
    # summation differ by (n + d) u of the sum of absolute values, which n times the largest bounds.
    u = torch.finfo(torch.float64).eps / 2
    largest = max(float(x.detach().abs().max()) for x in (q, k, v, d_o))
    tolerance = 4 * (n + d) * u * d * largest**3
    measured = tuple(
        exact(f"largest difference, gradient of {name}", float((x - y).abs().max()),
              tolerance=tolerance)
        for name, x, y in zip("qkv", ours, true, strict=True)
    )  # fmt: skip
    wrong = exact(
        "largest difference, gradient of q",
        float((no_row - true[0]).abs().max()),
        tolerance=tolerance,
    )
    return Evidence(
        measured=measured,
        controls=(Control(name="dS = A ∘ dA, without the row sum do·o", measured=(wrong,)),),
        finding=(
            f"The gradients computed again from tiles agree with those through the n × n matrix"
            f" within {max(each.value for each in measured):.1e}; without the row term they are off"
            f" by {wrong.value:.2g}."
        ),
    )


def memory_slopes(
    lengths: tuple[int, ...], heads: int = 3, d: int = 7
) -> dict[str, tuple[list[int], float]]:
    """Bytes saved at each length and their slope in log–log, by form of attention."""
    forms: dict[str, Attention] = {
        "tiles": streaming.attend,
        "torch's fused kernel": torch_attention,
        "materialised": materialised,
    }
    found = {}
    for name, form in forms.items():
        saved = [attention_bytes(form, heads, n, d) for n in lengths]
        found[name] = (saved, slope(lengths, saved))
    return found


def _memory(effort: Effort) -> Evidence:
    lengths = effort.pick((257, 509, 1021, 2039), (257, 509, 1021, 2039, 4093))
    heads, d = 3, 7
    found = memory_slopes(lengths, heads, d)
    allowed = (0.99, 1.01)
    saved, steep = found["tiles"]
    formula = [4 * heads * n * (4 * d + 2) for n in lengths]
    bytes_ = max(abs(a - b) for a, b in zip(saved, formula, strict=True))
    last, steepness = found["materialised"]
    return Evidence(
        measured=(
            within("slope of log bytes on log n, tiles", steep, allowed=allowed),
            within("slope, torch's fused kernel", found["torch's fused kernel"][1],
                   allowed=allowed),
            exact("bytes − 4 hn (4d + 2), largest", bytes_, tolerance=0.0),
        ),
        controls=(
            Control(
                name="the materialised form",
                measured=(within("slope of log bytes on log n", steepness, allowed=allowed),),
            ),
        ),
        finding=(
            f"Tiles save {saved[-1] / 1e6:.3g} MB at n = {lengths[-1]}, with a slope of"
            f" {steep:.2f}: q, k, v, o and two numbers per row; the materialised form saves"
            f" {last[-1] / 1e6:.3g} MB, with a slope of {steepness:.2f}."
        ),
        plots=(
            Plot(
                title="Bytes kept for the backward pass",
                across="tokens n",
                up="bytes",
                places=tuple(float(n) for n in lengths),
                curves=(
                    Curve("tiles", tuple(float(x) for x in saved)),
                    Curve("4 hn (4d + 2)", tuple(float(x) for x in formula)),
                    Curve("control: materialised", tuple(float(x) for x in last)),
                ),
                log=(True, True),
            ),
        ),
    )  # fmt: skip


_SOURCE: Final = "Dao et al. 2022 (arXiv:2205.14135)"

THEOREMS: Final = (
    Theorem(
        name="streaming-is-exact",
        title="Attention in tiles is exact",
        statement=(
            "Attention computed tile by tile, with a running maximum, a running sum and rescaled"
            " outputs, is the same function as attention with its matrix. In floating point only"
            " the order of additions differs."
        ),
        latex=(
            r"m' = \max(m, \max_j s_j), \quad \ell' = e^{m-m'}\ell + \sum_j e^{s_j-m'}, \quad"
            r" w' = e^{m-m'} w + \sum_j e^{s_j-m'} v_j, \quad o = w/\ell"
        ),
        conditions=(
            "sums and outputs are rescaled at every new maximum",
            "weights stay in float32",
        ),
        source=f"{_SOURCE}, theorem 1; Milakov and Gimelshein 2018 (arXiv:1805.02867)",
        kind=Kind.IDENTITY,
        prediction="a difference of at most 32 u (1 + max |s|) max |v|",
        estimator="float32 against the definition in float64 of the same inputs; three masks",
        random=_exact,
        model=_exact_model,
        textbook=(
            Textbook(
                "FlashAttention has no cost in accuracy",
                "the same class of error, not the same bits: another order of additions",
            ),
        ),
        proof="streaming-is-exact",
    ),
    Theorem(
        name="streaming-gradient",
        title="The gradient in tiles is exact",
        statement=(
            "Gradients computed again from tiles, with the output and the normaliser of every row,"
            " are those of attention with its matrix."
        ),
        latex=(
            r"dS_{ij} = A_{ij}\,\big(do_i\cdot v_j - do_i\cdot o_i\big), \qquad"
            r" A_{ij} = e^{s_{ij} - L_i}"
        ),
        conditions=("the row term do·o is kept",),
        source=f"{_SOURCE}, algorithm 4",
        kind=Kind.IDENTITY,
        prediction="gradients of q, k and v that are equal up to rounding",
        estimator="the largest difference from autograd through the definition, in float64",
        random=_gradients,
        proof="streaming-is-exact",
    ),
    Theorem(
        name="streaming-memory",
        title="The extra memory of attention in tiles grows as n",
        statement=(
            "What attention in tiles keeps for the backward pass grows as n: q, k, v, o and two"
            " numbers for each row. The materialised form grows towards n²."
        ),
        latex=r"\mathrm{saved}(n) = h\,n\,(4d + 2) \quad\text{numbers}, \qquad"
        r" \frac{d \log \mathrm{saved}}{d \log n} = 1",
        conditions=("no n × n matrix is kept", "storages are counted once"),
        source=f"{_SOURCE}, theorem 1 and section 3.1",
        kind=Kind.IDENTITY,
        prediction="a slope of 1.00, and the formula to the byte",
        estimator="bytes of the storages that autograd saves, over lengths",
        random=_memory,
        textbook=(
            Textbook("FlashAttention has O(n) memory", "O(n) beyond its inputs and outputs, which"
                     " are O(n) themselves; more FLOPs, fewer bytes moved"),
        ),
    ),
)  # fmt: skip
