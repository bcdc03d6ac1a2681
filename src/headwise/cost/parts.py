"""A model as the planner sees it: its matrices, its vectors, its attentions, layer by layer.

Everything that is counted is counted from these records, and nothing else is known about a model.
Symbols: n tokens, d = d_model, h query heads, k key-value heads, a = h·d_head (may differ from d).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Attention", "Component", "Layer", "Matrix", "Parts", "Rows", "Stack", "Vector"]


class Component(StrEnum):
    """What a number belongs to, in the order of the tables."""

    EMBEDDING = "embedding"
    POSITIONS = "positions"
    PATCHES = "patches"  # the convolutions before the blocks of a picture or a sound
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    LATENT = "latent"  # MLA: what keys and values are made of
    SCORES = "scores"  # Q Kᵀ
    MIX = "mix"  # A V
    OUTPUT = "output"
    MLP = "mlp"
    ROUTER = "router"
    EXPERTS = "experts"
    SHARED_EXPERTS = "shared experts"
    NORMS = "norms"
    HEAD = "head"  # poolers, classifiers, projections, and layers before the unembedding
    UNEMBEDDING = "unembedding"


class Rows(StrEnum):
    """Which tokens pass through a matrix."""

    TOKENS = "tokens"  # every new token of the stack
    KEYS = "keys"  # every key: the cached ones too (MLA expands its cache)
    SOURCE = "source"  # the tokens of the encoder
    LOGITS = "logits"  # the tokens whose logits are asked for
    SEQUENCE = "sequence"  # one row of each sequence
    BATCH = "batch"  # one row of each pair of sequences: similarities
    NONE = "none"  # rows are picked from a table: no arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A linear map ``d_in × d_out``, or a table of ``d_in`` rows.

    Attributes:
        bias: entries of the bias of one copy.
        copies: how many there are (experts); ``used`` of them work on a token.
        tied: its numbers are those of another part: arithmetic counts, parameters do not.
        positions: rows of each sequence that pass, where ``rows`` does not say it (convolutions).
        input_gradient: whether the backward pass needs the gradient of what comes in.
        learned: False for tables that are stored with the weights but not trained.
    """

    name: str
    component: Component
    d_in: int
    d_out: int
    bias: int = 0
    rows: Rows = Rows.TOKENS
    positions: int | None = None
    copies: int = 1
    used: int = 1
    tied: bool = False
    role: str = "self"
    input_gradient: bool = True
    learned: bool = True

    @property
    def parameters(self) -> int:
        """Numbers that are stored: of all copies, weights and biases; 0 if tied to another."""
        return 0 if self.tied else self.copies * (self.d_in * self.d_out + self.bias)

    @property
    def active(self) -> int:
        """Numbers that work on one token."""
        return self.parameters // self.copies * self.used

    @property
    def macs_per_row(self) -> int:
        """Multiply-adds of one row."""
        return 0 if self.rows is Rows.NONE else self.used * self.d_in * self.d_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """Learned numbers that multiply nothing by a matrix: gains and biases of norms, sinks."""

    name: str
    component: Component
    size: int
    role: str = "self"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The two products of one attention: Q Kᵀ of width ``d_qk`` and A V of width ``d_value``.

    Attributes:
        window: keys that a query may see, its own included; None: all.
        cached_key, cached_value: numbers that a cache keeps of each token, over all heads.
        latent: MLA's (rank, rotary width) of what is cached; None: keys and values themselves.
    """

    heads: int
    kv_heads: int
    d_qk: int
    d_value: int
    causal: bool = True
    window: int | None = None
    role: str = "self"  # or "cross"
    cached_key: int = 0
    cached_value: int = 0
    latent: tuple[int, int] | None = None

    @property
    def cached(self) -> int:
        """Numbers that a cache keeps of each token."""
        return self.cached_key + self.cached_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One block: ``number`` counts within its stack."""

    number: int
    matrices: tuple[Matrix, ...]
    vectors: tuple[Vector, ...]
    attentions: tuple[Attention, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Blocks that the same tokens pass, and what stands before and after them.

    Attributes:
        name: "decoder", "encoder", "text" or "vision".
        context: the most tokens it was trained for; None: not said.
        tokens: tokens of every sequence where the sizes fix them (patches, sound); else None.
    """

    name: str
    d_model: int
    layers: tuple[Layer, ...]
    matrices: tuple[Matrix, ...] = ()
    vectors: tuple[Vector, ...] = ()
    context: int | None = None
    tokens: int | None = None
    decodes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A whole model.

    Attributes:
        family: the model type of its configuration.
        model_class: which of the family's classes was counted (with which head).
        notes: what a reader has to know about the counts.
    """

    family: str
    model_class: str
    vocab: int
    stacks: tuple[Stack, ...]
    notes: tuple[str, ...] = ()

    def matrices(self) -> Iterator[tuple[Stack, int | None, Matrix]]:
        """Every matrix, with its stack and the number of its layer (None: outside of layers)."""
        for stack in self.stacks:
            yield from ((stack, None, matrix) for matrix in stack.matrices)
            for layer in stack.layers:
                yield from ((stack, layer.number, matrix) for matrix in layer.matrices)

    def vectors(self) -> Iterator[tuple[Stack, int | None, Vector]]:
        """Every vector, likewise."""
        for stack in self.stacks:
            yield from ((stack, None, vector) for vector in stack.vectors)
            for layer in stack.layers:
                yield from ((stack, layer.number, vector) for vector in layer.vectors)

    def attentions(self) -> Iterator[tuple[Stack, int, Attention]]:
        """Every attention, likewise."""
        for stack in self.stacks:
            for layer in stack.layers:
                yield from ((stack, layer.number, each) for each in layer.attentions)

    def stack(self, name: str) -> Stack | None:
        """The stack of that name."""
        return next((stack for stack in self.stacks if stack.name == name), None)
