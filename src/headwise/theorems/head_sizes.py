"""Multi-head attention: how many parameters it has, and that its heads have no order."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.attention.masks import Everything
from headwise.circuits.layer_weights import LayerWeights
from headwise.cost.counting import count
from headwise.cost.explicit import explicit
from headwise.cost.parts import Component
from headwise.cost.workload import Workload
from headwise.models.attention import MultiHeadAttention
from headwise.theorems.measured import Measured, exact
from headwise.theorems.rewritten import block_outputs, changed, moved, own_heads, rounding
from headwise.theorems.statement import (
    Control,
    Effort,
    Evidence,
    Kind,
    NotApplicable,
    Textbook,
    Theorem,
)
from headwise.theorems.trained import Trained, TrainedHeads

__all__ = ["THEOREMS", "random_attention"]


@dataclass(frozen=True, slots=True)
class _Sizes:
    d: int
    heads: int
    kv_heads: int
    d_head: int

    def projections(self) -> int:
        """d (h d_k + g d_k + g d_v + h d_v) with d_v = d_k."""
        return 2 * self.d * self.d_head * (self.heads + self.kv_heads)

    @property
    def ratio(self) -> float:
        """To 4d²."""
        return self.projections() / (4 * self.d**2)


def random_attention(
    d: int,
    heads: int,
    *,
    kv_heads: int | None = None,
    d_head: int | None = None,
    generator: torch.Generator,
    **others: Any,
) -> MultiHeadAttention:
    """Attention of the product with weights of variance 1/width in float64; biases are drawn too.

    ``others`` are arguments of ``MultiHeadAttention``, and ``bias`` (of queries, keys and values).
    """
    kv_heads = heads if kv_heads is None else kv_heads
    width = d // heads if d_head is None else d_head
    bias = bool(others.pop("bias", False))
    module = MultiHeadAttention(
        nn.Linear(d, heads * width, bias, dtype=torch.float64),
        nn.Linear(d, kv_heads * width, bias, dtype=torch.float64),
        nn.Linear(d, kv_heads * width, bias, dtype=torch.float64),
        nn.Linear(heads * width, d, False, dtype=torch.float64),
        heads=heads,
        kv_heads=kv_heads,
        **{"mask": Everything(), **others},
    ).double()
    with torch.no_grad():
        for x in module.parameters():
            fan = x.shape[-1] if x.dim() == 2 else 1
            x.copy_(torch.randn(x.shape, generator=generator, dtype=x.dtype) / math.sqrt(fan))
    return module.requires_grad_(False)


# -- the number of parameters -----------------------------------------------------------------


def _built(sizes: _Sizes, bias: bool = False) -> int:
    module = random_attention(
        sizes.d, sizes.heads, kv_heads=sizes.kv_heads, d_head=sizes.d_head, bias=bias,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    return sum(x.numel() for x in module.parameters())


def _counted(sizes: _Sizes) -> int:
    """What ``headwise.cost`` counts for the same sizes."""
    parts = explicit(
        d_model=sizes.d, layers=1, heads=sizes.heads, kv_heads=sizes.kv_heads, vocab=2,
        d_head=sizes.d_head,
    )  # fmt: skip
    found = count(parts, Workload(length=2)).by_component("parameters")
    four = (Component.QUERY, Component.KEY, Component.VALUE, Component.OUTPUT)
    return sum(found[each] for each in four)


def _off(name: str, pairs: list[tuple[int, int]]) -> Measured:
    """Integers: no tolerance."""
    worst = max(abs(found - predicted) for found, predicted in pairs)
    return exact(name, worst, tolerance=0.0, draws=len(pairs))


def _parameters(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    draws = effort.pick(7, 47)
    plain, shared, wide = [], [], []
    for _ in range(draws):
        g, k, width = (int(torch.randint(2, 6, (), generator=generator)) for _ in range(3))
        h = g * k
        plain.append(_Sizes(h * width, h, h, width))
        shared.append(_Sizes(h * width, h, g, width))
        wide.append(_Sizes(h * width, h, h, width + 3))
    every = plain + shared + wide
    name = "largest |parameters − 2 d d_k (h + g)|"
    four = "largest |parameters − 4 d²|"
    fours = {
        what: _off(four, [(_built(s), 4 * s.d**2) for s in some])
        for what, some in (("grouped keys and values", shared), ("heads wider than d/h", wide))
    }
    biased = _off(four, [(_built(s, bias=True), 4 * s.d**2) for s in plain])
    single = [(_built(s), _built(_Sizes(s.d, 1, 1, s.d))) for s in plain]
    return Evidence(
        measured=(
            _off(name, [(_built(s), s.projections()) for s in every]),
            _off(
                "the same, as headwise cost counts", [(_counted(s), s.projections()) for s in every]
            ),
            _off(f"{four}, d_k = d/h and g = h", [(_built(s), 4 * s.d**2) for s in plain]),
            _off("largest difference from one head of width d", single),
        ),
        controls=(
            *(Control(name=what, measured=(each,)) for what, each in fours.items()),
            Control(name="biases", measured=(biased,)),
        ),
        finding=(
            f"All {len(every)} sizes have exactly 2 d d_k (h + g) parameters: 4 d² with d_k = d/h,"
            f" {min(s.ratio for s in shared):.3g} to {max(s.ratio for s in shared):.3g} of it where"
            f" keys and values are shared."
        ),
    )


def _distinct(x: Tensor) -> int:
    """How many different heads stand side by side: those of one group are copies."""
    return 1 + sum(not torch.equal(a, b) for a, b in itertools.pairwise(x))


def _of_run(seen: TrainedHeads, layer: LayerWeights) -> _Sizes:
    """Sizes as the run shows them, and the width of the stream as W_O shows it."""
    return _Sizes(layer.output.shape[-1], len(seen.q), _distinct(seen.k), seen.q.shape[-1])


def _parameters_of(model: Trained) -> Evidence:
    layers = {layer.module: layer for layer in own_heads(model)}
    pairs = [(_of_run(s, layers[s.module]), layers[s.module]) for s in model.heads]
    if any(layer.value.shape[2] != sizes.d_head for sizes, layer in pairs):
        raise NotApplicable("its values are not as wide as its keys")
    found = [
        (sum(x.numel() for x in (w.query, w.key, w.value, w.output)), sizes) for sizes, w in pairs
    ]
    sizes = pairs[0][0]
    plain = all(s.ratio == 1 for s, _ in pairs)
    wrong = 3 * sizes.d**2 if plain else 4 * sizes.d**2
    what = "3 d² (W_O forgotten)" if plain else "4 d²"
    total = sum(n for n, _ in found)
    return Evidence(
        measured=(
            _off(
                "largest |parameters − 2 d d_k (h + g)|", [(n, s.projections()) for n, s in found]
            ),
        ),
        controls=(
            Control(name=what, measured=(_off(f"|parameters − {what}|", [(found[0][0], wrong)]),)),
        ),
        finding=(
            f"Each layer has {found[0][0]:,} weights in its four projections: {sizes.ratio:.3g} of"
            f" 4 d² (h = {sizes.heads}, g = {sizes.kv_heads}, d_k = {sizes.d_head}, d = {sizes.d});"
            f" all layers {total:,}."
        ),
    )


# -- heads have no order ----------------------------------------------------------------------


def _reorder(layer: dict[str, Tensor | None], order: Tensor, groups: Tensor) -> None:
    """Heads by ``order``, their keys and values by ``groups``, in place."""
    for name, x in layer.items():
        if x is not None:
            places = order if name.startswith(("query", "output")) else groups
            x.copy_(x[places].clone())


def _views(module: MultiHeadAttention) -> dict[str, Tensor | None]:
    """The weights of a module by heads, as views: what ``LayerWeights`` has."""
    found: dict[str, Tensor | None] = {}
    for name, heads in (("query", module.heads), ("key", module.kv_heads),
                        ("value", module.kv_heads)):  # fmt: skip
        part: Any = getattr(module, name)
        found[name] = part.weight.view(heads, -1, part.weight.shape[1])
        found[f"{name}_bias"] = None if part.bias is None else part.bias.view(heads, -1)
    found["output"] = module.output_of_heads().transpose(0, 1)
    return found


def _orders(heads: int, groups: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Whole groups permuted, and heads within each: an order of heads, and one of groups."""
    size = heads // groups
    order = torch.randperm(groups, generator=generator)
    if groups > 1 and bool((order == torch.arange(groups)).all()):
        order = order.roll(1)
    inside = [g * size + torch.randperm(size, generator=generator) for g in order.tolist()]
    return torch.cat(inside), order


def _exchanged(draws: int, groups: int, generator: torch.Generator, wrong: str = "") -> list[float]:
    """Relative change of the output when heads change places; ``wrong`` says what is left out."""
    found, heads = [], 6
    for _ in range(draws):
        module = random_attention(
            42, heads, kv_heads=groups, d_head=11, bias=True, generator=generator
        )
        x = torch.randn(1, 23, 42, generator=generator, dtype=torch.float64)
        before, views = module(x), _views(module)
        order, of_groups = _orders(heads, groups, generator)
        if wrong == "output":
            views.pop("output")
        if wrong == "across":  # heads of two groups change places, their keys stay
            order, of_groups = torch.arange(heads).roll(1), torch.arange(groups)
        _reorder(views, order, of_groups)
        found.append(float((module(x) - before).abs().max() / before.abs().max()))
    return found


def _same(name: str, changes: list[float]) -> Measured:
    """The sum over heads runs in another order: h + d_v terms in precision u, 8 at most of it."""
    return exact(name, max(changes), tolerance=8 * 66 * 2.0**-53, draws=len(changes))


def _exchange(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    draws = effort.pick(5, 53)
    name = "largest relative change of the output"
    plain, shared = (_exchanged(draws, groups, generator) for groups in (6, 3))
    kept = _exchanged(draws, 6, generator, "output")
    across = _exchanged(draws, 3, generator, "across")
    return Evidence(
        measured=(_same(name, plain), _same(f"{name}, with 3 groups", shared)),
        controls=(
            Control(name="the rows of W_O stay where they are", measured=(_same(name, kept),)),
            Control(name="heads change groups, their keys do not", measured=(_same(name, across),)),
        ),
        finding=(
            f"Heads that change places change the output by {max(plain + shared):.1e} of its size;"
            f" across groups of shared keys by {min(across):.3g}."
        ),
    )


def _exchange_in(model: Trained) -> Evidence:
    layers = own_heads(model)
    if any(not seen.plain or seen.sinks is not None for seen in model.heads):
        raise NotApplicable("its heads have biases, softcaps or sinks of their own in the logits")
    norms = [n for layer in layers for n in (layer.query_norm, layer.key_norm) if n is not None]
    if any(norm.across for norm in norms):
        raise NotApplicable("queries or keys of all heads pass one norm, with gains by head")
    if all(layer.heads == 1 for layer in layers):
        raise NotApplicable("it has one head in each layer")
    document = model.document(64)
    ids, target = document.ids, document.target
    before = block_outputs(model, ids, target=target)[-1]
    changes = []
    for wrong in (False, True):
        generator = torch.Generator().manual_seed(model.seed)
        with changed(x for layer in layers for x in _weights(layer).values()):
            for layer in layers:
                order, groups = _orders(layer.heads, layer.kv_heads, generator)
                views = _weights(layer)
                _reorder({**views, "output": None} if wrong else views, order, groups)
            changes.append(moved(before, block_outputs(model, ids, target=target)[-1]))
    tolerance = rounding(model, len(ids), len(layers))
    name = "largest relative move of a token after the last block"
    return Evidence(
        measured=(exact(name, changes[0], tolerance=tolerance),),
        controls=(
            Control(
                name="the rows of W_O stay where they are",
                measured=(exact(name, changes[1], tolerance=tolerance),),
            ),
        ),
        finding=(
            f"With the heads of every layer in another order, no output moves by more than"
            f" {changes[0]:.1e} of its length; with W_O left as it was, by {changes[1]:.3g}."
        ),
    )


def _weights(layer: LayerWeights) -> dict[str, Tensor | None]:
    names = ("query", "key", "value", "output", "query_bias", "key_bias", "value_bias")
    return {name: getattr(layer, name) for name in names}


_MHA: Final = "Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2"

THEOREMS: Final = (
    Theorem(
        name="multi-head-parameters",
        title="Heads of width d/h cost what one head of width d costs",
        statement=(
            "The four projections of h query heads over g key-value heads of width d_k hold"
            " 2 d d_k (h + g) weights. With g = h and d_k = d/h this is 4d², whatever h is."
        ),
        latex=(
            r"N = \underbrace{h d_k d}_{W_Q} + \underbrace{g d_k d}_{W_K} +"
            r" \underbrace{g d_v d}_{W_V} + \underbrace{h d_v d}_{W_O}"
            r" = \left(2 + \tfrac{2g}{h}\right) d^2 \ \text{ for } d_k = d_v = \tfrac{d}{h}"
        ),
        conditions=(
            "d_k = d_v = d/h (for 4d²)",
            "as many key-value heads as query heads (for 4d²)",
            "no biases; keys and values have matrices of their own (no latent attention)",
        ),
        source=f"{_MHA}; grouped heads: Ainslie et al. 2023 (arXiv:2305.13245), section 2.2",
        kind=Kind.IDENTITY,
        prediction="2 d d_k (h + g) exactly; 4d² with d_k = d/h and g = h",
        estimator="parameters of built modules, and the count of headwise cost, as whole numbers",
        random=_parameters,
        model=_parameters_of,
        textbook=(
            Textbook(
                "multi-head attention has 4d² parameters",
                "(2 + 2g/h) d² with g groups of keys and values; 2 d d_k (h + g) where a head is"
                " not d/h wide; biases come on top",
            ),
        ),
    ),
    Theorem(
        name="heads-exchangeable",
        title="Heads have no order",
        statement=(
            "Permuting the heads, their blocks of W_Q, W_K, W_V and W_O alike, changes nothing."
            " Where heads share keys, whole groups may change places, and heads within a group."
        ),
        latex=(
            r"\sum_{m=1}^{h} A^{\pi(m)} X W_V^{\pi(m)} W_O^{\pi(m)}"
            r" = \sum_{m=1}^{h} A^{m} X W_V^{m} W_O^{m}"
        ),
        conditions=(
            "all four blocks of a head move together",
            "heads that share keys and values stay together",
            "nothing else has a number by head (ALiBi's slopes, learned biases, sinks, gains)",
        ),
        source=f"{_MHA}, as a sum over heads",
        kind=Kind.IDENTITY,
        prediction="the output does not change, up to the order of a sum",
        estimator="largest change of the output of random modules, and of a model's last block",
        random=_exchange,
        model=_exchange_in,
        textbook=(
            Textbook(
                "any permutation of heads is a symmetry",
                "with shared keys only those that keep groups together",
            ),
        ),
    ),
)
