"""Which learning rates train a small deep model, by the placement of its norms and by warmup.

Every token is, nine times in ten, a fixed function of the token two places back; the rest is noise.
Models that differ in weights, text and learning rate are trained side by side by Adam. A rate is
stable if the loss ends below half of ln V, the loss of a model that knows nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, embedding

from headwise.models import Decoder, build
from headwise.models.context import Context
from headwise.models.presets import decoder_sizes
from headwise.theorems.measured import Measured, bootstrap, within
from headwise.theorems.statement import Control, Curve, Effort, Evidence, Plot

__all__ = ["RATES", "Runs", "stable_rates", "train_all"]

RATES: Final = tuple(10 ** (k / 2 - 4) for k in range(2, 7))
_VOCAB: Final = 13
_BATCH, _TOKENS = 16, 13
_KEPT: Final = 0.9  # share of tokens that follow the rule
_BETAS, _EPS = (0.9, 0.98), 1e-9
_ENDING: Final = 5  # last steps, whose losses are averaged
_STEPS: Final = 101
_WARMUP: Final = 50
_PRE, _POST = "pre", "post"
_AT_LEAST: Final = (1.3, math.inf)  # the smallest ratio that is told from none


@dataclass(frozen=True, slots=True)
class Runs:
    """Losses at the end, one row of rates for each seed."""

    losses: tuple[tuple[float, ...], ...]

    @property
    def widest(self) -> tuple[float, ...]:
        """The largest stable rate of each seed; 0 where none is."""
        limit = math.log(_VOCAB) / 2
        return tuple(
            max((rate for rate, loss in zip(RATES, row, strict=True) if loss < limit), default=0.0)
            for row in self.losses
        )


def train_all(
    placement: str, *, warmup: int, seeds: range, layers: int = 6, steps: int = _STEPS
) -> Runs:
    """Train a model for every seed and rate; ``warmup`` steps rise linearly to the rate."""
    model = _model(placement, layers)
    drawn = [_weights(model, torch.Generator().manual_seed(seed)) for seed in seeds]
    generators = [torch.Generator().manual_seed(2**20 + seed) for seed in seeds]
    texts = torch.stack([_text(generator, steps) for generator in generators])
    count = len(RATES)
    state = {
        name: torch.stack([one[name] for one in drawn]).repeat_interleave(count, 0)
        for name in drawn[0]
    }
    texts = texts.repeat_interleave(count, 0)
    rates = torch.tensor(RATES).repeat(len(seeds))
    step = vmap(grad_and_value(partial(_loss, model)))
    first, second = ({n: torch.zeros_like(x) for n, x in state.items()} for _ in range(2))
    losses = []
    # One backend for all models at once: the fused ones have no batched form.
    with sdpa_kernel(SDPBackend.MATH):
        for t in range(1, steps + 1):
            gradients, loss = step(state, texts[:, t - 1])
            losses.append(loss)
            _adam(state, gradients, first, second, rates * min(1.0, t / max(warmup, 1)), t)
    ends = torch.stack(losses[-_ENDING:]).mean(0).nan_to_num(math.inf)
    return Runs(tuple(tuple(row) for row in ends.view(len(seeds), count).tolist()))


def _model(placement: str, layers: int) -> Decoder:
    model = build(
        decoder_sizes(
            vocab=_VOCAB, d_model=24, layers=layers, heads=2, d_ff=24, context=_TOKENS, tied=False,
            norm="layer", norm_eps=1e-5, placement=placement, final_norm=placement == "pre",
            activation="relu", gated=False,
        )
    )  # fmt: skip
    assert isinstance(model, Decoder)
    return model


def _weights(model: Decoder, generator: torch.Generator) -> dict[str, Tensor]:
    """Xavier's; embeddings of variance 1; gains 1 and biases 0 as they are."""
    found = {}
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            found[name] = weight.detach().clone()
            continue
        std = 1.0 if name.startswith("embedding.") else math.sqrt(2 / sum(weight.shape))
        found[name] = torch.randn(weight.shape, generator=generator) * std
    return found


def _text(generator: torch.Generator, steps: int) -> Tensor:
    """``step batch token``: a fixed permutation of the token two places back, and noise."""
    rule = torch.randperm(_VOCAB, generator=generator)
    x = torch.randint(_VOCAB, (steps, _BATCH, _TOKENS + 1), generator=generator)
    for t in range(2, x.shape[-1]):
        kept = torch.rand(steps, _BATCH, generator=generator) < _KEPT
        x[..., t] = torch.where(kept, rule[x[..., t - 2]], x[..., t])
    return x


def _loss(model: Decoder, state: dict[str, Tensor], x: Tensor) -> Tensor:
    stream = embedding(x[:, :-1], state["embedding.tokens.weight"])
    prefix = "decoder."
    inside = {n.removeprefix(prefix): p for n, p in state.items() if n.startswith(prefix)}
    context = Context(_BATCH, _TOKENS, 0, stream.device, torch.float32)
    stream = functional_call(model.decoder, inside, (stream, context))
    logits = stream @ state["unembedding.weight"].T
    return cross_entropy(logits[:, 1:].flatten(0, 1), x[:, 2:].flatten())  # none before knows two


def _adam(
    state: dict[str, Tensor],
    gradients: dict[str, Tensor],
    first: dict[str, Tensor],
    second: dict[str, Tensor],
    rates: Tensor,
    t: int,
) -> None:
    """Kingma and Ba 2015, algorithm 1, with a rate for each model."""
    a, b = _BETAS
    for name, weight in state.items():
        slope = gradients[name]
        first[name].mul_(a).add_(slope, alpha=1 - a)
        second[name].mul_(b).addcmul_(slope, slope, value=1 - b)
        size = (second[name] / (1 - b**t)).sqrt() + _EPS
        along = first[name] / (1 - a**t) / size
        state[name] = weight - rates.view(-1, *[1] * (weight.dim() - 1)) * along


def stable_rates(effort: Effort) -> Evidence:
    """The widest stable learning rate, with and without warmup, as ratios."""
    if not effort.full:
        reason = "it takes a minute of training: it is measured with full effort only"
        return Evidence(measured=(), controls=(), finding=reason, inconclusive=reason)
    seeds = range(101 * effort.seed, 101 * effort.seed + 8)
    runs = {
        (placement, warmup): train_all(placement, warmup=warmup, seeds=seeds)
        for placement in (_PRE, _POST)
        for warmup in (0, _WARMUP)
    }
    name = "geometric mean of the largest stable rate of {} over that of {}"

    least = RATES[0] ** 2 / RATES[1]  # for "none": the next rate below

    def ratio(above: Runs, below: Runs, words: tuple[str, str]) -> Measured:
        logs = [
            math.log(max(a, least) / max(b, least))
            for a, b in zip(above.widest, below.widest, strict=True)
        ]
        low, high = bootstrap(logs, lambda some: math.fsum(some) / len(some), repeats=500)
        mean = math.exp(math.fsum(logs) / len(logs))
        return within(name.format(*words), mean, allowed=_AT_LEAST,
                      interval=(math.exp(low), math.exp(high)), draws=len(logs))  # fmt: skip

    pre, post = runs[_PRE, 0], runs[_POST, 0]
    warm = runs[_POST, _WARMUP]
    between = ("pre-norm", "post-norm, both without warmup,")
    helped = ("post-norm with warmup", "post-norm without")
    measured = (ratio(pre, post, between), ratio(warm, post, helped))
    return Evidence(
        measured=measured,
        controls=(
            Control(
                name="post-norm in place of pre-norm",
                measured=(ratio(post, post, between),),
            ),
            Control(
                name="warmup of no steps",
                measured=(ratio(post, post, helped),),
            ),
        ),
        finding=(
            f"With 6 layers and no warmup pre-norm trains at rates {measured[0].value:.1f} times"
            f" those of post-norm; {_WARMUP} steps of warmup widen post-norm's range"
            f" {measured[1].value:.1f} times (half-decade steps, {len(seeds)} draws)."
        ),
        plots=(_losses(runs),),
    )


def _losses(runs: dict[tuple[str, int], Runs]) -> Plot:
    return Plot(
        title=f"Loss after {_STEPS} steps of Adam, 6 layers",
        across="learning rate",
        up="loss (nats)",
        places=RATES,
        curves=tuple(
            Curve(f"{placement}-norm, {f'{warmup} steps of warmup' if warmup else 'no warmup'}",
                  tuple(math.fsum(c) / len(c) for c in zip(*found.losses, strict=True)))
            for (placement, warmup), found in runs.items()
        ),
        log=(True, False),
    )  # fmt: skip
