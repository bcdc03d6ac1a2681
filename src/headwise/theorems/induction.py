"""Induction: looking up what came after the last copy of a token takes two layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headwise.circuits.labels import repeated_labels
from headwise.errors import HeadwiseError
from headwise.results.thresholds import THRESHOLDS
from headwise.theorems.induction_training import Trial, best_head, trial
from headwise.theorems.measured import Measured, bootstrap, within
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

__all__ = ["THEOREMS", "induction"]

_STEPS: Final = 160
_LEARNED: Final = (0.85, 1.0)
_NOT: Final = (0.0, 0.5)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _number(
    name: str, trials: list[Trial], of: Callable[[Trial], float], allowed: tuple[float, float]
) -> Measured:
    """The mean over models; of one model there is no interval: the number itself is judged."""
    values = [of(each) for each in trials]
    interval = bootstrap(values, _mean) if len(values) > 1 else None
    return within(name, _mean(values), allowed=allowed, interval=interval, draws=len(values))


def induction(effort: Effort) -> Evidence:
    """Train models of two layers and of one, with varying and with fixed periods."""
    seeds = [effort.seed + i for i in range(effort.pick(1, 5))]
    two = [trial(2, _STEPS, seed) for seed in seeds]
    one = [trial(1, _STEPS, seed) for seed in seeds]
    fixed = [trial(1, _STEPS, seed, period=11) for seed in seeds]
    fresh = [trial(2, 0, seed) for seed in seeds]
    head = THRESHOLDS["induction_heads"]

    def accuracy(name: str, trials: list[Trial], allowed: tuple[float, float]) -> Measured:
        return _number(f"accuracy, {name}", trials, lambda t: t.accuracy, allowed)

    def previous(trials: list[Trial]) -> Measured:
        name = "weight on the previous token, layer 0"
        return _number(name, trials, lambda t: t.previous[0], (0.5, 1.0))

    def looking(trials: list[Trial]) -> Measured:
        name = "weight on the token after the last copy, layer 1"
        return _number(name, trials, lambda t: t.induction[-1], (head, 1.0))

    measured = (
        accuracy("two layers", two, _LEARNED),
        accuracy("one layer", one, _NOT),
        previous(two),
        looking(two),
    )
    return Evidence(
        measured=measured,
        controls=(
            Control(
                name="one layer in place of two", measured=(accuracy("one layer", one, _LEARNED),)
            ),
            Control(
                name="a fixed period, one layer",
                measured=(accuracy("one layer, fixed period", fixed, _NOT),),
            ),
            Control(name="before training", measured=(previous(fresh), looking(fresh))),
        ),
        finding=(
            f"After {_STEPS} steps two layers predict {_percent(measured[0])} of the repeated"
            f" tokens, one layer {_percent(measured[1])}; layer 0 has a head with"
            f" {measured[2].value:.2f} of its weight on the previous token, layer 1 one with"
            f" {measured[3].value:.2f} on the token after the last copy. With a fixed period one"
            f" layer reaches {100 * _mean([t.accuracy for t in fixed]):.0f} %."
        ),
    )


def _percent(measured: Measured) -> str:
    return f"{100 * measured.value:.0f} %"


def _model(model: Trained) -> Evidence:
    if model.loaded.kind != "decoder":
        raise NotApplicable("it does not predict the next token from those before it")
    try:
        labels = repeated_labels(model.loaded)
    except HeadwiseError as error:
        raise NotApplicable(f"it cannot read repeated random tokens: {error}") from None
    matching, before = best_head(labels, "induction"), best_head(labels, "previous_token")
    cut = THRESHOLDS["induction_heads"]
    found = [layer for layer, score in enumerate(matching) if score > cut]
    if not found:
        raise NotApplicable(
            f"it has no induction head: the largest weight on the token after the last copy is"
            f" {max(matching):.2f}, and {cut} names one"
        )
    first = found[0]
    least = THRESHOLDS["previous_token_heads"]
    earlier = max(before[:first], default=0.0)
    name = f"largest weight on the previous token in the layers before layer {first}"
    copies = sum(int((layer.scores["induction"] > cut).sum()) for layer in labels.layers)
    best = max(range(len(matching)), key=lambda i: matching[i])
    return Evidence(
        measured=(
            within(name, earlier, allowed=(least, 1.0)),
            within("largest induction weight, layer 0", matching[0], allowed=(0.0, cut)),
        ),
        controls=(
            Control(
                name="the layer of the strongest induction head in place of layer 0",
                measured=(within("largest induction weight", matching[best], allowed=(0.0, cut)),),
            ),
        ),
        finding=(
            f"{copies} heads put more than {cut} of their weight on the token after the last copy,"
            f" the strongest {matching[best]:.2f} (layer {best}); the first stands in layer"
            f" {first}, and before it a head has {earlier:.2f} on the previous token. In layer 0"
            f" the most is {matching[0]:.2f}."
        ),
        plots=(
            Plot(
                title="Induction stands above previous-token heads",
                across="layer",
                up="largest weight of a head",
                places=tuple(float(i) for i in range(len(matching))),
                curves=(
                    Curve("token after the last copy", matching),
                    Curve("previous token", before),
                ),
            ),
        ),
    )


THEOREMS: Final = (
    Theorem(
        name="induction-needs-two-layers",
        title="Induction takes two layers",
        statement=(
            "To continue a sequence that repeats with an unknown period, a head must attend to the"
            " token after the last copy of the present one. The key there has to say what came"
            " before it, which a head of an earlier layer writes. One layer of attention cannot,"
            " two layers learn it soon."
        ),
        latex=(
            r"A^{(2)}_{i,\,j+1} \approx 1 \ \text{where}\ t_j = t_i, \qquad"
            r" A^{(1)}_{j+1,\,j} \approx 1"
        ),
        conditions=("the period varies between sequences", "attention is causal", "two layers"),
        source=(
            "Elhage et al. 2021, A Mathematical Framework for Transformer Circuits; Olsson et al."
            " 2022 (arXiv:2209.11895)"
        ),
        kind=Kind.REGULARITY,
        prediction=(
            "two layers: accuracy above 0.85, a previous-token head above 0.5 in layer 0 and an"
            " induction head above 0.4 in layer 1; one layer: accuracy below 0.5"
        ),
        estimator=(
            "decoders of width 64 with 4 heads and rotary positions, 160 steps on 32 tokens with"
            " periods of 8 to 16; heads scored on repeated random tokens"
        ),
        random=induction,
        model=_model,
        textbook=(
            Textbook(
                "a model that continues repeated text has induction heads",
                "with one fixed period a single layer does it, by a fixed offset: the period must"
                " vary",
            ),
        ),
        proof="induction-needs-two-layers",
    ),
)
