"""What alarms look at: one function for each ``quantity`` of ``alarms.toml``.

A function gets its rule and the last records, and gives a sign for each place where the threshold
is passed in the newest record. Whether a sign lasts long enough to be an alarm is not its matter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from headwise.monitoring.alarm_rules import AlarmRule
from headwise.monitoring.history import History, Numbers, block_of, straight, typical

__all__ = ["QUANTITIES", "Sign"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One place where a threshold is passed.

    Attributes:
        key: what the alarm is given once for: a module, a block, or "" for the model.
        count: how many places pass it; ``forecast``: the step at which a trend crosses.
    """

    value: float
    key: str = ""
    module: str = ""
    head: int | None = None
    count: int = 1
    forecast: int | None = None


Quantity = Callable[[AlarmRule, History], list[Sign]]


def non_finite(rule: AlarmRule, history: History) -> list[Sign]:
    """The first tensor with NaN or infinity, or else the loss."""
    record = history.last
    named = record.non_finite
    if not named and not math.isfinite(record.values.get("loss", 0.0)):
        named = "the loss"
    return [Sign(value=1.0, module=named)] if named else []


def max_logit(rule: AlarmRule, history: History) -> list[Sign]:
    """The largest logit of each module, where it reaches the threshold."""
    now = history.heads("max_logit")[-1]
    return _by_module(history, now, now >= rule.threshold)


def logit_jump(rule: AlarmRule, history: History) -> list[Sign]:
    """Heads whose largest logit is many times what it was."""
    table = history.heads("max_logit")
    earlier = _earlier(table)
    ratio = table[-1] / np.where(earlier > 0, earlier, math.nan)
    return _by_module(
        history, ratio, (ratio >= rule.threshold) & (table[-1] >= rule.options["least"])
    )


def logit_growth(rule: AlarmRule, history: History) -> list[Sign]:
    """Heads whose ln max logit rises along a line that soon crosses ln threshold."""
    need = int(rule.options["records"])
    if len(history.records) < need:
        return []
    steps, table = history.steps[-need:], history.heads("max_logit")[-need:]
    now = table[-1]
    logs = np.log(np.where(table > 0, table, math.nan))
    slope, fit = straight(steps, logs)
    late, _ = straight(steps[need // 2 :], logs[need // 2 :])
    with np.errstate(divide="ignore", invalid="ignore"):
        ahead = (math.log(rule.threshold) - logs[-1]) / slope
    clear = (slope > 0) & (fit >= rule.options["fit"]) & (late >= rule.options["slowing"] * slope)
    near = (now >= rule.options["least"]) & (now < rule.threshold)
    soon = ahead <= rule.options["horizon"] * (steps[-1] - steps[0])
    grown = np.exp(slope * (steps[-1] - steps[0]))
    found = []
    for sign in _by_module(history, now, clear & near & soon):
        at = history.places.index((sign.module, sign.head or 0))
        crossing = math.ceil(steps[-1] + ahead[at])
        found.append(replace(sign, value=float(grown[at]), forecast=crossing))
    return found


def entropy_collapse(rule: AlarmRule, history: History) -> list[Sign]:
    """The share of heads whose entropy outside the sink is low and has fallen to it."""
    if len(history.records) < rule.options["records"]:
        return []
    table = history.heads("entropy_without_sink_fraction")
    low, now = rule.options["low"], table[-1]
    peak = history.peaks["entropy_without_sink_fraction"]
    fallen = (now < rule.options["fallen"] * _earlier(table)) & (peak >= 2 * low)
    return _share(rule, history, -now, (now < low) & fallen)


def dead_rows(rule: AlarmRule, history: History) -> list[Sign]:
    """The share of heads most of whose rows have died, outside the sink."""
    if len(history.records) < rule.options["records"]:
        return []
    table = history.heads("dead_rows_not_sink")
    now = table[-1]
    risen = now > _earlier(table) + rule.options["risen"]
    return _share(rule, history, now, (now > rule.options["most"]) & risen)


def vanishing_gradient(rule: AlarmRule, history: History) -> list[Sign]:
    """Blocks of which half the weights or more have a gradient far below that of the others.

    Queries and keys alone may: where attention is still uniform they hardly matter to the loss.
    """
    found, compared = [], Counter[str]()
    for name, own, lower, _, pair in _against(history):
        compared[block_of(name)] += 1
        if own < rule.threshold * lower and not (pair and _jumped(history, pair)):
            found.append((own / lower, name))
    signs = _by_block(found, lowest=True)
    return [sign for sign in signs if 2 * sign.count >= compared[sign.key]]


def exploding_gradient(rule: AlarmRule, history: History) -> list[Sign]:
    """Blocks with weights whose gradient is far above that of the others, and half of all."""
    found, whole = [], _total(history.last.weights)
    for name, own, _, upper, pair in _against(history):
        large = own > rule.threshold * upper > 0 and own > whole / 2
        if large and (not pair or _jumped(history, name)):
            found.append((own / upper, name))
    return _by_block(found, lowest=False)


def gradient_spike(rule: AlarmRule, history: History) -> list[Sign]:
    """The norm of the whole gradient against the median of the records before."""
    totals = [_total(record.weights) for record in history.records]
    ratio = totals[-1] / (typical(totals[:-1]) or math.nan)
    if not ratio > rule.threshold:
        return []
    gradients = {n: f.get("gradient", math.nan) for n, f in history.last.weights.items()}
    most = max(gradients, key=lambda n: -math.inf if math.isnan(gradients[n]) else gradients[n])
    return [Sign(value=ratio, module=most)]


def gradient_near_eps(rule: AlarmRule, history: History) -> list[Sign]:
    """Weights whose gradient has an rms, above zero, below Adam's eps."""
    found = []
    for name in history.matrices():
        size = history.sizes.get(name, 0)
        gradient = history.last.weights[name].get("gradient", math.nan)
        if size and 0 < gradient < rule.threshold * math.sqrt(size):
            found.append((gradient / math.sqrt(size), name))
    return [_one(min(found), len(found))] if found else []


def update_too_large(rule: AlarmRule, history: History) -> list[Sign]:
    """Weights that one step changes by too large a part of themselves."""
    found = [(ratio, name) for ratio, name in _updates(history) if ratio > rule.threshold]
    return [_one(max(found), len(found))] if found else []


def update_too_small(rule: AlarmRule, history: History) -> list[Sign]:
    """Weights of blocks that hardly change, where most of them do (else it is the rate)."""
    ratios = [(ratio, name) for ratio, name in _updates(history) if block_of(name) != name]
    if not typical([ratio for ratio, _ in ratios]) >= rule.threshold:
        return []
    found = [(ratio, name) for ratio, name in ratios if ratio < rule.threshold]
    return [_one(min(found), len(found))] if found else []


def stream_growth(rule: AlarmRule, history: History) -> list[Sign]:
    """Blocks after which the stream is many times what it was some records ago."""
    found = []
    for block in history.last.stream:
        rms = history.rms(block)
        ratio = rms[-1] / (typical(rms[: max(1, len(rms) // 2)]) or math.nan)
        if ratio > rule.threshold and rms[-1] > rule.options["least"]:
            found.append(Sign(value=float(ratio), key=block, module=block))
    return found


QUANTITIES: Final[dict[str, Quantity]] = {
    each.__name__: each
    for each in (
        non_finite, max_logit, logit_jump, logit_growth, entropy_collapse, dead_rows,
        vanishing_gradient, exploding_gradient, gradient_spike, gradient_near_eps,
        update_too_large, update_too_small, stream_growth,
    )
}  # fmt: skip


def _by_module(history: History, values: Numbers, passed: Numbers) -> list[Sign]:
    """One sign for each module: its head with the largest value among those that pass."""
    best: dict[str, tuple[float, int, int]] = {}
    for at in np.flatnonzero(passed):
        module, head = history.places[at]
        value, where, count = best.get(module, (-math.inf, 0, 0))
        if values[at] > value:
            value, where = float(values[at]), head
        best[module] = value, where, count + 1
    return [
        Sign(value=value, key=module, module=module, head=head, count=count)
        for module, (value, head, count) in best.items()
    ]


def _share(rule: AlarmRule, history: History, extent: Numbers, passed: Numbers) -> list[Sign]:
    """One sign for the model where enough heads pass, at the one that goes furthest."""
    count, seen = int(passed.sum()), int(np.isfinite(extent).sum())
    if count < rule.options["least"] or not count / seen > rule.threshold:
        return []
    module, head = history.places[int(np.argmax(np.where(passed, extent, -math.inf)))]
    return [Sign(value=count / seen, module=module, head=head, count=count)]


def _earlier(table: Numbers) -> Numbers:
    """By place, the median of the older half of the records; NaN where nothing was seen."""
    older = table[: max(1, len(table) // 2)]
    seen = np.isfinite(older).any(0)
    found = np.full(older.shape[1], math.nan)
    if seen.any():
        found[seen] = np.nanmedian(older[:, seen], axis=0)
    return found


def _against(history: History) -> list[tuple[str, float, float, float, str]]:
    """(weight, its gradient, lower and upper median of the others, the other one of a pair).

    Lower and upper, because of two others one may itself have vanished or exploded.
    """
    found = []
    for names in history.groups():
        gradients = [(history.last.weights[n].get("gradient", math.nan), n) for n in names]
        seen = sorted(pair for pair in gradients if math.isfinite(pair[0]))
        count = len(seen) - 1  # of the others
        for at, (own, name) in enumerate(seen if count else []):
            lower, upper = (seen[i + (i >= at)][0] for i in ((count - 1) // 2, count // 2))
            other = seen[1 - at][1] if len(names) == 2 else ""
            found.append((name, own, lower, upper, other))
    return found


def _jumped(history: History, name: str) -> bool:
    """Whether the gradient of a weight is ten times what it was: of two, which one is to blame."""
    values = history.weight(name, "gradient")
    return bool(values[-1] > 10 * typical(values[: max(1, len(values) // 2)]))


def _by_block(found: list[tuple[float, str]], *, lowest: bool) -> list[Sign]:
    blocks: dict[str, list[tuple[float, str]]] = {}
    for ratio, name in found:
        blocks.setdefault(block_of(name), []).append((ratio, name))
    signs = []
    for block, each in blocks.items():
        ratio, name = min(each) if lowest else max(each)
        signs.append(Sign(value=ratio, key=block, module=name, count=len(each)))
    return signs


def _updates(history: History) -> list[tuple[float, str]]:
    """(update / weight, name), where both are known and the weight is not zero."""
    found = []
    for name in history.matrices():
        figures = history.last.weights[name]
        update, weight = figures.get("update", math.nan), figures.get("weight", math.nan)
        if weight > 0 and math.isfinite(update / weight):
            found.append((update / weight, name))
    return found


def _total(weights: dict[str, dict[str, float]]) -> float:
    squares = [figures.get("gradient", math.nan) ** 2 for figures in weights.values()]
    seen = [square for square in squares if not math.isnan(square)]
    return math.sqrt(sum(seen)) if seen else math.nan


def _one(found: tuple[float, str], count: int) -> Sign:
    value, name = found
    return Sign(value=value, module=name, count=count)
