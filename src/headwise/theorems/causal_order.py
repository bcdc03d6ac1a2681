"""What a causal mask leaves of permutation symmetry: one layer's last position, and no more."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from headwise.attention.masks import Everything
from headwise.models import Decoder, build
from headwise.models.architecture import Architecture, Rotary, Stack, Unembedding
from headwise.theorems.measured import Measured, bootstrap, exact, within
from headwise.theorems.permuted_model import prefix_in_model
from headwise.theorems.statement import Control, Effort, Evidence, Kind, Textbook, Theorem

__all__ = ["CAUSAL_ORDER"]

_VOCAB, _N = 43, 19
_SEEN: Final = (1e-3, math.inf)  # a move of the last position that is no rounding


def _decoder(seed: int, layers: int, rotary: Rotary | None = None) -> Decoder:
    """A decoder of the product without positions, in float64; its logits have variance 1."""
    stack = Stack(layers=layers, heads=2, kv_heads=2, d_head=14, d_ff=59, rotary=rotary)
    architecture = Architecture(
        vocab=_VOCAB, d_model=31, context=127, decoder=stack, unembedding=Unembedding(tied=False)
    )
    model = build(architecture, seed=seed, dtype=torch.float64)
    assert isinstance(model, Decoder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("decoder.") and parameter.dim() == 2:
                parameter.mul_(math.sqrt(3))  # from variance 1/(3 · width) to 1/width
    return model.eval()


@torch.no_grad()
def _last(model: Decoder, generator: torch.Generator) -> float:
    """How far the last position moves, relative to its length, when its prefix is permuted."""
    ids = torch.randint(_VOCAB, (1, _N), generator=generator)
    order = torch.cat((torch.randperm(_N - 1, generator=generator), torch.tensor([_N - 1])))
    one, other = model.hidden(ids)[0, -1], model.hidden(ids[:, order])[0, -1]
    return float((one - other).norm() / one.norm())


def _everything(model: Decoder) -> Decoder:
    for module in model.modules():
        if hasattr(module, "sum_over_heads"):
            part: Any = module
            part.mask = Everything()
    return model


def _stays(name: str, moves: list[float]) -> Measured:
    """One layer sums over the same set in another order: 50 √n u."""
    tolerance = 50 * math.sqrt(_N) * torch.finfo(torch.float64).eps / 2
    return exact(name, max(moves), tolerance=tolerance, draws=len(moves))


def _moves(name: str, moves: list[float], seed: int) -> Measured:
    """The smallest move over draws, with its bootstrap interval."""
    interval = bootstrap(moves, min, seed=seed)
    return within(name, min(moves), allowed=_SEEN, interval=interval, draws=len(moves))


def _random(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    draws = effort.pick(11, 101)
    seeds = range(effort.seed, effort.seed + draws)
    one = [_last(_decoder(seed, 1), generator) for seed in seeds]
    two = [_last(_decoder(seed, 2), generator) for seed in seeds]
    turned = [_last(_decoder(seed, 1, Rotary(width=14)), generator) for seed in seeds]
    seen = [_last(_everything(_decoder(seed, 2)), generator) for seed in seeds]
    names = "one layer: largest move of the last position", "two layers: smallest move of it"
    return Evidence(
        measured=(_stays(names[0], one), _moves(names[1], two, effort.seed)),
        controls=(
            Control(name="two layers, held to what one does", measured=(_stays(names[0], two),)),
            Control(name="rotary positions", measured=(_stays(names[0], turned),)),
            Control(
                name="two layers without the causal mask",
                measured=(_moves(names[1], seen, effort.seed),),
            ),
        ),
        finding=(
            f"Permuting what comes before moves the last position of one causal layer by"
            f" {max(one):.1e} of its length, of two by {_median(two):.3g} (median)."
        ),
    )


def _median(values: list[float]) -> float:
    return float(Tensor(values).median())


CAUSAL_ORDER: Final = (
    Theorem(
        name="causal-mask-orders",
        title="The causal mask alone lets two layers see the order, and not one",
        statement=(
            "In one causal layer without positions, what a position gives does not depend on the"
            " order of the tokens before it. In two layers it does: the first gives each token a"
            " vector that depends on how much stands before it."
        ),
        latex=(
            r"f^{(1)}(PX)_n = f^{(1)}(X)_n \ \text{ for } P \text{ with } P_{nn} = 1,"
            r" \qquad f^{(2)}(PX)_n \ne f^{(2)}(X)_n \ \text{ in general}"
        ),
        conditions=(
            "the mask shows exactly the tokens up to the query's own",
            "no positions of any kind",
            "one layer, for the first half; generic weights, for the second",
        ),
        source="Kazemnejad et al. 2023 (arXiv:2305.19466), section 5; Haviv et al. 2022"
        " (arXiv:2203.16634)",
        kind=Kind.IDENTITY,
        prediction="one layer: the last position does not move; two layers: it does",
        estimator="relative move of the last position under a random permutation of its prefix,"
        " over draws of weights, in float64",
        random=_random,
        model=prefix_in_model,
        textbook=(
            Textbook(
                "without positional encodings a decoder cannot tell orders apart",
                "two causal layers can; only one layer cannot",
            ),
        ),
        proof="permutation-equivariance",
    ),
)
