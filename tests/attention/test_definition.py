"""The definition of attention against loops by hand, and the heads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headwise.attention import definition
from headwise.attention.heads import group_size, merge_heads, share_kv_heads, split_heads
from headwise.attention.masks import Causal, Window
from headwise.errors import ShapeError
from tests.attention.problems import rand
from tests.tolerance import Tolerance, assert_close

DOUBLE = torch.float64


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> dict[str, Tensor]:
    """Attention in loops over batch, head, query and key; no tensor operation does any of it."""
    batch, heads, m, _ = q.shape
    n, d_value, group = k.shape[2], v.shape[3], heads // k.shape[1]
    out = torch.zeros(batch, heads, m, d_value, dtype=DOUBLE)
    a = torch.zeros(batch, heads, m, n, dtype=DOUBLE)
    lse = torch.full((batch, heads, m), -math.inf, dtype=DOUBLE)
    for b in range(batch):
        for h in range(heads):
            for i in range(m):
                row = {}
                for j in range(n):
                    if keep[i, j]:
                        s = scale * sum(
                            float(x) * float(y)
                            for x, y in zip(q[b, h, i], k[b, h // group, j], strict=True)
                        )
                        s = softcap * math.tanh(s / softcap) if softcap else s
                        row[j] = s + (float(bias[h, i, j]) if bias is not None else 0.0)
                extra = [float(sinks[h])] if sinks is not None else []
                if not row and not extra:
                    continue
                total = sum(math.exp(s) for s in [*row.values(), *extra])
                lse[b, h, i] = math.log(total)
                for j, s in row.items():
                    a[b, h, i, j] = math.exp(s) / total
                    for c in range(d_value):
                        out[b, h, i, c] += a[b, h, i, j] * v[b, h // group, j, c]
    return {"output": out, "weights": a, "log_sum_exp": lse}


@pytest.mark.parametrize("softcap", [None, 1.3])
@pytest.mark.parametrize("sinks", [None, rand(4, seed=7, dtype=DOUBLE)])
@pytest.mark.parametrize("bias", [None, rand(4, 5, 7, seed=8, dtype=DOUBLE)])
def test_the_definition_is_what_the_loops_compute(
    softcap: float | None, sinks: Tensor | None, bias: Tensor | None
) -> None:
    q, k, v = (rand(*s, seed=i, dtype=DOUBLE) for i, s in enumerate(
        [(2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 2)]))  # fmt: skip
    mask = Causal(-3) & Window(4)  # the first row is empty
    keep = mask.dense(0, 5, 7)
    want = by_hand(q, k, v, keep, 3**-0.5, softcap, bias, sinks)
    s = definition.scores(q, k, softcap=softcap, bias=bias)
    a = definition.weights(s, keep, sinks)
    t = Tolerance.of(q, k, None, bias, sinks)
    assert_close(a, want["weights"], t.weight)
    assert_close(definition.log_sum_exp(s, keep, sinks), want["log_sum_exp"], t.logit)
    assert_close(definition.output(a, v), want["output"], t.output(v))
    whole = definition.attention(q, k, v, mask=mask, softcap=softcap, bias=bias, sinks=sinks)
    assert_close(whole, want["output"], t.output(v))


def test_weights_are_a_distribution_and_outputs_lie_in_the_hull() -> None:
    q, k, v = (5 * rand(2, 3, 11, 5, seed=s) for s in (1, 2, 3))
    keep = Causal().dense(0, 11, 11)
    a = definition.weights(definition.scores(q, k), keep)
    t = Tolerance.of(q, k)
    assert a.min() >= 0
    assert_close(a.sum(-1), torch.ones(2, 3, 11), t.weight)
    o = definition.output(a, v)
    for i in range(11):
        lo, hi = v[:, :, : i + 1].amin(2), v[:, :, : i + 1].amax(2)
        assert (o[:, :, i] >= lo - t.output(v)).all()
        assert (o[:, :, i] <= hi + t.output(v)).all()


def test_entropy_is_between_zero_and_the_logarithm_of_the_keys() -> None:
    equal = definition.weights(torch.zeros(1, 1, 1, 13, dtype=DOUBLE))
    assert definition.entropy(equal).item() == pytest.approx(math.log(13), abs=1e-14)
    certain = torch.tensor([1.0, 0.0, 0.0])
    assert definition.entropy(certain).item() == 0.0


def test_heads_are_split_and_merged_in_order() -> None:
    x = rand(2, 5, 12)
    heads = split_heads(x, 3)
    assert heads.shape == (2, 3, 5, 4)
    assert torch.equal(heads[1, 2, 3], x[1, 3, 8:12])
    assert torch.equal(merge_heads(heads), x)


def test_neighbouring_query_heads_share_a_kv_head() -> None:
    kv = rand(1, 2, 3, 5)
    shared = share_kv_heads(kv, 6)
    for h in range(6):
        assert torch.equal(shared[:, h], kv[:, h // 3])


def test_heads_that_do_not_divide_are_refused() -> None:
    for make in (lambda: split_heads(rand(1, 2, 7), 3), lambda: group_size(5, 2),
                 lambda: group_size(4, 0), lambda: split_heads(rand(1, 2, 7), 0)):  # fmt: skip
        with pytest.raises(ShapeError):
            make()
    with pytest.raises(ShapeError):
        definition.scores(rand(1, 1, 2, 3), rand(1, 1, 2, 4))
