"""The accumulator of one attention module: empty, absorb, merge, finish.

Everything kept is a sum, a count, a minimum or a maximum, so that merging two accumulators is the
same as having measured all rows with one. Sums are float64. Bins of positions double in width when
positions go beyond the last bin; doubling adds neighbours, which loses nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from headwise.attention.statistics import Statistics
from headwise.errors import MeasurementError
from headwise.observation.growing import Growing
from headwise.observation.histogram import BINS, bins, quantiles
from headwise.observation.lasting import lasting
from headwise.observation.positions import PooledMap, Profile
from headwise.results.records import PROFILED, LayerRecord

__all__ = ["MEANS", "LayerAccumulator", "Place", "row_statistics"]

DEAD: Final = 1e-3
MEANS: Final = (
    *PROFILED, "entropy_without_sink_fraction", "dead_rows", "dead_rows_not_sink", "self_mass",
    "null_mass", "mean_logit", "log_sum_exp",
)  # fmt: skip
_EXTREMES: Final = ("max_logit", "min_logit", "max_abs_logit")
_KEPT: Final = (
    *(name for name in MEANS if not name.startswith("dead_rows")),
    "min_logit", "max_abs_logit", "sum_squares", "top_key", "var_logit",
)  # fmt: skip
_FEW: Final = 64
_AT_ONCE: Final = 1 << 20  # values reduced together: bounds the temporary memory


@dataclass(frozen=True, eq=False)
class Place:
    """Where measured rows and keys are. B sequences, R measured rows, n keys."""

    query_tokens: Tensor  # (B, R) indices in the query stream
    key_tokens: Tensor  # (B, n) indices in the key stream; -1: no token
    query_position: Tensor  # (R,) positions within the document
    key_position: int  # of key 0, within the document
    key_visible: Tensor  # (B, n) queries of the call that can see the key
    rows_total: int  # rows of the call, measured or not
    sink_keys: int
    sinks_visible: Tensor  # (B, R) of those, how many each row sees


class LayerAccumulator:
    """Sums over the rows of one attention module."""

    def __init__(
        self,
        *,
        module: str,
        role: str,
        number: int,
        heads: int,
        kv_heads: int,
        mask: str,
        scale: float,
        window: int | None,
        keep_rows: bool = False,
    ) -> None:
        self.module, self.role, self.number = module, role, number
        self.heads, self.kv_heads, self.mask = heads, kv_heads, mask
        self.scale, self.window, self.keep_rows = scale, window, keep_rows
        self.rows = self.rows_empty = self.rows_total = 0
        self.extremes = torch.full((3, heads), -math.inf, dtype=torch.float64)
        self.top = torch.full((2, heads), -1, dtype=torch.int64)  # query and key of max_logit
        self.histogram = lasting(len(PROFILED), heads, BINS, dtype=torch.int64)
        self.least = torch.full((len(PROFILED), heads), math.inf, dtype=torch.float64)
        self.most = torch.full((len(PROFILED), heads), -math.inf, dtype=torch.float64)
        self.profile = Profile(len(MEANS), heads)  # sums and counts of every mean, by position
        self.bands = Growing((heads,), torch.float64)
        self.received = Growing((heads,), torch.float64)
        self.received_visible = Growing((), torch.int64)
        self.pooled = PooledMap(heads)
        self.kept: dict[str, Growing] = {}
        self.non_finite: str | None = None

    def empty(self) -> LayerAccumulator:
        """An accumulator of the same module that has seen nothing."""
        return LayerAccumulator(
            module=self.module, role=self.role, number=self.number, heads=self.heads,
            kv_heads=self.kv_heads, mask=self.mask, scale=self.scale, window=self.window,
            keep_rows=self.keep_rows,
        )  # fmt: skip

    def absorb(self, statistics: Statistics, place: Place, heads: Tensor | None = None) -> None:
        """Add what one call of ``measure`` found; ``heads`` says which heads it was of."""
        chosen = slice(None) if heads is None else heads
        stack = row_statistics(statistics, place.sinks_visible, place.sink_keys).cpu()
        seen = (statistics.visible > 0).any(1).cpu()
        self.rows += seen.numel()
        self.rows_empty += int((~seen).sum())
        self.rows_total += place.rows_total
        self._reduce(stack, place, chosen)
        self._extremes(statistics, place, chosen)
        if statistics.bands is not None:
            self._grow(self.bands, statistics.bands.shape[-1])
            summed = statistics.bands.sum((0, 2), dtype=torch.float64)
            if bool(summed.isnan().any()):  # rows without a visible key
                summed = statistics.bands.nan_to_num(0.0).sum((0, 2), dtype=torch.float64)
            self.bands.view()[chosen, : summed.shape[-1]] += summed.cpu()
        self._receive(statistics.received, place, chosen)
        self._pool(statistics, place, seen.sum(0), chosen)
        if self.keep_rows:
            self._keep(stack, statistics, place, chosen)

    def mark(self, why: str) -> None:
        """The layer holds NaN or infinity: its values will be NaN, with this reason."""
        self.non_finite = self.non_finite or why

    def merge(self, other: LayerAccumulator, query_shift: int, key_shift: int) -> None:
        """Add all that another accumulator holds of the same module.

        The shifts are where the other's tokens begin in the joint streams.
        """
        if (self.module, self.role, self.heads) != (other.module, other.role, other.heads):
            raise MeasurementError(
                f"{self.module} ({self.role}, {self.heads} heads) cannot take in {other.module} "
                f"({other.role}, {other.heads} heads)",
                allowed="scans of one model",
            )
        for name in ("rows", "rows_empty", "rows_total", "histogram"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        better = other.extremes[0] > self.extremes[0]
        shifts = torch.tensor([[query_shift], [key_shift]])
        self.top = torch.where(better, other.top + shifts, self.top)
        self.extremes = torch.maximum(self.extremes, other.extremes)
        self.least = torch.minimum(self.least, other.least)
        self.most = torch.maximum(self.most, other.most)
        self.profile.merge(other.profile)
        self.pooled.merge(other.pooled)
        self._grow(self.bands, other.bands.length)
        self.bands.view()[:, : other.bands.length] += other.bands.view()
        for mine, theirs in (
            (self.received, other.received),
            (self.received_visible, other.received_visible),
        ):
            self._grow(mine, key_shift)
            mine.append(theirs.view())
        for name, theirs in other.kept.items():
            values = theirs.view()
            if name == "top_key":
                values = torch.where(values >= 0, values + key_shift, values)
            self._grow(self._kept(name), query_shift)
            self._kept(name).append(values)
        self.non_finite = self.non_finite or other.non_finite

    def finish(
        self, query_stream: str, key_stream: str, query_order: Tensor, key_order: Tensor
    ) -> LayerRecord:
        """The record, with tokens in the order of ``*_order`` (arrival index of each place)."""
        sums, counts = self.profile.totals()
        values = dict(zip(MEANS, sums / counts, strict=True))
        sign = torch.tensor([[1.0], [-1.0], [1.0]], dtype=torch.float64)
        seen = self.extremes.isfinite()
        nan = torch.full_like(self.extremes, math.nan)
        values |= zip(_EXTREMES, torch.where(seen, self.extremes * sign, nan), strict=True)
        for name, index, order in zip(
            ("max_logit_query", "max_logit_key"), self.top, (query_order, key_order), strict=True
        ):
            values[name] = _rank(index, order)
        spread = quantiles(self.histogram, self.least, self.most)
        profile, profile_rows, bin_width = self.profile.finish()
        pooled, pool_rows, pool_width = self.pooled.finish()
        received, received_visible = self.received, self.received_visible
        tokens = key_order.numel()
        for growing, length in (
            (received, tokens),
            (received_visible, tokens),
            *((g, query_order.numel()) for g in self.kept.values()),
        ):
            self._grow(growing, length)
        kept = {n: g.view()[:, query_order].clone() for n, g in self.kept.items()}
        if "top_key" in kept:
            kept["top_key"] = _rank(kept["top_key"], key_order)
        bands = self.bands.view() / counts[MEANS.index("top_weight")][:, None]
        profiles = dict(zip(PROFILED, profile[: len(PROFILED)], strict=True))
        if self.non_finite is not None:
            values = {name: torch.full_like(x, math.nan) for name, x in values.items()}
            profiles = {name: torch.full_like(x, math.nan) for name, x in profiles.items()}
            spread, pooled, bands = (x * math.nan for x in (spread, pooled, bands))
        hidden = math.nan if self.non_finite is not None else 1.0
        return LayerRecord(
            module=self.module, role=self.role, number=self.number, heads=self.heads,
            kv_heads=self.kv_heads, mask=self.mask, query_stream=query_stream,
            key_stream=key_stream, scale=self.scale, window=self.window, rows=self.rows,
            rows_empty=self.rows_empty, rows_total=self.rows_total, values=values,
            quantiles=dict(zip(PROFILED, spread, strict=True)), profiles=profiles,
            profile_rows=profile_rows, bin_width=bin_width, bands=bands,
            received=received.view()[:, key_order] * hidden,
            received_visible=received_visible.view()[key_order],
            pooled=pooled, pool_rows=pool_rows, pool_width=pool_width,
            row_values={n: x * hidden for n, x in kept.items()}, non_finite=self.non_finite,
        )  # fmt: skip

    def _reduce(self, stack: Tensor, place: Place, chosen: Any) -> None:
        """Sums, counts, histograms and profiles of ``statistic batch head row``."""
        rows = stack.shape[-1]
        step = max(1, _AT_ONCE // max(1, stack.numel() // rows))
        # Most often only the first rows of a document lack a statistic (they see too few keys).
        lacking = stack.sum((0, 2)).isnan().any(0).nonzero()
        few = 0 if not lacking.numel() else int(lacking[-1]) + 1
        start = 0
        while start < rows:
            stop = few if start < few <= _FEW else min(rows, start + step)
            part, position = stack[..., start:stop], place.query_position[start:stop]
            missing = part.isnan() if start < few else None
            clean = part if missing is None else part.masked_fill(missing, 0.0)
            self.profile.add(clean, missing, position, chosen)
            profiled = slice(0, len(PROFILED))
            self._count(clean[profiled], None if missing is None else missing[profiled], chosen)
            start = stop

    def _count(self, x: Tensor, missing: Tensor | None, chosen: Any) -> None:
        """Histograms, minima and maxima of ``statistic batch head row``."""
        least, most = x.amin((1, 3)).double(), x.amax((1, 3)).double()
        x = x.transpose(1, 2).flatten(2)
        statistics, heads = x.shape[:2]
        index = bins(x)
        index += torch.arange(statistics * heads).view(statistics, heads, 1) * BINS
        last = statistics * heads * BINS
        if missing is not None:
            missing = missing.transpose(1, 2).flatten(2)
            index.masked_fill_(missing, last)  # one bin beyond the last
            which = missing.flatten(1).any(1)
            nothing = x.new_tensor(math.inf)
            least[which] = torch.where(missing[which], nothing, x[which]).amin(-1).double()
            most[which] = torch.where(missing[which], -nothing, x[which]).amax(-1).double()
        self.least[:, chosen] = torch.minimum(self.least[:, chosen], least)
        self.most[:, chosen] = torch.maximum(self.most[:, chosen], most)
        counts = torch.bincount(index.flatten(), minlength=last + 1)[:-1]
        self.histogram[:, chosen] += counts.view(statistics, heads, BINS)

    def _extremes(self, s: Statistics, place: Place, chosen: Any) -> None:
        """Largest and smallest logits, and between which tokens the largest is."""
        rows = torch.stack((s.max_logit, -s.min_logit, s.max_abs_logit)).cpu()
        rows = rows.masked_fill(rows.isnan(), -math.inf).transpose(1, 2).flatten(2)
        best, where = rows.max(-1)
        best = best.double()
        queries = place.query_tokens.shape[-1]
        b = torch.div(where[0], queries, rounding_mode="floor")
        key = s.top_key.cpu().transpose(0, 1).flatten(1).gather(1, where[0][:, None])[:, 0]
        tokens = torch.stack(
            (place.query_tokens[b, where[0] % queries], place.key_tokens[b, key.clamp(min=0)])
        )
        old = self.extremes[:, chosen]
        self.top[:, chosen] = torch.where(best[0] > old[0], tokens, self.top[:, chosen])
        self.extremes[:, chosen] = torch.maximum(old, best)

    def _receive(self, received: Tensor, place: Place, chosen: Any) -> None:
        """Column sums, added to the tokens they are of."""
        received = received.cpu().double()
        for tokens, values, visible in zip(
            place.key_tokens, received, place.key_visible, strict=True
        ):
            real = tokens >= 0
            if not bool(real.all()):
                tokens, values, visible = tokens[real], values[:, real], visible[real]
            if not tokens.numel():
                continue
            first, last = int(tokens[0]), int(tokens.max())
            self._grow(self.received, last + 1)
            self._grow(self.received_visible, last + 1)
            where: Any = tokens
            if bool((tokens.diff() == 1).all()):
                where = slice(first, last + 1)
            rows = chosen[:, None] if isinstance(chosen, Tensor) and where is tokens else chosen
            self.received.view()[rows, where] += values  # a token is one key at most
            self.received_visible.view()[where] += visible

    def _pool(self, s: Statistics, place: Place, seen: Tensor, chosen: Any) -> None:
        """The pooled map. Its width is the one ``measure`` was asked for."""
        if s.pooled is None:
            return
        first_key = place.key_position // self.pooled.width
        summed = s.pooled.sum(0, dtype=torch.float64).cpu()
        first = (s.pooled_first + first_key, first_key)
        self.pooled.add(summed, first, place.query_position, seen, chosen)

    def _keep(self, stack: Tensor, s: Statistics, place: Place, chosen: Any) -> None:
        """Every row's statistics, at the row's token."""
        rows = dict(zip(MEANS, stack, strict=True))
        for name in ("min_logit", "max_abs_logit", "sum_squares", "var_logit"):
            rows[name] = getattr(s, name).cpu()
        key = s.top_key.cpu()
        whole = place.key_tokens[:, None].expand(-1, key.shape[1], -1)
        rows["top_key"] = torch.where(key >= 0, whole.gather(2, key.clamp(min=0)), -1)
        tokens = place.query_tokens.flatten()
        for name in _KEPT:
            growing = self._kept(name)
            self._grow(growing, int(tokens.max()) + 1)
            values = rows[name].double().transpose(0, 1).flatten(1)
            if isinstance(chosen, slice):
                growing.view()[:, tokens] = values
            else:
                growing.view()[chosen[:, None], tokens[None]] = values

    def _kept(self, name: str) -> Growing:
        return self.kept.setdefault(name, Growing((self.heads,), torch.float64, fill=math.nan))

    @staticmethod
    def _grow(growing: Growing, length: int) -> None:
        if growing.length < length:
            growing.resize(length)


def row_statistics(s: Statistics, sinks_visible: Tensor, sink_keys: int) -> Tensor:
    """Every statistic that is averaged over rows: ``statistic batch head row``, NaN where a row has
    none. The order is that of the accumulator's sums.

    Shares of saturated rows are of the rows with two or more visible keys; fractions of an entropy
    need two or more keys to be between 0 and 1.
    """
    nan = s.entropy.new_tensor(math.nan)
    several = s.visible >= 2
    visible = s.visible.to(s.entropy.dtype)
    outside = visible - sinks_visible[:, None].to(visible)
    dead = 1 - s.top_weight < DEAD
    rows = {
        "entropy": s.entropy,
        "entropy_fraction": torch.where(several, s.entropy / visible.log(), nan),
        "entropy_without_sink": s.entropy_without_sink,
        "entropy_without_sink_fraction": torch.where(
            outside >= 2, s.entropy_without_sink / outside.log(), nan
        ),
        "effective_keys": 1 / s.sum_squares,
        "jacobian_trace": 1 - s.sum_squares,
        "top_weight": s.top_weight,
        "distance": s.distance,
        "sink_mass": s.sink_mass,
        "previous_mass": s.previous_mass,
        "max_logit": torch.where(s.visible > 0, s.max_logit, nan),
        "logit_std": s.var_logit.clamp(min=0).sqrt(),
        "dead_rows": torch.where(several, dead.to(nan.dtype), nan),
        "dead_rows_not_sink": torch.where(
            several, (dead & (s.top_key >= sink_keys)).to(nan.dtype), nan
        ),
        "self_mass": s.self_mass,
        "null_mass": s.null_mass,
        "mean_logit": s.mean_logit,
        "log_sum_exp": torch.where(s.visible > 0, s.log_sum_exp, nan),
    }
    return torch.stack([rows[name] for name in MEANS])


def _rank(index: Tensor, order: Tensor) -> Tensor:
    """Arrival indices as places in ``order``; NaN where there is none."""
    rank = torch.empty(order.numel(), dtype=torch.float64)
    rank[order] = torch.arange(order.numel(), dtype=torch.float64)
    known = index >= 0
    place = rank[index.long().clamp(min=0)] if order.numel() else index.double()
    return torch.where(known, place, torch.full_like(place, math.nan))
