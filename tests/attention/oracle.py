"""Every statistic from the whole matrix in float64: the reference that ``measure`` is held to.

Written from what each number means, with the dense definition of attention and nothing else.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.attention import definition
from headwise.attention.statistics import Statistics
from tests.attention.problems import Problem
from tests.tolerance import Tolerance, assert_close

NAN = math.nan
PER_ROW = (
    "log_sum_exp",
    "max_logit",
    "min_logit",
    "max_abs_logit",
    "mean_logit",
    "var_logit",
    "entropy",
    "entropy_without_sink",
    "sum_squares",
    "top_weight",
    "distance",
    "sink_mass",
    "self_mass",
    "previous_mass",
    "null_mass",
)


def oracle(
    p: Problem,
    *,
    query_mask: Tensor | None = None,
    rows: Tensor | None = None,
    sink_keys: int = 1,
    pool: int | None = None,
    relative: bool = True,
) -> dict[str, Tensor | None]:
    """All statistics of problem ``p``; ``rows`` holds ascending row indices."""
    x = p.double()
    (b, _, m, _), n = x.q.shape, x.k.shape[2]
    offset = n - m if p.offset is None else p.offset
    keep = torch.ones(b, 1, m, n, dtype=torch.bool)
    if p.mask is not None:
        keep = torch.stack([p.mask.dense(i, m, n, offset) for i in range(b)])[:, None]
    s = definition.scores(x.q, x.k, scale=x.scale, softcap=x.softcap, bias=x.bias)
    keep = keep & (s != -math.inf)
    a = definition.weights(s, keep, x.sinks)
    lse = definition.log_sum_exp(s, keep, x.sinks)
    every = rows is None
    rows = torch.arange(m) if rows is None else rows
    position = rows + offset
    s, a, keep, lse = s[:, :, rows], a[:, :, rows], keep[:, :, rows].expand_as(s[:, :, rows]), lse[
        :, :, rows
    ]  # fmt: skip
    count = keep.sum(-1)
    drop = count == 0
    if query_mask is not None:
        drop = drop | ~query_mask[:, None, rows]
    apart = (position[:, None] - torch.arange(n)).abs()
    zero = torch.zeros((), dtype=torch.float64)

    def shown(values: Tensor) -> Tensor:
        return torch.where(drop, torch.full_like(values, NAN), values)

    def side(shift: int) -> Tensor:
        return (a * (position[:, None] - shift == torch.arange(n))).sum(-1)

    mean = torch.where(keep, s, zero).sum(-1) / count
    var = torch.where(keep, (s - mean[..., None]).square(), zero).sum(-1) / count
    out: dict[str, Tensor | None] = {
        "max_logit": torch.where(keep, s, -math.inf).amax(-1),
        "min_logit": torch.where(keep, s, math.inf).amin(-1),
        "max_abs_logit": torch.where(keep, s.abs(), -math.inf).amax(-1),
        "mean_logit": mean,
        "var_logit": var,
        "entropy": definition.entropy(a),
        "entropy_without_sink": _entropy_of_rest(s, keep, sink_keys),
        "sum_squares": a.square().sum(-1),
        "top_weight": a.amax(-1),
        "distance": (a * apart).sum(-1) if relative else torch.full_like(mean, NAN),
        "sink_mass": a[..., :sink_keys].sum(-1),
        "self_mass": side(0) if relative else torch.full_like(mean, NAN),
        "previous_mass": side(1) if relative else torch.full_like(mean, NAN),
        "null_mass": torch.zeros_like(mean)
        if x.sinks is None
        else torch.exp(x.sinks[:, None] - lse),
    }
    out = {name: shown(value) for name, value in out.items() if value is not None}
    empty_only = count == 0
    out["log_sum_exp"] = torch.where(drop & ~empty_only, torch.full_like(lse, NAN), lse)
    feeds = torch.ones(b, len(rows), dtype=torch.bool)
    if query_mask is not None:
        feeds = query_mask[:, rows]
    fed = a * feeds[:, None, :, None]
    out["received"] = fed.sum(2) * (m / len(rows))
    out["pooled"] = None if pool is None else _pooled(fed, position, pool)
    out["bands"] = None
    if relative:
        edge = [0] + [2**i for i in range(40)]
        mass = [(a * ((apart >= lo) & (apart < hi))).sum(-1) for lo, hi in zip(edge, edge[1:])]  # noqa: B905, RUF007
        out["bands"] = torch.stack([shown(x) for x in mass], -1)
    out["visible"] = count
    out["drop"] = drop
    out["logits"] = torch.where(keep, s, -math.inf)
    out["rows"] = rows
    out["output"] = definition.output(a, x.v) if every else None
    return out


def _entropy_of_rest(s: Tensor, keep: Tensor, sink_keys: int) -> Tensor:
    """Entropy of the softmax over the visible keys that are not sinks; NaN without any."""
    rest = keep.clone()
    rest[..., :sink_keys] = False
    h = definition.entropy(definition.weights(s, rest))
    return torch.where(rest.any(-1), h, torch.full_like(h, NAN))


def _pooled(a: Tensor, position: Tensor, pool: int) -> Tensor:
    """Sums of A over blocks of ``pool`` positions by ``pool`` keys, from the first row's block."""
    row = position.div(pool, rounding_mode="floor")
    row = row - row[0]
    column = torch.arange(a.shape[-1]) // pool
    left = torch.nn.functional.one_hot(row).double()
    right = torch.nn.functional.one_hot(column).double()
    return left.T @ a @ right


def check(got: Statistics, want: dict[str, Tensor | None], p: Problem) -> None:
    """Hold ``got`` to the reference, each statistic within its derived bound."""
    t = Tolerance.of(p.q, p.k, p.scale, p.bias, p.sinks)
    n = p.k.shape[2]
    offset = n - p.q.shape[2] if p.offset is None else p.offset
    furthest = max(n, abs(offset), abs(offset + p.q.shape[2])) + n
    bounds = {
        "log_sum_exp": (t.logit, 0.0),
        "max_logit": (t.logit, 0.0),
        "min_logit": (t.logit, 0.0),
        "max_abs_logit": (t.logit, 0.0),
        "mean_logit": (t.logit, 0.0),
        "var_logit": (t.variance, 0.0),
        "entropy": (t.entropy, 0.0),
        "entropy_without_sink": (t.entropy, 0.0),
        "sum_squares": (t.square, 0.0),
        "distance": (t.distance(furthest), 0.0),
    }
    for name in PER_ROW:
        absolute, relative = bounds.get(name, (t.weight, 0.0))
        _named(name, getattr(got, name), want[name], absolute, relative)
    _named("received", got.received, want["received"], t.weight, t.weight)
    for name in ("pooled", "bands"):
        x, y = getattr(got, name), want[name]
        assert (x is None) == (y is None), f"{name} is {'missing' if x is None else 'unasked'}"
        if x is not None and y is not None:
            if name == "bands":
                assert x.shape[-1] <= y.shape[-1]
                assert not y[..., x.shape[-1] :].nan_to_num(0.0).any(), "mass beyond the last band"
                y = y[..., : x.shape[-1]]
            _named(name, x, y, t.weight, t.weight)
    _exact(got, want)
    _top_key(got, want, t)
    assert (got.output is None) == (want["output"] is None), "output"
    if got.output is not None and want["output"] is not None:
        assert got.output.dtype == p.v.dtype
        assert_close(got.output, want["output"], t.output(p.v))


def _named(name: str, got: Tensor, want: Tensor | None, absolute: float, relative: float) -> None:
    assert want is not None
    try:
        assert_close(got, want, absolute, relative)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


def _exact(got: Statistics, want: dict[str, Tensor | None]) -> None:
    visible, rows = want["visible"], want["rows"]
    assert visible is not None
    assert rows is not None
    seen = got.visible if got.visible.dim() == 3 else got.visible[:, None].expand_as(visible)
    assert torch.equal(seen, visible), "visible"
    assert torch.equal(got.rows.cpu(), rows), "rows"


def _top_key(got: Statistics, want: dict[str, Tensor | None], t: Tolerance) -> None:
    """Its logit is the largest, up to rounding (ties may go to any of them)."""
    logits, drop, best = want["logits"], want["drop"], want["max_logit"]
    assert logits is not None
    assert drop is not None
    assert best is not None
    assert torch.equal(got.top_key < 0, drop), "top_key: -1 exactly where nothing is measured"
    chosen = logits.gather(-1, got.top_key.clamp(min=0)[..., None]).squeeze(-1)
    assert bool((chosen >= best - 2 * t.logit)[~drop].all()), "top_key is not the largest logit"
