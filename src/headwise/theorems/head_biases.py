"""What biases of keys and values do: the one nothing, the other a constant."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from headwise.circuits.layer_weights import LayerWeights
from headwise.models.architecture import Rotary
from headwise.models.attention import MultiHeadAttention
from headwise.theorems.head_sizes import random_attention
from headwise.theorems.measured import Measured, exact
from headwise.theorems.rewritten import (
    block_outputs,
    changed,
    moved,
    output_projection,
    own_heads,
    rounding,
)
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

__all__ = ["BIASES"]

_D, _HEADS, _HEAD, _N = 47, 3, 12, 29


def _module(generator: torch.Generator, **others: Any) -> MultiHeadAttention:
    found = random_attention(_D, _HEADS, d_head=_HEAD, bias=True, generator=generator, **others)
    return found


def _without(module: MultiHeadAttention, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output as it is, and with one bias set to 0."""
    before = module(x)
    bias: Tensor = getattr(module, name).bias
    kept = bias.clone()
    bias.zero_()
    after = module(x)
    bias.copy_(kept)
    return before, after


def _exact(name: str, values: list[float]) -> Measured:
    """A row constant of size |q·b| moves logits by u |s| each: weights by 2 u |s|, |s| < 60."""
    return exact(name, max(values), tolerance=32 * 60 * 2.0**-53, draws=len(values))


# -- values -----------------------------------------------------------------------------------


def _values(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    draws = effort.pick(5, 53)
    name = "largest |O(b_V) − O(0) − Σ_m b_V^m W_O^m|, relative"

    def errors(**others: Any) -> list[float]:
        found = []
        for _ in range(draws):
            module = _module(generator, **others)
            x = torch.randn(1, _N, _D, generator=generator, dtype=torch.float64)
            with_bias, without = _without(module, "value", x)
            bias: Any = module.value.bias
            constant = module.output(bias)
            error = (with_bias - without - constant).abs().max() / with_bias.abs().max()
            found.append(float(error))
        return found

    holds, sunk = errors(), errors(sinks=True)
    return Evidence(
        measured=(_exact(name, holds),),
        controls=(
            Control(name="a learned sink takes part of every row", measured=(_exact(name, sunk),)),
        ),
        finding=(
            f"The value bias adds b_V W_O to every token within {max(holds):.1e}; with a sink it is"
            f" off by {max(sunk):.3g} of the output."
        ),
    )


def _constant(layer: LayerWeights) -> Tensor:
    """Σ_m b_V^m W_O^m, ``d_model``."""
    assert layer.value_bias is not None
    bias = layer.shared(layer.value_bias.double())
    return torch.einsum("hv,hvd->d", bias, layer.output.double())


def _values_of(model: Trained) -> Evidence:
    layers = [layer for layer in own_heads(model) if layer.value_bias is not None]
    if not layers:
        raise NotApplicable("its values have no bias")
    document = model.document(64)
    ids, target = document.ids, document.target
    before = block_outputs(model, ids, target=target)[-1]

    def moves(put_back: bool) -> float:
        handles = []
        with changed(layer.value_bias for layer in layers):
            for layer in layers:
                if put_back:
                    handles.append(_adding(model, layer))
                assert layer.value_bias is not None
                layer.value_bias.zero_()
            try:
                return moved(before, block_outputs(model, ids, target=target)[-1])
            finally:
                for handle in handles:
                    handle.remove()

    tolerance = rounding(model, len(ids), len(layers))
    name = "largest relative move of a token after the last block"
    kept, dropped = (exact(name, moves(x), tolerance=tolerance) for x in (True, False))
    sinks = any(seen.sinks is not None for seen in model.heads)
    return Evidence(
        measured=(kept,),
        controls=(Control(name="the constant is not put back", measured=(dropped,)),),
        violated="a learned sink takes part of every row" if sinks else "",
        finding=(
            f"With b_V W_O in place of the value biases, outputs move by {kept.value:.1e} of their"
            f" length; without it by {dropped.value:.3g}."
        ),
    )


def _adding(model: Trained, layer: LayerWeights) -> Any:
    constant = _constant(layer)

    def add(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output + constant.to(output)

    return output_projection(model, layer).register_forward_hook(add)


# -- keys -------------------------------------------------------------------------------------


def _keys(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    draws = effort.pick(5, 53)
    name = "largest change of the output without the bias, relative"

    def errors(which: str = "key", **others: Any) -> list[float]:
        found = []
        for _ in range(draws):
            module = _module(generator, **others)
            x = torch.randn(1, _N, _D, generator=generator, dtype=torch.float64)
            before, after = _without(module, which, x)
            found.append(float((before - after).abs().max() / before.abs().max()))
        return found

    holds = errors()
    dropped = {
        "rotary positions after the bias": errors(rotary=Rotary(width=_HEAD)),
        "the bias of the queries": errors("query"),
        "a softcap": errors(softcap=1.0),
        "a learned sink": errors(sinks=True),
    }
    return Evidence(
        measured=(_exact(name, holds),),
        controls=tuple(
            Control(name=what, measured=(_exact(name, found),)) for what, found in dropped.items()
        ),
        finding=(
            f"Dropping the key bias changes the output by {max(holds):.1e}; the query bias by"
            f" {max(dropped['the bias of the queries']):.3g}, and the key bias before a rotation by"
            f" {max(dropped['rotary positions after the bias']):.3g}."
        ),
    )


def _keys_of(model: Trained) -> Evidence:
    layers = [layer for layer in own_heads(model) if layer.key_bias is not None]
    if not layers:
        raise NotApplicable("its keys have no bias")
    document = model.document(64)
    ids, target = document.ids, document.target
    before = block_outputs(model, ids, target=target)[-1]
    tolerance = rounding(model, len(ids), len(layers))
    name = "largest relative move of a token after the last block"
    found = []
    for which in ("key_bias", "query_bias"):
        with changed(getattr(layer, which) for layer in layers):
            for layer in layers:
                bias = getattr(layer, which)
                if bias is not None:
                    bias.zero_()
            after = block_outputs(model, ids, target=target)[-1]
        found.append(exact(name, moved(before, after), tolerance=tolerance))
    return Evidence(
        measured=(found[0],),
        controls=(Control(name="without the query biases", measured=(found[1],)),),
        violated=_not_constant(model, layers),
        finding=(
            f"Dropping every key bias moves outputs by {found[0].value:.1e} of their length;"
            f" dropping the query biases moves them by {found[1].value:.3g}."
        ),
    )


def _not_constant(model: Trained, layers: list[LayerWeights]) -> str:
    if any(layer.rotary is not None for layer in layers):
        return "rotary positions turn the biased keys"
    if any(layer.key_norm is not None for layer in layers):
        return "a norm divides the biased keys"
    if any(seen.sinks is not None for seen in model.heads):
        return "a learned sink has no key, so its logit is not shifted with the others"
    return ""


BIASES: Final = (
    Theorem(
        name="value-bias-constant",
        title="A bias of the values adds one constant to every token",
        statement=(
            "Rows of A sum to 1, so a bias b_V of the values adds Σ_m b_V^m W_O^m to every token,"
            " whatever the text is."
        ),
        latex=(
            r"A\,(XW_V + \mathbf{1} b_V^{\top})\,W_O = A X W_V W_O + \mathbf{1}\, b_V^{\top} W_O"
        ),
        conditions=("rows of A sum to 1 (no learned sink, no dropout)",),
        source="follows from the rows of A summing to 1",
        kind=Kind.IDENTITY,
        prediction="O(b_V) − O(0) = b_V W_O for every token",
        estimator="largest deviation over random modules; in a model, the move of the last block"
        " when the biases are replaced by the constant",
        random=_values,
        model=_values_of,
        proof="head-biases",
    ),
    Theorem(
        name="key-bias-null",
        title="A bias of the keys does nothing",
        statement=(
            "A bias b_K of the keys adds q_i·b_K to every logit of row i, which the softmax does"
            " not see: it is a parameter without any effect."
        ),
        latex=(
            r"\langle q_i, k_j + b_K \rangle = \langle q_i, k_j \rangle + \langle q_i, b_K \rangle,"
            r" \qquad \operatorname{softmax}(s + c\,\mathbf{1}) = \operatorname{softmax}(s)"
        ),
        conditions=(
            "keys are not rotated or normed after the bias",
            "no softcap, and no sink whose logit has no key",
        ),
        source="the softmax is invariant to a constant of a row; used by Whisper"
        " (arXiv:2212.04356), whose keys have no bias",
        kind=Kind.IDENTITY,
        prediction="the output does not change when the bias is dropped",
        estimator="largest relative change of the output over random modules; in a model, the move"
        " of the last block",
        random=_keys,
        model=_keys_of,
        textbook=(
            Textbook(
                "q, k and v each need their bias",
                "that of k is null without rotary positions, and that of v is one constant",
            ),
        ),
        proof="head-biases",
    ),
)
