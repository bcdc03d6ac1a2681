"""Streaming attention against the dense definition in float64, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headwise.attention import definition, problem, state
from headwise.attention.bias import as_function
from headwise.attention.heads import share_kv_heads
from headwise.attention.masks import (
    Band,
    Causal,
    Documents,
    Everything,
    KeyPadding,
    Mask,
    Predicate,
    Prefix,
    Window,
)
from headwise.attention.streaming import attend, attend_with_lse
from headwise.errors import OptionError, ShapeError
from tests.attention.problems import Problem, problems, rand
from tests.tolerance import Tolerance, assert_close

FLOATS = [torch.float32, torch.float64]


@pytest.fixture
def ragged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small odd tiles, so that small problems meet every edge."""
    monkeypatch.setattr(problem.Problem, "__init__", _tiling(13, 5))


_plain_init = problem.Problem.__init__


def _tiling(rows: int, width: int):  # type: ignore[no-untyped-def]
    def init(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        _plain_init(self, *args, **{**kwargs, "rows": rows, "width": width})

    return init


def reference(p: Problem) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the dense definition in float64."""
    x = p.double()
    keep = visible(p)
    s = definition.scores(x.q, x.k, scale=x.scale, softcap=x.softcap, bias=x.bias)
    a = definition.weights(s, keep, x.sinks)
    return definition.output(a, x.v), definition.log_sum_exp(s, keep, x.sinks)


def visible(p: Problem) -> Tensor | None:
    if p.mask is None:
        return None
    m, n = p.q.shape[2], p.k.shape[2]
    return torch.stack([p.mask.dense(b, m, n, p.offset) for b in range(len(p.q))])[:, None]


def check_forward(p: Problem) -> None:
    tolerance = Tolerance.of(p.q, p.k, p.scale, p.bias, p.sinks)
    want, want_lse = reference(p)
    for options in (p.options, p.tiled_options):
        got, lse = attend_with_lse(p.q, p.k, p.v, **options)
        assert got.dtype == p.q.dtype
        assert_close(got, want, tolerance.output(p.v))
        assert_close(lse, want_lse, tolerance.logit)


@pytest.mark.usefixtures("ragged")
@given(problems())
def test_forward_is_the_definition(p: Problem) -> None:
    check_forward(p)


@pytest.mark.usefixtures("ragged")
@settings(max_examples=25)
@given(problems(dtype=torch.float64))
def test_forward_is_the_definition_in_float64(p: Problem) -> None:
    check_forward(p)


def gradients(p: Problem, run, up: Tensor, up_lse: Tensor) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """Gradients of Σ up · output + Σ up_lse · lse over rows that see something."""
    leaves = {
        name: x.detach().clone().requires_grad_()
        for name in ("q", "k", "v", "bias", "sinks")
        if (x := getattr(p, name)) is not None
    }
    output, lse = run(leaves)
    loss = (output * up).sum() + torch.where(torch.isfinite(lse), lse * up_lse, 0.0).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def check_backward(p: Problem) -> None:
    out, lse = reference(p)
    up, up_lse = rand(*out.shape, seed=11, dtype=p.q.dtype), rand(*lse.shape, seed=12)
    up_lse = up_lse.to(p.q.dtype)
    options = {n: x for n, x in p.options.items() if n not in ("bias", "sinks")}

    def ours(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        extra = {"bias": x.get("bias"), "sinks": x.get("sinks")}
        return attend_with_lse(x["q"], x["k"], x["v"], **options, **extra)

    def dense(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        s = definition.scores(x["q"], x["k"], scale=p.scale, softcap=p.softcap, bias=x.get("bias"))
        keep = visible(p)
        s = s if keep is None else s.masked_fill(~keep, -math.inf)
        # An empty row of logits would give NaN gradients through softmax: its logits are replaced.
        empty = (s == -math.inf).all(-1, keepdim=True)
        if "sinks" in x:
            column = x["sinks"].view(1, -1, 1, 1).expand(*s.shape[:-1], 1)
            s = torch.cat((s, column), -1)
            a = torch.softmax(s, -1)[..., :-1]
            return a @ share_kv_heads(x["v"], a.shape[1]), torch.logsumexp(s, -1)
        s = s.masked_fill(empty, 0.0)
        a = torch.softmax(s, -1).masked_fill(empty, 0.0)
        lse = torch.logsumexp(s, -1).masked_fill(empty.squeeze(-1), -math.inf)
        return a @ share_kv_heads(x["v"], a.shape[1]), lse

    got = gradients(p, ours, up, up_lse)
    want = gradients(p.double(), dense, up.double(), up_lse.double())
    tolerance = Tolerance.of(p.q, p.k, p.scale, p.bias, p.sinks)
    upstream = float(up.norm(dim=-1).max() + up_lse.abs().max())
    bounds = tolerance.gradients(p.q, p.k, p.v, upstream, p.scale)
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.dtype == p.q.dtype
        assert_close(x, want[name], bounds[name])


@pytest.mark.usefixtures("ragged")
@given(problems())
def test_backward_is_the_gradient_of_the_definition(p: Problem) -> None:
    check_backward(p)


@pytest.mark.usefixtures("ragged")
@settings(max_examples=25)
@given(problems(dtype=torch.float64))
def test_backward_is_the_gradient_of_the_definition_in_float64(p: Problem) -> None:
    check_backward(p)


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(3), Causal(-2), Prefix(2)])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_gradcheck(mask: Mask | None, softcap: float | None) -> None:
    def x(*shape: int, seed: int) -> Tensor:
        return rand(*shape, seed=seed, dtype=torch.float64).requires_grad_()

    q, k, v = x(2, 4, 5, 3, seed=1), x(2, 2, 7, 3, seed=2), x(2, 2, 7, 2, seed=3)
    bias, sinks = x(4, 1, 7, seed=4), x(4, seed=5)

    def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        *qkv, b, s = inputs
        return attend_with_lse(*qkv, mask=mask, softcap=softcap, bias=b, sinks=s)

    torch.autograd.gradcheck(run, (q, k, v, bias, sinks))


@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("width", [1, 6, 1000])
def test_results_do_not_depend_on_the_tiling(
    rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problem.Problem, "__init__", _tiling(rows, width))
    p = Problem(
        rand(1, 4, 29, 5, seed=1),
        rand(1, 2, 23, 5, seed=2),
        rand(1, 2, 23, 3, seed=3),
        mask=(Causal() & Window(11)) | Prefix(2),
        softcap=9.0,
        bias=rand(4, 29, 23, seed=4),
        sinks=rand(4, seed=5),
    )
    check_forward(p)
    check_backward(p)


def test_default_tiles_with_several_strips_and_tiles() -> None:
    p = Problem(
        rand(1, 2, 601, 7, seed=1),
        rand(1, 1, 1201, 7, seed=2),
        rand(1, 1, 1201, 5, seed=3),
        mask=Causal(),
    )
    check_forward(p)
    check_backward(p)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(dtype: torch.dtype) -> None:
    p = Problem(
        rand(2, 4, 37, 8, seed=1, dtype=dtype),
        rand(2, 2, 37, 8, seed=2, dtype=dtype),
        rand(2, 2, 37, 5, seed=3, dtype=dtype),
        mask=Causal(),
    )
    check_forward(p)
    q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k, p.v))
    attend(q, k, v, mask=p.mask).float().sum().backward()
    w = [x.detach().double().requires_grad_() for x in (p.q, p.k, p.v)]
    definition.attention(*w, mask=p.mask).sum().backward()
    tolerance = Tolerance.of(p.q, p.k)
    bounds = tolerance.gradients(p.q, p.k, p.v, math.sqrt(5))
    for name, x, y in zip("qkv", (q, k, v), w, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert x.grad.dtype == dtype
        rounding = torch.finfo(dtype).eps / 2
        assert_close(x.grad, y.grad, bounds[name] + torch.finfo(dtype).tiny, rounding)


def test_autocast_does_not_lower_the_precision() -> None:
    q, k, v = (rand(1, 2, 29, 5, seed=s).requires_grad_() for s in (1, 2, 3))
    plain = attend(q, k, v, mask=Causal())
    want = torch.autograd.grad(plain.sum(), (q, k, v))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = attend(q, k, v, mask=Causal())
        gradients = torch.autograd.grad(got.sum(), (q, k, v))
    assert torch.equal(got, plain)
    assert all(torch.equal(a, b) for a, b in zip(gradients, want, strict=True))


def test_a_row_with_no_visible_key_is_zero_and_sends_no_gradient() -> None:
    q, k, v = (rand(1, 1, n, 3, seed=s).requires_grad_() for s, n in enumerate((7, 5, 5)))
    out, lse = attend_with_lse(q, k, v, mask=Causal())  # m > n: the first two rows are empty
    assert torch.equal(out[0, 0, :2], torch.zeros(2, 3))
    assert torch.equal(lse[0, 0, :2], torch.full((2,), -math.inf))
    up = torch.ones_like(out)
    up[:, :, :2] = math.nan  # whatever comes from above
    out.backward(up)
    assert q.grad is not None
    assert torch.equal(q.grad[0, 0, :2], torch.zeros(2, 3))
    full = torch.autograd.grad(attend(q[:, :, 2:], k, v, mask=Causal()).sum(), (k, v))
    bounds = Tolerance.of(q, k).gradients(q, k, v, math.sqrt(3))
    for x, want, name in ((k, full[0], "k"), (v, full[1], "v")):
        assert x.grad is not None
        assert_close(x.grad, want, bounds[name])


@pytest.mark.usefixtures("ragged")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_what_is_hidden_does_not_leak(bad: float, softcap: float | None) -> None:
    keep = torch.ones(1, 17, dtype=torch.bool)
    keep[0, [3, 8]] = False
    mask = KeyPadding(keep) & Predicate(lambda b, i, j: (i != 4) & (j >= 0))
    q, k, v = (rand(1, 2, 17, d, seed=d) for d in (5, 5, 3))
    bias = rand(2, 17, 17, seed=9)
    clean = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    k[:, :, 3], v[:, :, 8], v[:, :, 3, 1], q[:, :, 4] = bad, bad, bad, bad
    bias[:, :, 3] = math.nan
    dirty = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    results = []
    for q, k, v, bias in (clean, dirty):
        out = attend(q, k, v, mask=mask, softcap=softcap, bias=bias)
        results.append((out, *torch.autograd.grad((out * rand(*out.shape)).sum(), (q, k, v, bias))))
    for a, b in zip(*results, strict=True):
        assert torch.isfinite(b).all()
        assert_close(b, a, 0.0)


def test_what_is_visible_propagates() -> None:
    q, k, v = (rand(1, 1, 7, 3, seed=s) for s in (1, 2, 3))
    v[0, 0, 4, 1] = math.nan
    out = attend(q, k, v, mask=Causal())
    assert torch.equal(out[0, 0].isnan(), torch.tensor([[i >= 4 and c == 1 for c in range(3)]
                                                        for i in range(7)]))  # fmt: skip
    v = rand(1, 1, 7, 3, seed=3)
    k[0, 0, 2] = math.nan
    out, lse = attend_with_lse(q, k, v, mask=Causal())
    assert torch.equal(out[0, 0, :, 0].isnan(), torch.arange(7) >= 2)
    assert torch.equal(lse[0, 0].isnan(), torch.arange(7) >= 2)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


MEMORY_MASKS: list[Mask] = [
    Everything(),
    Causal(),
    Causal() & Window(100),
    Causal() & Documents((torch.arange(2053) // 400)[None]),
    Predicate(lambda b, i, j: (i + j) % 3 > 0),
]


def largest(run, mask: Mask, **options) -> int:  # type: ignore[no-untyped-def]
    q, k, v = (rand(1, 2, 2053, 4, seed=s).requires_grad_() for s in (1, 2, 3))
    with Largest() as seen:
        run(q, k, v, mask=mask, **options).sum().backward()
    return seen.numel


@pytest.mark.parametrize("mask", MEMORY_MASKS)
def test_nothing_of_size_n_squared_is_allocated(mask: Mask) -> None:
    def alibi(b: int, heads: slice, query: Tensor, key: range) -> Tensor:
        return -0.1 * (query[:, None] - torch.arange(key.start, key.stop)[None]).abs()

    strip = 512 * 2053  # the most a strip of a default problem may take, in numbers
    assert largest(attend, mask, bias=alibi, softcap=20.0) <= strip < 2053**2 / 2
    assert largest(definition.attention, mask) >= 2053**2  # and the watcher can see


def test_shared_keys_are_not_repeated() -> None:
    q, k, v = rand(1, 12, 3, 5), rand(1, 2, 1009, 5), rand(1, 2, 1009, 5)
    with Largest() as seen:
        attend(q, k, v)
    assert seen.numel <= 6 * 3 * 1009  # the logits of one group
    with Largest() as seen:
        definition.attention(q, k, v)
    assert seen.numel >= 12 * 1009 * 5


def test_tiles_nobody_sees_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = problem.Problem.logits

    def spy(self, q, k, *args):  # type: ignore[no-untyped-def]
        seen.append(len(q) * len(k))
        return plain(self, q, k, *args)

    monkeypatch.setattr(problem.Problem, "logits", spy)
    q = rand(1, 1, 4099, 2)
    attend(q, q, q, mask=Causal() & Window(100))
    assert sum(seen) <= 4099 * (100 + 256 + 1)
    seen.clear()
    attend(q, q, q, mask=Causal())
    assert sum(seen) <= 0.55 * 4099**2


def test_a_learned_bias_function_is_refused() -> None:
    table = rand(2, 7, 7).requires_grad_()
    f = as_function(table, 1, 2, 7, 7)
    q = rand(1, 2, 7, 3)
    with pytest.raises(OptionError, match="pass the tensor itself"):
        attend(q, q, q, bias=f)
    with torch.no_grad():
        attend(q, q, q, bias=f)
    attend(q, q, q, bias=lambda *where: f(*where).detach())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"k": rand(1, 2, 5, 4)}, ShapeError),
        ({"k": rand(1, 3, 5, 3), "v": rand(1, 3, 5, 3)}, ShapeError),
        ({"v": rand(1, 2, 6, 3)}, ShapeError),
        ({"q": rand(2, 4, 5, 3)}, ShapeError),
        ({"q": rand(4, 5, 3)}, ShapeError),
        ({"q": rand(1, 4, 5, 3).double()}, ShapeError),
        ({"q": torch.ones(1, 4, 5, 3, dtype=torch.long)}, ShapeError),
        ({"softcap": -1.0}, OptionError),
        ({"sinks": rand(3)}, ShapeError),
        ({"bias": rand(4, 5, 6)}, ShapeError),
        ({"mask": KeyPadding(torch.ones(2, 5, dtype=torch.bool))}, ShapeError),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(change: dict, error: type) -> None:
    inputs = {"q": rand(1, 4, 5, 3), "k": rand(1, 2, 5, 3), "v": rand(1, 2, 5, 3), **change}
    with pytest.raises(error) as caught:
        attend(**inputs)
    assert "\n" not in str(caught.value)


def test_second_derivatives_are_refused_by_torch() -> None:
    q = rand(1, 1, 3, 2).requires_grad_()
    (g,) = torch.autograd.grad(attend(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(g.sum(), q)


# Each check above can fail: the implementation is broken on purpose, and the check must notice.

SMALL = Problem(
    3 * rand(1, 4, 13, 5, seed=1),
    rand(1, 2, 17, 5, seed=2),
    rand(1, 2, 17, 3, seed=3),
    mask=Band(9, 2),
    softcap=6.0,
    sinks=rand(4, seed=5),
)


def test_checks_notice_a_missing_rescale(ragged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self, logits, values, finite=None, flush=False):  # type: ignore[no-untyped-def]
        top = torch.maximum(self.top, logits.amax(-1, keepdim=True))
        origin = top.masked_fill(top == -math.inf, 0.0)
        e = torch.exp2(logits - origin)
        return state.State(top, self.total + e.sum(-1, True), self.weighted + e @ values)

    check_forward(SMALL)
    monkeypatch.setattr(state.State, "absorb", forgetful)
    with pytest.raises(AssertionError):
        check_forward(SMALL)


def test_checks_notice_a_mask_moved_by_one(ragged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        problem.Problem,
        "positions",
        lambda self, rows: range(rows.start + self.offset + 1, rows.stop + self.offset + 1),
    )
    with pytest.raises(AssertionError):
        check_forward(SMALL)


def test_checks_notice_wrong_gradients(ragged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.attention import backward

    check_backward(SMALL)
    plain = backward._upstream

    def without_delta(*args):  # type: ignore[no-untyped-def]
        d_output, delta = plain(*args)
        return d_output, torch.zeros_like(delta)

    monkeypatch.setattr(backward, "_upstream", without_delta)
    with pytest.raises(AssertionError):
        check_backward(SMALL)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_under_activation_checkpointing(reentrant):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 3, 7, 5, generator=generator, dtype=torch.float64) for _ in range(3))

    def gradients(run):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        run(*leaves).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    def attention(*qkv):
        return attend(*qkv, mask=Causal())

    def again(*qkv):
        return torch.utils.checkpoint.checkpoint(attention, *qkv, use_reentrant=reentrant)

    for plain, repeated in zip(gradients(attention), gradients(again), strict=True):
        assert torch.equal(plain, repeated)
