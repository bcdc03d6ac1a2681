"""Multi-head attention is a sum over heads of low-rank maps."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from headwise.attention.heads import merge_heads
from headwise.attention.masks import Causal
from headwise.attention.streaming import attend
from headwise.models.attention import MultiHeadAttention
from headwise.models.context import Context
from headwise.theorems.head_biases import BIASES
from headwise.theorems.head_gauge import GAUGE
from headwise.theorems.head_ranks import RANKS
from headwise.theorems.head_sizes import random_attention
from headwise.theorems.measured import Measured, exact
from headwise.theorems.rewritten import output_projection, own_heads
from headwise.theorems.statement import (
    Control,
    Effort,
    Evidence,
    Kind,
    NotApplicable,
    Textbook,
    Theorem,
)
from headwise.theorems.trained import Trained

__all__ = ["THEOREMS"]

_NAME: Final = "largest |concatenated − Σ_m A^m X W_V^m W_O^m|, relative"


def _tolerance(dtype: torch.dtype, logits: float) -> float:
    """32 u (1 + max |s|): a weight moves by twice its logit's error, which is u |s| each way.

    Sums over keys, values and heads add some ten u; 32 covers all of them. Softmax and its sums
    run in float32 or better whatever the dtype; what is stored is rounded to it a few times.
    """
    unit = torch.finfo(dtype).eps / 2
    return 32 * min(unit, 2.0**-24) * (1 + logits) + (8 * unit if unit > 2.0**-24 else 0.0)


def _relative(one: Tensor, other: Tensor, heads: Tensor, output: Tensor) -> float:
    """Largest difference over the largest Σ |head| |W_O|: what its rounding is relative to.

    Shapes: heads ``head query d_value``, output ``head d_value d_model``.
    """
    reach = (heads.double().abs() @ output.double().abs()).sum(0).max()
    return float((one.double() - other.double()).abs().max() / reach)


def _error(
    module: MultiHeadAttention, x: Tensor, form: str, *, roll: int = 0
) -> tuple[float, float]:
    """Relative difference of the two forms, and the largest logit; ``roll`` puts W_O's blocks at
    other heads in the sum."""
    context = Context(1, x.shape[1], 0, x.device, x.dtype)
    call = module.call(x, context)
    if form == "streaming":
        heads = attend(call.q, call.k, call.v, mask=call.mask, scale=call.scale)
        fused = module.output(merge_heads(heads))
    else:
        fused = module(x)
    a = module.weights(x)
    moved = a @ call.v.repeat_interleave(module.heads // module.kv_heads, 1)
    blocks = module.output_of_heads().permute(1, 2, 0).roll(roll, 0)
    summed = torch.einsum("hqv,hvd->qd", moved[0], blocks) if roll else module.sum_over_heads(x)[0]
    keys = call.k.repeat_interleave(module.heads // module.kv_heads, 1)
    logits = call.scale * (call.q @ keys.mT).abs().max()
    return _relative(fused[0], summed, moved[0], blocks), float(logits)


def _random(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    n, d_head, draws = effort.pick((37, 7, 3), (211, 29, 11))
    forms: list[tuple[str, str, torch.dtype, dict[str, Any]]] = [
        ("fused kernel", "fused", torch.float64, {}),
        ("streaming", "streaming", torch.float64, {}),
        ("fused kernel, float32", "fused", torch.float32, {}),
        ("causal, two heads to each key", "fused", torch.float64,
         {"kv_heads": 3, "mask": Causal()}),
    ]  # fmt: skip
    measured, wrong = [], []
    for what, form, dtype, more in forms:
        errors, logits = [], []
        for _ in range(draws):
            module = random_attention(
                59, 6, d_head=d_head, bias=True, generator=generator, **more
            ).to(dtype)
            x = torch.randn(1, n, 59, generator=generator, dtype=torch.float64).to(dtype)
            error, largest = _error(module, x, form)
            errors.append(error)
            logits.append(largest)
            wrong.append(_error(module, x, form, roll=1)[0])
        tolerance = _tolerance(dtype, max(logits))
        measured.append(exact(f"{_NAME} ({what})", max(errors), tolerance=tolerance, draws=draws))
    control = exact(_NAME, min(wrong), tolerance=max(m.tolerance or 0.0 for m in measured))
    return Evidence(
        measured=tuple(measured),
        controls=(Control(name="blocks of W_O at the wrong heads", measured=(control,)),),
        finding=(
            f"The two forms differ by {measured[0].value:.1e} in float64 and"
            f" {measured[2].value:.1e} in float32; with W_O cut in another order by"
            f" {min(wrong):.3g}."
        ),
    )


def _model(model: Trained) -> Evidence:
    layers = {layer.module: layer for layer in own_heads(model)}
    written = _written(model, [layers[seen.module] for seen in model.heads])
    measured: list[Measured] = []
    wrong: list[Measured] = []
    for seen in model.heads:
        layer = layers[seen.module]
        heads = seen.weights() @ seen.v
        output = layer.output.double()
        shift = 0.0 if layer.output_bias is None else layer.output_bias.double()
        largest = float(torch.where(seen.keep, seen.logits, 0.0).abs().max())
        fused = written[seen.module]
        for roll, found in ((0, measured), (1, wrong)):
            blocks = output.roll(roll, 0)
            summed = torch.einsum("hqv,hvd->qd", heads, blocks) + shift
            error = _relative(fused, summed, heads, output)
            tolerance = _tolerance(model.dtype, largest)
            found.append(exact(_NAME, error, tolerance=tolerance))
    if all(layer.heads == 1 for layer in layers.values()):
        raise NotApplicable("it has one head in each layer, so there is nothing to sum")
    worst = max(measured, key=_share)
    least = min(wrong, key=_share)
    return Evidence(
        measured=(worst,),
        controls=(Control(name="blocks of W_O at the wrong heads", measured=(least,)),),
        finding=(
            f"In {str(model.dtype).removeprefix('torch.')}, what attention writes is the sum of its"
            f" heads within {max(m.value for m in measured):.1e} in all {len(measured)} layers;"
            f" with W_O cut in another order it is off by {least.value:.3g} or more."
        ),
    )


def _share(measured: Measured) -> float:
    """Of its tolerance."""
    return measured.value / (measured.tolerance or 1.0)


@torch.no_grad()
def _written(model: Trained, layers: list[Any]) -> dict[str, Tensor]:
    """What the output projection of each layer gives over the dense part of the text."""
    found: dict[str, Tensor] = {}
    tokens = model.heads[0].q.shape[1]

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Tensor) -> None:
            found[name] = output.reshape(-1, output.shape[-2], output.shape[-1])[0].clone()

        return hook

    handles = [
        output_projection(model, layer).register_forward_hook(keep(layer.module))
        for layer in layers
    ]
    try:
        model.loaded.driver.run([model.document(tokens)])
    finally:
        for handle in handles:
            handle.remove()
    return found


THEOREMS: Final = (
    Theorem(
        name="concat-is-sum",
        title="Concatenated heads are a sum of heads",
        statement=(
            "Cutting W_O into the blocks of rows that meet each head turns the concatenation into"
            " a sum over heads of A^m X W_V^m W_O^m, each with a value map of rank at most d_v."
        ),
        latex=(
            r"\operatorname{Concat}(\mathrm{head}_1, \dots, \mathrm{head}_h)\, W_O"
            r" = \sum_{m=1}^{h} A^m X\, W_V^m W_O^m"
        ),
        conditions=(
            "W_O is cut in the order of the heads",
            "nothing stands between the heads and W_O (no norm, no gate)",
        ),
        source="Elhage et al. 2021, A Mathematical Framework for Transformer Circuits,"
        " section “Attention heads are independent and additive”",
        kind=Kind.IDENTITY,
        prediction="the two forms are equal up to rounding, in the model's own dtype",
        estimator="largest difference over random modules, and over every layer of a model,"
        " relative to the largest Σ |head| |W_O|",
        random=_random,
        model=_model,
        textbook=(
            Textbook(
                "heads are concatenated, so each fills its own part of the stream",
                "W_O mixes them: every head may write to all of it",
            ),
        ),
        exercise=4,
        proof="concat-is-sum",
    ),
    *RANKS,
    *BIASES,
    *GAUGE,
)
