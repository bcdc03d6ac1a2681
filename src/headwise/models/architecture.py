"""What a model is made of, in sizes and words: the one record that builds, saves and names it.

``Architecture`` holds the embedding, one or two ``Stack`` of blocks and the unembedding. It says
nothing about how anything is computed; ``build`` turns each word into a part. It is frozen, refuses
what does not fit together, and survives JSON: ``model_dump_json()`` and ``model_validate_json()``.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from headwise.errors import ModelError
from headwise.positions import Layout, frequencies, scalings

__all__ = [
    "Architecture",
    "Embedding",
    "Relative",
    "Rotary",
    "Stack",
    "Unembedding",
    "head_width",
    "sentence",
]

Size = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Factor = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_TO_DO = "change the sizes of the model"
_SCALINGS: dict[str, type] = {
    "linear": scalings.Linear,
    "dynamic": scalings.DynamicNTK,
    "yarn": scalings.YaRN,
    "llama3": scalings.Llama3,
    "longrope": scalings.LongRope,
    "proportional": scalings.Proportional,
}


def _scaling(value: Any) -> Any:
    """A scaling from its tagged form ``{"kind": "yarn", "factor": …}``."""
    if value is None or type(value) in _SCALINGS.values():
        return value
    if not isinstance(value, dict):
        raise ValueError(f"a rotary scaling of type {type(value).__name__}; allowed: a scaling")
    settings = {name: tuple(x) if isinstance(x, list) else x for name, x in value.items()}
    kind = settings.pop("kind", None)
    if kind not in _SCALINGS:
        raise ValueError(f"a rotary scaling of kind {kind!r}; allowed: {', '.join(_SCALINGS)}")
    form = _SCALINGS[kind]
    try:
        return form(**settings)
    except TypeError:
        names = ", ".join(entry.name for entry in fields(form))
        raise ValueError(f"the rotary scaling {value}; allowed: {names}") from None


def _tagged(value: Any) -> Any:
    if value is None:
        return None
    kind = next(word for word, form in _SCALINGS.items() if type(value) is form)
    return {"kind": kind, **{name: getattr(value, name) for name in value.__slots__}}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    if not TYPE_CHECKING:  # type checkers see the fields as arguments

        def __init__(self, **settings: Any) -> None:
            """The record, or one ``ModelError`` that names the first field that does not fit."""
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise ModelError(sentence(error), to_do=_TO_DO) from None

    @classmethod
    def checked(cls, **settings: Any) -> Self:
        """The record from settings whose types are not known before they are checked."""
        return cls(**settings)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The record from what ``model_dump_json`` wrote, or one ``ModelError``."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ModelError(sentence(error), to_do="write the file again") from None


def sentence(error: ValidationError) -> str:
    """The first complaint of pydantic in one line: where, what was found, what is allowed."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ").removesuffix(f"; {_TO_DO}")
    if first["type"] == "value_error":
        return message
    return f"{place} is {first['input']!r}: {message}"


class Rotary(_Record):
    """Rotary positions: the first ``width`` entries of every query and key turn."""

    width: Size
    base: Positive = 10000.0
    layout: Layout = Layout.HALF
    scaling: Annotated[Any, BeforeValidator(_scaling), PlainSerializer(_tagged)] = None

    @model_validator(mode="after")
    def _can_turn(self) -> Rotary:
        frequencies(self.width, base=self.base, scaling=self.scaling)  # refuses what it cannot do
        return self


class Relative(_Record):
    """T5's learned bias: one number for each head and bucket of distances."""

    buckets: Size = 32
    max_distance: Size = 128


class Stack(_Record):
    """A stack of equal blocks.

    ``windows`` and ``scales`` hold one entry, or one for each layer (None: everything the mask of
    the stack shows; d_head^(-1/2)). ``placement`` says where the norms stand: "pre" x + f(norm x),
    "post" norm(x + f x), "sandwich" x + norm(f(norm x)), "branch" x + norm(f x), "parallel"
    x + attention(norm x) + feed-forward(norm' x).
    """

    layers: Size
    heads: Size
    kv_heads: Size
    d_head: Size
    d_ff: Size
    causal: bool = True
    cross: bool = False
    norm: Literal["layer", "rms", "rms+1"] = "rms"
    norm_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6
    placement: Literal["pre", "post", "sandwich", "branch", "parallel"] = "pre"
    final_norm: bool = True
    activation: Literal["relu", "gelu", "gelu_tanh", "silu"] = "silu"
    gated: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    feed_forward_bias: bool = False
    rotary: Rotary | None = None
    relative: Relative | None = None
    alibi: bool = False
    windows: tuple[Size | None, ...] = (None,)
    qk_norm: Literal["head", "all"] | None = None
    softcap: Positive | None = None
    sinks: bool = False
    scales: tuple[Factor | None, ...] = (None,)
    dropout: Share = 0.0
    attention_dropout: Share = 0.0

    @model_validator(mode="after")
    def _says_one_thing(self) -> Stack:
        if self.alibi and self.relative is not None:
            raise ValueError("ALiBi and learned relative biases in one stack; allowed: one of them")
        if self.cross and self.placement == "parallel":
            raise ValueError("cross-attention in parallel blocks; allowed: another placement")
        if not self.causal and any(window is not None for window in self.windows):
            raise ValueError("windows in a stack that is not causal; allowed: windows = (None,)")
        return self

    @model_validator(mode="after")
    def _fits(self) -> Stack:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads cannot share {self.kv_heads} key-value heads; "
                "allowed: a number of key-value heads that divides the query heads"
            )
        if self.rotary is not None and (self.rotary.width > self.d_head or self.rotary.width % 2):
            raise ValueError(
                f"a rotary width of {self.rotary.width} in heads of width {self.d_head}; "
                "allowed: even, and at most the width of a head"
            )
        for name in ("windows", "scales"):
            if len(getattr(self, name)) not in (1, self.layers):
                raise ValueError(
                    f"{len(getattr(self, name))} {name} for {self.layers} layers; "
                    "allowed: one for all, or one for each"
                )
        return self

    def window(self, layer: int) -> int | None:
        """The window of a layer: keys that a query may see, its own included."""
        return self.windows[layer % len(self.windows)]

    def scale(self, layer: int) -> float | None:
        """The factor of the dot products of a layer; None is d_head^(-1/2)."""
        return self.scales[layer % len(self.scales)]


class Embedding(_Record):
    """Tokens, and what is added to them: positions (a table of ``context`` rows, or sinusoids)."""

    positions: Literal["learned", "sinusoidal"] | None = None
    layout: Layout = Layout.INTERLEAVED
    scale: Factor = 1.0
    segments: Annotated[int, Field(ge=0)] = 0
    norm: bool = False


class Unembedding(_Record):
    """From the last hidden vector to logits: c·tanh((scale · W x + bias) / c).

    W is the token table if ``tied``; ``softcap`` is c, None: no cap; ``bias`` is a learned number
    for every logit. ``transform`` puts dense, activation and norm before it (BERT's head).
    """

    tied: bool = True
    bias: bool = False
    scale: Factor = 1.0
    softcap: Positive | None = None
    transform: bool = False


class Architecture(_Record):
    """A whole model. Exactly one of ``decoder`` and ``encoder``, or both (encoder–decoder).

    ``pooler`` and ``classes`` are heads of an encoder: one vector for the sequence, and a linear
    map of it to so many classes (0: none). ``start_token`` is what the decoder of an
    encoder–decoder reads before its first own token.

    Example:
        >>> stack = Stack(layers=2, heads=4, kv_heads=2, d_head=8, d_ff=96)
        >>> a = Architecture(vocab=257, d_model=32, context=64, decoder=stack)
        >>> a.kind, Architecture.model_validate_json(a.model_dump_json()) == a
        ('decoder', True)
    """

    family: str = "headwise"
    vocab: Size
    d_model: Size
    context: Size
    embedding: Embedding = Embedding()
    encoder: Stack | None = None
    decoder: Stack | None = None
    unembedding: Unembedding | None = Unembedding()
    pooler: bool = False
    classes: int = Field(default=0, ge=0)
    start_token: int | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Architecture:
        if self.encoder is None and self.decoder is None:
            raise ValueError("no stack of blocks; allowed: an encoder, a decoder, or both")
        both = self.encoder is not None and self.decoder is not None
        crossing = [s is not None and s.cross for s in (self.encoder, self.decoder)]
        if crossing != [False, both]:
            raise ValueError(
                "cross-attention out of place; allowed: in the decoder of an encoder–decoder, and"
                " nowhere else"
            )
        if self.encoder is not None and self.encoder.causal:
            raise ValueError("an encoder that is causal; allowed: causal = False")
        if self.decoder is not None and not self.decoder.causal:
            raise ValueError("a decoder that is not causal; allowed: causal = True")
        if self.decoder is not None and self.pooler:
            raise ValueError("a pooler on a decoder; allowed: a pooler on an encoder alone")
        if self.decoder is not None and self.unembedding is None:
            raise ValueError("a decoder without an unembedding; allowed: without one, an encoder")
        if self.classes and not self.pooler:
            raise ValueError("classes without a pooler; allowed: a pooler, whose vector they read")
        if self.start_token is not None and not 0 <= self.start_token < self.vocab:
            raise ValueError(f"a start token of {self.start_token}; allowed: 0 to {self.vocab - 1}")
        return self

    @property
    def kind(self) -> Literal["decoder", "encoder", "encoder-decoder"]:
        """Which of the three shapes of transformer this is."""
        if self.encoder is not None and self.decoder is not None:
            return "encoder-decoder"
        return "encoder" if self.decoder is None else "decoder"

    @property
    def stack(self) -> Stack:
        """The only stack; of an encoder–decoder, that of the decoder."""
        found = self.decoder or self.encoder
        assert found is not None
        return found


def head_width(d_model: int, heads: int) -> int:
    """d_model / heads, the width of a head unless another one is given.

    Example:
        >>> head_width(576, 9)
        64
    """
    if heads < 1 or d_model % heads:
        raise ModelError(
            f"{heads} heads do not divide the width {d_model}",
            allowed="a number of heads that divides d_model",
            to_do="change one of the two, or give d_head",
        )
    return d_model // heads
