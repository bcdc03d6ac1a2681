"""From the sizes of a block to its matrices, vectors and attentions.

A family says its sizes in these words; the parts that follow from them are made here and nowhere
else. Widths are never guessed from each other: a = heads · d_qk may differ from d_model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from headwise.cost.parts import Attention, Component, Layer, Matrix, Rows, Vector

__all__ = ["Block", "Experts", "FeedForward", "Latent", "blocks", "hidden", "inward", "norm"]

_BACK: Final = ("W_down", "W_out")  # from hidden vectors to d_model
_INTO: Final = ("W_gate", "W_up", "W_in")


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForward:
    """Two matrices, or three if gated: d_model → d_ff → d_model."""

    d_ff: int
    gated: bool = False
    bias: bool = False

    @property
    def matrices(self) -> int:
        """m, the number of d_model × d_ff matrices."""
        return 3 if self.gated else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """``count`` feed-forwards of which a router picks ``used``, and one that all tokens pass."""

    count: int
    used: int
    each: FeedForward
    shared: FeedForward | None = None
    shared_gate: bool = False  # a learned row whose sigmoid weighs the shared one (Qwen 2 MoE)
    router_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """MLA: keys and values of every head are made of one normed latent of ``rank`` numbers.

    ``rotary`` numbers of a key, shared by all heads, carry the position and stand beside it.
    ``query_rank``: queries are made of a normed latent too; None: of the stream.
    """

    rank: int
    rotary: int
    query_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The sizes of one block.

    Attributes:
        d_qk, d_value: width of a query or key, and of a value, of one head.
        source: d_model of what cross-attention reads; None: no cross-attention.
        norms: how many norms of width d_model; ``norm_bias`` as in LayerNorm.
        qk_norm: "head" (a gain of d_qk each, shared by the heads) or "all" (of all heads);
            ``qk_norm_bias`` as in LayerNorm.
        sinks: a learned logit of every head.
    """

    d_model: int
    heads: int
    kv_heads: int
    d_qk: int
    d_value: int
    feed_forward: FeedForward | Experts
    causal: bool = True
    window: int | None = None
    source: int | None = None
    query_bias: bool = False
    key_bias: bool = False
    value_bias: bool = False
    output_bias: bool = False
    norms: int = 2
    norm_bias: bool = False
    norm_gain: bool = True
    qk_norm: str | None = None
    qk_norm_bias: bool = False
    sinks: bool = False
    latent: Latent | None = None


def norm(name: str, d: int, bias: bool, role: str = "self") -> Vector:
    """The gain, and the bias of a LayerNorm."""
    return Vector(name=name, component=Component.NORMS, size=d * (2 if bias else 1), role=role)


def blocks(each: Sequence[Block]) -> tuple[Layer, ...]:
    """The layers of a stack."""
    return tuple(_layer(block, number) for number, block in enumerate(each))


def hidden(matrices: Iterable[Matrix]) -> int:
    """f: entries of the hidden vectors of one token, those of every expert that works on it."""
    return sum(m.used * m.d_in for m in matrices if m.name in _BACK)


def inward(matrices: Iterable[Matrix]) -> int:
    """Entries that the matrices into the hidden vectors make: gates and what they weigh."""
    return sum(m.used * m.d_out for m in matrices if m.name in _INTO)


def _layer(block: Block, number: int) -> Layer:
    attention, matrices, vectors = _latent(block) if block.latent else _attention(block, "self")
    attentions = [attention]
    if block.source is not None:
        crossing, more, others = _attention(block, "cross")
        attentions.append(crossing)
        matrices += more
        vectors += others
    if block.norm_gain or block.norm_bias:
        size = block.d_model * (block.norm_gain + block.norm_bias)
        vectors += [
            Vector(name=f"norm {i + 1}", component=Component.NORMS, size=size)
            for i in range(block.norms)
        ]
    matrices += _feed_forward(block.d_model, block.feed_forward)
    return Layer(
        number=number,
        matrices=tuple(matrices),
        vectors=tuple(vectors),
        attentions=tuple(attentions),
    )


def _attention(block: Block, role: str) -> tuple[Attention, list[Matrix], list[Vector]]:
    d, query, key = block.d_model, block.heads * block.d_qk, block.kv_heads * block.d_qk
    value, written = block.kv_heads * block.d_value, block.heads * block.d_value
    cross = role == "cross"
    read = block.source if cross and block.source is not None else d
    rows = Rows.SOURCE if cross else Rows.TOKENS

    def matrix(name: str, of: Component, d_in: int, d_out: int, bias: bool, rows: Rows) -> Matrix:
        return Matrix(
            name=name, component=of, d_in=d_in, d_out=d_out, bias=d_out * bias, rows=rows, role=role
        )

    matrices = [
        matrix("W_Q", Component.QUERY, d, query, block.query_bias, Rows.TOKENS),
        matrix("W_K", Component.KEY, read, key, block.key_bias, rows),
        matrix("W_V", Component.VALUE, read, value, block.value_bias, rows),
        matrix("W_O", Component.OUTPUT, written, d, block.output_bias, Rows.TOKENS),
    ]
    vectors = []
    if block.qk_norm is not None:
        shared = block.qk_norm == "head"
        widths = (block.d_qk, block.d_qk) if shared else (query, key)
        vectors += [
            norm(f"{name} norm", width, block.qk_norm_bias, role)
            for name, width in zip(("query", "key"), widths, strict=True)
        ]
    if block.sinks and not cross:
        vectors.append(Vector(name="sinks", component=Component.SCORES, size=block.heads))
    attention = Attention(
        heads=block.heads,
        kv_heads=block.kv_heads,
        d_qk=block.d_qk,
        d_value=block.d_value,
        causal=block.causal and not cross,
        window=None if cross else block.window,
        role=role,
        cached_key=key,
        cached_value=value,
    )
    return attention, matrices, vectors


def _latent(block: Block) -> tuple[Attention, list[Matrix], list[Vector]]:
    latent = block.latent
    assert latent is not None
    d, h, content = block.d_model, block.heads, block.d_qk - latent.rotary

    def matrix(name: str, of: Component, d_in: int, d_out: int, rows: Rows = Rows.TOKENS) -> Matrix:
        return Matrix(name=name, component=of, d_in=d_in, d_out=d_out, rows=rows)

    vectors = [norm("latent norm", latent.rank, bias=False)]
    matrices = []
    if latent.query_rank is None:
        matrices.append(matrix("W_Q", Component.QUERY, d, h * block.d_qk))
    else:
        down = latent.query_rank
        matrices.append(_biased(matrix("W_DQ", Component.QUERY, d, down), block.query_bias))
        matrices.append(matrix("W_UQ", Component.QUERY, down, h * block.d_qk))
        vectors.append(norm("query latent norm", down, bias=False))
    width = latent.rank + latent.rotary
    matrices += [
        _biased(matrix("W_DKV, W_KR", Component.LATENT, d, width), block.key_bias),
        matrix("W_UK", Component.KEY, latent.rank, h * content, Rows.KEYS),
        matrix("W_UV", Component.VALUE, latent.rank, h * block.d_value, Rows.KEYS),
        _biased(matrix("W_O", Component.OUTPUT, h * block.d_value, d), block.output_bias),
    ]
    attention = Attention(
        heads=h,
        kv_heads=h,
        d_qk=block.d_qk,
        d_value=block.d_value,
        causal=block.causal,
        window=block.window,
        cached_key=latent.rank,
        cached_value=latent.rotary,
        latent=(latent.rank, latent.rotary),
    )
    return attention, matrices, vectors


def _biased(matrix: Matrix, bias: bool) -> Matrix:
    return replace(matrix, bias=matrix.d_out * bias)


def _feed_forward(d: int, of: FeedForward | Experts) -> list[Matrix]:
    if isinstance(of, FeedForward):
        return _plain(d, of, Component.MLP)
    matrices = [
        Matrix(
            name="router",
            component=Component.ROUTER,
            d_in=d,
            d_out=of.count,
            bias=of.count * of.router_bias,
        ),
        *_plain(d, of.each, Component.EXPERTS, copies=of.count, used=of.used),
    ]
    if of.shared is not None:
        matrices += _plain(d, of.shared, Component.SHARED_EXPERTS)
    if of.shared_gate:
        gate = Matrix(name="shared gate", component=Component.SHARED_EXPERTS, d_in=d, d_out=1)
        matrices.append(gate)
    return matrices


def _plain(
    d: int, of: FeedForward, component: Component, copies: int = 1, used: int = 1
) -> list[Matrix]:
    names = ("W_gate", "W_up", "W_down") if of.gated else ("W_in", "W_out")
    return [
        Matrix(
            name=name,
            component=component,
            d_in=d if name != names[-1] else of.d_ff,
            d_out=of.d_ff if name != names[-1] else d,
            bias=(of.d_ff if name != names[-1] else d) * of.bias,
            copies=copies,
            used=used,
        )
        for name in names
    ]
