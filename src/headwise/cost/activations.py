"""What a training step keeps for its backward pass, tensor by tensor, in bytes.

Three conventions. "transformers": the modules of transformers 5.24 with torch 2.13 on a CPU, eager
(materialised) or sdpa (fused), to the byte for the families of ``EXACT``. "headwise": Headwise's
own models, with torch's fused kernel or the streaming form, and its loss in chunks. "megatron": a
GPT block in 16 bits with dropout, Korthikanti et al. 2022 (arXiv:2205.05198), equation 1:
s·b·h (34 + 5·a·s/h) bytes for s tokens, b sequences, width h and a heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from headwise.cost.activation_styles import EXACT, Style, style_of
from headwise.cost.formats import format_of
from headwise.cost.parts import Component, Layer, Matrix, Parts, Rows, Stack
from headwise.cost.saved_tensors import Kept, Pass, block_tensors, norm_tensors
from headwise.cost.workload import Workload
from headwise.errors import OptionError

__all__ = ["REST_DERIVED", "Activations", "activations"]

# Families whose blocks are exact and whose positions, or heads, are computed in another way.
REST_DERIVED: Final = (
    "clip_text_model", "gemma3_text", "gpt_neox", "olmo2", "phi", "roberta", "stablelm", "vit",
)  # fmt: skip
_QK_NORMS: Final = (
    "qwen3",
    "gemma3_text",
    "olmo2",
)  # families whose norms of queries were measured
_TYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """The tensors of one step.

    Attributes:
        tensors: everything that the forward pass makes and the backward pass reads.
        kept: those of them, or the inputs of the blocks in their place, that are kept from the
            forward pass until the backward pass.
        transient: bytes that are made again, of the block where they are most.
        exact: whether the blocks were found equal, to the byte, to what torch keeps.
        rest_exact: likewise for what stands outside of the blocks, the loss included.
        notes: what the figures follow, and where they are derived and not measured.
    """

    tensors: tuple[Kept, ...]
    kept: tuple[Kept, ...]
    transient: int
    exact: bool
    rest_exact: bool
    convention: str
    notes: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """What is kept from the forward pass until the backward pass."""
        return sum(each.bytes for each in self.kept)

    @property
    def peak(self) -> int:
        """What is kept, and what is made again at most."""
        return self.bytes + self.transient

    @property
    def square(self) -> int:
        """Bytes of what is kept that grow as n²."""
        return sum(each.bytes for each in self.kept if each.square)

    @property
    def outside(self) -> int:
        """Bytes of what is kept outside of the blocks."""
        return sum(each.bytes for each in self.kept if each.layer is None)

    def of_layer(self, layer: int = 0, stack: str | None = None) -> tuple[Kept, ...]:
        """What is kept of one block, of the first stack unless one is named."""
        name = self.tensors[0].stack if stack is None else stack
        return tuple(each for each in self.kept if (each.stack, each.layer) == (name, layer))


def activations(
    parts: Parts,
    workload: Workload,
    *,
    convention: str = "transformers",
    dtype: str = "bfloat16",
    dropout: bool = False,
    activation: str | None = None,
    streaming: bool = False,
) -> Activations:
    """The table of a model: ``workload`` says materialised or fused, and what is recomputed.

    Args:
        convention: whose modules: "transformers", "headwise" or "megatron".
        dtype: of parameters and stream: float32, bfloat16 or float16.
        dropout: whether every dropout of the family is on; a mask has the type of what it masks.
        activation: of the feed-forward; None: that of the family.
        streaming: Headwise's own O(n) form (softcap, sinks) in place of torch's kernel.

    Raises:
        OptionError: a cache, an unknown word, or a convention without such a form.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> parts = explicit(d_model=128, layers=2, heads=4, vocab=257, bias=True)
        >>> found = activations(parts, Workload(length=64, attention="materialised"),
        ...                     convention="megatron")
        >>> sum(each.bytes for each in found.of_layer(0)) == 64 * 128 * (34 + 5 * 4 * 64 // 128)
        True
    """
    _check(workload, convention, dtype, streaming)
    if convention == "megatron" and dtype == "float32":
        raise OptionError("16-bit figures for float32", allowed="bfloat16 or float16")
    size = format_of(dtype).size
    style = style_of(parts, convention, activation)
    encoder = parts.stack("encoder")
    source = 0 if encoder is None else (encoder.tokens or workload.encoded)
    tensors: list[Kept] = []
    passes: dict[str, Pass] = {}
    for stack in parts.stacks:
        how = Pass(
            style=style, convention=convention, batch=workload.batch, size=size, source=source,
            tokens=workload.queries(stack), dropout=dropout or convention == "megatron",
            materialised=workload.attention == "materialised",
            streaming=streaming or (convention == "headwise" and _sinks(stack)),
        )  # fmt: skip
        passes[stack.name] = how
        for layer in stack.layers:
            block = _megatron if convention == "megatron" else block_tensors
            tensors += block(layer, stack, how)
        if convention != "megatron":
            tensors += _outside(stack, how)
    kept, transient = _recompute(tensors, parts, workload.recompute, passes)
    exact, rest_exact, notes = _exactness(parts, workload, style, convention, passes)
    return Activations(
        tensors=tuple(tensors), kept=tuple(kept), transient=transient, exact=exact,
        rest_exact=rest_exact, convention=convention, notes=tuple(notes),
    )  # fmt: skip


def _check(workload: Workload, convention: str, dtype: str, streaming: bool) -> None:
    if dtype not in _TYPES:
        raise OptionError(f"activations in {dtype}", allowed=", ".join(_TYPES))
    if workload.cached:
        raise OptionError("a training step over a cache", allowed="whole sequences")
    if convention == "headwise" and workload.attention == "materialised":
        raise OptionError(
            "Headwise's models with materialised attention",
            allowed="attention='fused': they never keep the n × n matrix",
            to_do="take the convention transformers for it",
        )
    if streaming and convention != "headwise":
        raise OptionError("the streaming form elsewhere", allowed="the convention headwise")


def _sinks(stack: Stack) -> bool:
    return any(each.name == "sinks" for layer in stack.layers for each in layer.vectors)


def _megatron(layer: Layer, stack: Stack, how: Pass) -> Iterator[Kept]:
    """The items of Korthikanti et al. 2022, section 4.1: masks of one byte, norms' inputs alone."""
    rows, d = how.rows, stack.d_model

    def kept(name: str, elements: int, size: int = 2, square: bool = False) -> Kept:
        return Kept(
            stack=stack.name, layer=layer.number, name=name, elements=elements, size=size,
            square=square,
        )  # fmt: skip

    yield kept("inputs of the norms", 2 * rows * d)
    for of in layer.attentions:
        pairs = how.batch * of.heads * how.tokens * how.tokens
        yield kept("input of W_Q, W_K, W_V", rows * d)
        yield kept("queries and keys", rows * (of.heads + of.kv_heads) * of.d_qk)
        yield kept("values", rows * of.kv_heads * of.d_value)
        if how.materialised:
            yield kept("weights", pairs, square=True)
            yield kept("dropout of the weights", pairs, 1, square=True)
            yield kept("weights after dropout", pairs, square=True)
        yield kept("heads, which W_O reads", rows * of.heads * of.d_value)
        yield kept("dropout of the output", rows * d, 1)
    yield kept("input of the feed-forward", rows * d)
    wide = [m for m in layer.matrices if m.component in (Component.MLP, Component.EXPERTS)]
    if wide:
        times = 2 if len(wide) == 2 else 4  # gated: gate, f(gate), up and their product
        yield kept("feed-forward, before and after f", times * rows * wide[-1].used * wide[-1].d_in)
    yield kept("dropout of the feed-forward", rows * d, 1)


def _outside(stack: Stack, how: Pass) -> Iterator[Kept]:
    """Ids, positions, the norms before and after the blocks, heads and the loss."""
    d, rows, style = stack.d_model, how.rows, how.style
    ids = [m.component for m in stack.matrices if m.rows is Rows.NONE]
    found: list[tuple[str, int, int, bool]] = []
    if Component.EMBEDDING in ids and stack.tokens is None:
        found.append(("ids of tokens", rows, 8, False))
        own = how.convention == "headwise"
        if style.segments:
            found.append(("ids of segments", rows if own else how.tokens, 8, False))
        if Component.POSITIONS in ids and style.positions in ("table", "each"):
            times = how.batch if style.positions == "each" else 1
            kept = own or not style.segments  # BERT has them as a buffer
            found.append(("ids of positions", times * how.tokens * kept, 8, False))
    if style.positions == "rotary":
        width = stack.layers[0].attentions[0].d_qk
        size = how.wide if how.convention == "headwise" else how.size
        found.append(("cosines and sines", 2 * how.tokens * width, size, False))
    if how.dropout and style.residual_dropout:
        found.append(("dropout of the embedding", rows * d, how.size, False))
    for vector in stack.vectors:
        if vector.component is Component.NORMS:
            found += norm_tensors(vector.name, rows, vector.size // (1 + _layered(style)), how)
    for matrix in stack.matrices:
        found += _head(matrix, how)
    for name, elements, size, square in found:
        if elements:
            yield Kept(
                stack=stack.name, layer=None, name=name, elements=elements, size=size,
                square=square,
            )  # fmt: skip


def _layered(style: Style) -> bool:
    return style.norm == "layer"


def _head(matrix: Matrix, how: Pass) -> Iterator[tuple[str, int, int, bool]]:
    """A linear map after the blocks; after the unembedding the loss: ln softmax of every token."""
    rows = how.batch if matrix.rows is Rows.SEQUENCE else how.rows
    if matrix.component is Component.UNEMBEDDING and matrix.rows is Rows.LOGITS:
        width = how.wide if how.style.wide_loss else how.size
        if how.convention == "headwise":  # the gradient is there as soon as the loss is
            yield "gradient of the last vectors", rows * matrix.d_in, how.size, False
            yield "gradient of the unembedding", matrix.d_in * matrix.d_out, how.size, False
            return
        yield "input of the unembedding", rows * matrix.d_in, how.size, False
        yield "logarithms of the probabilities", rows * matrix.d_out, width, False
        # Shifted by one: a copy, but of one sequence a view of what was padded by a token.
        padded = how.style.wide_loss and how.batch == 1
        yield "targets", rows + padded, 8, False
        yield "weight of the loss", 1, width, False
    elif matrix.component is Component.HEAD:
        yield f"input of {matrix.name}", rows * matrix.d_in, how.size, False
        if matrix.name == "layer before the unembedding":
            yield "x of its activation", rows * matrix.d_out, how.size, False


def _recompute(
    tensors: list[Kept], parts: Parts, how: str, passes: dict[str, Pass]
) -> tuple[list[Kept], int]:
    """What stays of the table, and the bytes that one block at a time makes again."""
    if how == "none":
        return tensors, 0
    again = [each for each in tensors if each.layer is not None]
    if how == "selective":
        again = [each for each in again if each.square]
    sums: dict[tuple[str, int | None], int] = {}
    for each in again:
        sums[each.stack, each.layer] = sums.get((each.stack, each.layer), 0) + each.bytes
    gone = set(map(id, again))
    kept = [each for each in tensors if id(each) not in gone]
    if how == "full":
        kept += [
            Kept(
                stack=stack.name, layer=layer.number, name="input of the block",
                elements=passes[stack.name].rows * stack.d_model, size=passes[stack.name].size,
            )
            for stack in parts.stacks
            for layer in stack.layers
        ]  # fmt: skip
    return kept, max(sums.values(), default=0)


def _exactness(
    parts: Parts, workload: Workload, style: Style, convention: str, passes: dict[str, Pass]
) -> tuple[bool, bool, list[str]]:
    if convention == "megatron":
        return False, False, ["Korthikanti et al. 2022, equation 1; outside of blocks: not counted"]
    notes = [f"as {convention} computes on a CPU: {style.norm} norms, {style.activation}"]
    known = style.exact and (len(parts.stacks) == 1 or convention == "transformers")
    for stack in parts.stacks:
        for layer in stack.layers:
            known = known and not any(m.component is Component.ROUTER for m in layer.matrices)
            known = known and all(a.latent is None for a in layer.attentions)
            normed = any(v.name == "query norm" for v in layer.vectors)
            known = known and (not normed or convention == "headwise" or parts.family in _QK_NORMS)
    if not known:
        notes.append(
            f"derived, not measured: blocks of {parts.family} follow the nearest family that was"
        )
    exact = known
    notes += _fused_notes(parts, workload, convention, passes)
    if workload.documents:
        exact = False
        notes.append("packed documents: counted as one sequence, without the mask between them")
    if workload.recompute == "selective":
        exact = False
        notes.append("selective: the n × n tensors are left out of the table, no more")
    masked = any(a.window for _, _, a in parts.attentions())
    if masked and any(how.dropout for how in passes.values()):
        exact = False
        notes.append("derived, not measured: windows and dropout together")
    heads = [m for s in parts.stacks for m in s.matrices if m.component is Component.HEAD]
    usual = all(m.name == "layer before the unembedding" for m in heads)
    if workload.recompute == "full":
        usual = False
        notes.append("full: masks and positions that every block is given are held once besides")
    rest = known and usual and len(parts.stacks) == 1
    rest = rest and parts.family in EXACT and parts.family not in REST_DERIVED
    return exact, rest, notes


def _fused_notes(
    parts: Parts, workload: Workload, convention: str, passes: dict[str, Pass]
) -> list[str]:
    """Where a fused kernel is not what its name promises."""
    if workload.attention != "fused" or convention != "transformers":
        return []
    found = []
    if any(
        of.window is not None and passes[stack.name].tokens >= of.window
        for stack, _, of in parts.attentions()
    ):
        found.append("a window that is not longer than the text: every layer keeps an n × n mask")
    if any(of.d_qk != of.d_value for _, _, of in parts.attentions()):
        found.append(
            "keys and values of two widths: a CPU takes the composed form, which keeps the n × n "
            "weights; counted as other devices have it, without them"
        )
    return found
