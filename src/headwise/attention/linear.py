"""Linear attention: attention with a kernel φ(q)·φ(k), without the ``query key`` matrix.

Because the kernel is a product, the sum over keys can be taken before the query is known:

    W = Σ_j φ(k_j) v_jᵀ        z = Σ_j φ(k_j)        o_i = φ(q_i)ᵀ W / φ(q_i)·z

With m features this costs O(n · m · d_value) for n positions, where softmax attention costs
O(n² · (d_head + d_value)). The same numbers in four ways:

    linear_attention              every query sees every key
    linear_attention_parallel     causal; all prefix sums at once, O(n · m · d_value) memory
    linear_attention_recurrent    causal; one position at a time, O(m · d_value) memory: decoding
    linear_attention_chunked      causal; matrices inside a chunk, a state between chunks: training

W, z and every sum are float32, or float64 for float64 inputs, also under autocast; outputs have v's
dtype. A query is free to be rescaled (the factor cancels), so its features are divided by their
largest: kernel values underflow only when the keys' features do. A row whose kernel values all
underflow is 0/0 = NaN, never a made-up number.

Katharopoulos et al. 2020 (arXiv:2006.16236), sections 3.2 to 3.4.
Chunks: Hua et al. 2022 (arXiv:2202.10447).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.attention.feature_maps import FeatureMap
from headwise.attention.heads import group_size
from headwise.attention.problem import Problem, check_shapes
from headwise.errors import OptionError, ShapeError

__all__ = [
    "LinearState",
    "linear_attention",
    "linear_attention_chunked",
    "linear_attention_parallel",
    "linear_attention_recurrent",
]


@dataclass(frozen=True)
class LinearState:
    """What linear attention remembers of the keys it has seen: (W, z) and their number. A monoid.

    ``weighted`` W = Σ φ(k_j) v_jᵀ has shape ``batch kv_head feature d_value``, ``total``
    z = Σ φ(k_j) has ``batch kv_head feature``; float32 or float64. The size does not depend on how
    many keys were seen.

    Example:
        >>> from headwise.attention import LinearState
        >>> key, value = torch.ones(1, 1, 1, 3), torch.tensor([5.0, 7.0]).view(1, 1, 1, 2)
        >>> state = LinearState.empty(1, 1, 3, 2).absorb(key, value).absorb(key, 3 * value)
        >>> state.finish(torch.ones(1, 1, 1, 3)).flatten().tolist(), state.keys
        ([10.0, 14.0], 2)
    """

    weighted: Tensor
    total: Tensor
    keys: int

    def __post_init__(self) -> None:
        if self.weighted.dim() != 4 or self.weighted.shape[:3] != self.total.shape:
            raise ShapeError(
                f"a state of {tuple(self.weighted.shape)} and {tuple(self.total.shape)}",
                allowed="batch kv_head feature d_value and batch kv_head feature",
            )
        wide = (torch.float32, torch.float64)
        if self.weighted.dtype != self.total.dtype or self.total.dtype not in wide:
            raise ShapeError(
                f"a state in {self.weighted.dtype} and {self.total.dtype}",
                allowed="one of float32 and float64 for both",
            )

    @classmethod
    def empty(
        cls,
        batch: int,
        kv_heads: int,
        features: int,
        d_value: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> LinearState:
        """No keys seen: W = 0, z = 0, the neutral element of ``merge``."""
        shape = (batch, kv_heads, features)
        return cls(
            torch.zeros(*shape, d_value, dtype=dtype, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
            0,
        )

    def absorb(self, features: Tensor, values: Tensor) -> LinearState:
        """The state after more keys: φ(k) ``batch kv_head key feature``, v ``… key d_value``."""
        self._check(features, values)
        f, v = features.to(self.total.dtype), values.to(self.total.dtype)
        with _full_precision(f):
            weighted = self.weighted + f.transpose(-1, -2) @ v
        return LinearState(weighted, self.total + f.sum(-2), self.keys + f.shape[-2])

    def merge(self, other: LinearState) -> LinearState:
        """The state of both sets of keys together."""
        if self.weighted.shape != other.weighted.shape or self.total.dtype != other.total.dtype:
            raise ShapeError(
                f"states {tuple(self.weighted.shape)} {self.total.dtype} and "
                f"{tuple(other.weighted.shape)} {other.total.dtype}",
                allowed="one shape and one dtype",
            )
        return LinearState(
            self.weighted + other.weighted, self.total + other.total, self.keys + other.keys
        )

    def finish(self, features: Tensor) -> Tensor:
        """The outputs of queries φ(q) ``batch head query feature``; 0 when no key was seen.

        ``head`` is a multiple of the state's ``kv_head``; head h reads kv head ``h // group``.
        """
        if not self.keys:
            return self.weighted.new_zeros((*features.shape[:3], self.weighted.shape[-1]))
        numerator, denominator = self.read(_rescaled(features.to(self.total.dtype)))
        return numerator / denominator[..., None]

    def read(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Numerator φ(q)ᵀ W ``batch head query d_value`` and denominator φ(q)·z, not divided."""
        self._check_queries(features)
        q = _stacked(features, self.total.shape[1])
        with _full_precision(q):
            numerator, denominator = q @ self.weighted, q @ self.total[..., None]
        rows = features.shape[:3]
        return numerator.reshape(*rows, -1), denominator.reshape(rows)

    def _check(self, features: Tensor, values: Tensor) -> None:
        batch, kv_heads, width, d_value = self.weighted.shape
        keys = features.shape[2] if features.dim() == 4 else -1
        if (features.shape, values.shape) != (
            (batch, kv_heads, keys, width),
            (batch, kv_heads, keys, d_value),
        ):
            raise ShapeError(
                f"features {tuple(features.shape)} and values {tuple(values.shape)}"
                f" for a state of {tuple(self.weighted.shape)}",
                allowed="batch kv_head key feature, batch kv_head key d_value",
            )

    def _check_queries(self, features: Tensor) -> None:
        batch, kv_heads, width, _ = self.weighted.shape
        found = tuple(features.shape)
        if features.dim() != 4 or (found[0], found[3]) != (batch, width):
            raise ShapeError(
                f"query features {found} for a state of {tuple(self.weighted.shape)}",
                allowed="batch head query feature",
            )
        group_size(found[1], kv_heads)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMap) -> Tensor:
    """o_i = φ(q_i)ᵀ (Σ_j φ(k_j) v_jᵀ) / φ(q_i)·Σ_j φ(k_j): every query sees every key.

    Shapes: q ``batch head query d_head``, k ``batch kv_head key d_head``,
    v ``batch kv_head key d_value`` -> ``batch head query d_value``. Cost per head: n·m·d_value
    multiply-adds for the keys and as many for the queries (m features), O(m·d_value) memory beside
    the features. Katharopoulos et al. 2020 (arXiv:2006.16236), section 3.2.

    Example:
        >>> from headwise.attention.feature_maps import elu_plus_one
        >>> v = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
        >>> zero = torch.zeros_like(v)
        >>> linear_attention(zero, zero, v, elu_plus_one).flatten().tolist()
        [2.0, 2.0]
    """
    check_shapes(q, k, v, None, None, None)
    fq, fk = _features(q, k, feature_map)
    return _empty(fk, v).absorb(fk, v).finish(fq).to(v.dtype)


def linear_attention_parallel(q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMap) -> Tensor:
    """Causal: o_i = φ(q_i)ᵀ W_i / φ(q_i)·z_i with all prefix sums W_i, z_i held at once.

    Shapes as in ``linear_attention``, with as many queries as keys. Time and memory
    O(n·m·d_value) per head. Katharopoulos et al. 2020 (arXiv:2006.16236), section 3.3.

    Example:
        >>> from headwise.attention.feature_maps import elu_plus_one
        >>> v = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
        >>> zero = torch.zeros_like(v)
        >>> linear_attention_parallel(zero, zero, v, elu_plus_one).flatten().tolist()
        [1.0, 2.0]
    """
    _check_causal(q, k, v)
    fq, fk = _features(q, k, feature_map)
    w = (fk[..., None] * v.to(fk.dtype)[..., None, :]).cumsum(2)
    z = fk.cumsum(2)
    grouped = _rescaled(fq).unflatten(1, (k.shape[1], -1))  # batch kv_head group query feature
    with _full_precision(fq):
        numerator = torch.einsum("bkgnf,bknfv->bkgnv", grouped, w)
        denominator = torch.einsum("bkgnf,bknf->bkgn", grouped, z)
    return (numerator / denominator[..., None]).flatten(1, 2).to(v.dtype)


def linear_attention_recurrent(
    q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMap, *, state: LinearState | None = None
) -> tuple[Tensor, LinearState]:
    """Causal, one position at a time: absorb (k_i, v_i), then read with q_i.

    Shapes as in ``linear_attention``, with as many queries as keys; ``state`` is what came before
    (None = nothing). Returns the outputs and the state after the last position. Cost per head and
    position 2·m·d_value multiply-adds, whatever the position; O(m·d_value) memory. Katharopoulos et
    al. 2020 (arXiv:2006.16236), section 3.4.

    Example:
        >>> from headwise.attention.feature_maps import elu_plus_one
        >>> v = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
        >>> zero = torch.zeros_like(v)
        >>> output, state = linear_attention_recurrent(zero, zero, v, elu_plus_one)
        >>> output.flatten().tolist(), state.keys
        ([1.0, 2.0], 2)
    """
    _check_causal(q, k, v)
    fq, fk = _features(q, k, feature_map)
    state = _empty(fk, v) if state is None else state
    outputs = [v.new_empty(*q.shape[:2], 0, v.shape[-1], dtype=state.total.dtype)]
    for i in range(q.shape[2]):
        state = state.absorb(fk[:, :, i : i + 1], v[:, :, i : i + 1])
        outputs.append(state.finish(fq[:, :, i : i + 1]))
    return torch.cat(outputs, 2).to(v.dtype), state


def linear_attention_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: FeatureMap,
    *,
    chunk: int = 64,
    state: LinearState | None = None,
) -> tuple[Tensor, LinearState]:
    """Causal: inside a chunk the lower triangle of φ(q) φ(k)ᵀ, before it the state.

    Shapes, ``state`` and result as in ``linear_attention_recurrent``; ``chunk`` positions at a time
    and results independent of it beyond rounding. Cost per head 2·n·m·d_value multiply-adds for the
    state and n·chunk·(m + d_value) inside the chunks: O(n·m·d_value) for chunks of about m.

    Example:
        >>> from headwise.attention.feature_maps import elu_plus_one
        >>> v = torch.tensor([1.0, 3.0, 5.0]).view(1, 1, 3, 1)
        >>> zero = torch.zeros_like(v)
        >>> output, state = linear_attention_chunked(zero, zero, v, elu_plus_one, chunk=2)
        >>> output.flatten().tolist(), state.keys
        ([1.0, 2.0, 3.0], 3)
    """
    _check_causal(q, k, v)
    if chunk < 1:
        raise OptionError(f"chunk is {chunk}", allowed="at least 1 position")
    fq, fk = _features(q, k, feature_map)
    state = _empty(fk, v) if state is None else state
    fq = _rescaled(fq.to(state.total.dtype))
    outputs = [v.new_empty(*q.shape[:2], 0, v.shape[-1], dtype=state.total.dtype)]
    for i in range(0, q.shape[2], chunk):
        part = slice(i, i + chunk)
        fqs, fks, vs = fq[:, :, part], fk[:, :, part], v[:, :, part]
        before, before_total = state.read(fqs)
        inside, inside_total = _triangle(fqs, fks.to(fqs.dtype), vs.to(fqs.dtype))
        outputs.append((before + inside) / (before_total + inside_total)[..., None])
        state = state.absorb(fks, vs)
    return torch.cat(outputs, 2).to(v.dtype), state


def _triangle(fq: Tensor, fk: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Numerator and denominator from the keys of the queries' own chunk.

    The zeros above the diagonal would turn a later NaN or infinity into 0 · NaN = NaN, so values
    that are not finite come in by a running sum instead.
    """
    finite = torch.isfinite(v)
    clean = torch.where(finite, v, 0.0)
    late = torch.where(finite, 0.0, v).cumsum(2)
    rows, kv_heads = fq.shape[2], fk.shape[1]
    with _full_precision(fq):
        kernel = _stacked(fq, kv_heads) @ fk.transpose(-1, -2)
        kernel = kernel.unflatten(2, (-1, rows)).tril()  # batch kv_head group query key
        numerator = kernel @ clean[:, :, None] + late[:, :, None]
    return numerator.flatten(1, 2), kernel.sum(-1).flatten(1, 2)


def _features(q: Tensor, k: Tensor, feature_map: FeatureMap) -> tuple[Tensor, Tensor]:
    """φ(q) and φ(k) in float32 or better, checked to have the shape of features."""
    dtype = Problem.arithmetic(q.dtype)
    with _full_precision(q):
        fq, fk = (feature_map(x.to(dtype)).to(dtype) for x in (q, k))
    if (fq.shape[:-1], fk.shape[:-1]) != (q.shape[:-1], k.shape[:-1]) or (
        fq.shape[-1] != fk.shape[-1]
    ):
        raise ShapeError(
            f"the feature map makes {tuple(fq.shape)} of {tuple(q.shape)}"
            f" and {tuple(fk.shape)} of {tuple(k.shape)}",
            allowed="only the last axis changes, to one number of features",
        )
    return fq, fk


def _empty(fk: Tensor, v: Tensor) -> LinearState:
    batch, kv_heads, _, features = fk.shape
    return LinearState.empty(batch, kv_heads, features, v.shape[-1], fk.dtype, fk.device)


def _rescaled(fq: Tensor) -> Tensor:
    """Query features divided by their largest; a constant factor, so gradients stay exact."""
    top = fq.detach().amax(-1, keepdim=True)
    return fq / torch.where(top == 0, 1.0, top)


def _stacked(fq: Tensor, kv_heads: int) -> Tensor:
    """``batch head query feature -> batch kv_head (group query) feature``."""
    return fq.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _full_precision(x: Tensor) -> AbstractContextManager[object]:
    """No autocast inside: it would compute these sums in half precision."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device):  # the meta device has none
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _check_causal(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_shapes(q, k, v, None, None, None)
    if q.shape[2] != k.shape[2]:
        raise ShapeError(
            f"{q.shape[2]} queries and {k.shape[2]} keys",
            allowed="as many queries as keys in a causal form",
            to_do="pass earlier keys as a state",
        )
