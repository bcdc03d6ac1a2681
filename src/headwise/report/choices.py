"""The choices of the map: which statistics it offers, how each is scaled, and how to read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["CIRCUIT_STATISTICS", "DERIVED_WORDS", "FLOW", "STATISTICS", "Statistic"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistic:
    """One choice of the map."""

    name: str
    group: str
    label: str
    reading: str  # what a low and a high number say, in plain words
    unit: str = ""
    scale: str = "linear"  # or "log"
    share: bool = False  # a share of something: the colour scale starts at 0


def _focus(name: str, label: str, reading: str, unit: str = "", scale: str = "") -> Statistic:
    return Statistic(
        name=name,
        group="Concentration",
        label=label,
        reading=reading,
        unit=unit,
        scale=scale or "linear",
        share=not scale and unit != "nats",
    )


def _reach(name: str, label: str, reading: str) -> Statistic:
    return Statistic(
        name=name, group="Reach", label=label, reading=reading, unit="of weight", share=True
    )


def _scale(name: str, label: str, reading: str) -> Statistic:
    return Statistic(name=name, group="Scale", label=label, reading=reading)


def _circuit(name: str, label: str, reading: str, scale: str = "linear") -> Statistic:
    return Statistic(name=name, group="Circuits", label=label, reading=reading, scale=scale)


def _flow(name: str, label: str, reading: str) -> Statistic:
    return Statistic(name=name, group="Flow", label=label, reading=reading, scale="log")


STATISTICS: Final = (
    _focus(
        "entropy_fraction",
        "entropy share",
        "Low: the head looks at few tokens. High: it averages over everything it can see.",
        "of ln n",
    ),
    _focus(
        "entropy",
        "entropy",
        "0: all weight on one token. ln n: n tokens share the weight equally.",
        "nats",
    ),
    _focus(
        "entropy_without_sink_fraction",
        "entropy off sink",
        "How widely the head looks once the first token is left out. "
        "Low: it picks a few tokens. High: it averages.",
        "of ln n",
    ),
    _focus(
        "effective_keys",
        "effective keys",
        "The head looks as sharply as if this many tokens shared its weight equally.",
        "keys",
        "log",
    ),
    _focus(
        "top_weight",
        "top weight",
        "How much of the weight the strongest token gets. Near 1 the head has decided.",
    ),
    _focus(
        "jacobian_trace",
        "Jacobian trace",
        "How far the weights can still move when a logit moves. "
        "Near 0: hardly any gradient passes through the softmax.",
    ),
    _focus(
        "dead_rows",
        "dead rows",
        "Share of queries that put over 0.999 of their weight on one token. "
        "Ordinary where that token is the sink.",
        "of rows",
    ),
    _focus(
        "dead_rows_not_sink",
        "dead off sink",
        "Share of queries that put over 0.999 of their weight on one token other than the sink. "
        "They pass no gradient.",
        "of rows",
    ),
    Statistic(
        name="distance",
        group="Reach",
        label="distance",
        reading="How far back (or away) the head looks on average, the sink included.",
        unit="tokens",
        scale="log",
    ),
    _reach(
        "sink_mass",
        "sink",
        "Weight put on the first token. High: the head rests, and adds little to most tokens.",
    ),
    _reach("null_mass", "learned sink", "Weight that goes to no token at all: the head rests."),
    _reach("previous_mass", "previous token", "High: the head copies from the token before."),
    _reach("self_mass", "self", "High: the head looks at the token it stands on."),
    _reach(
        "local_mass", "within 16 tokens", "High: the head would do the same with a short window."
    ),
    _scale(
        "max_logit",
        "max logit",
        "The largest score before the softmax. Above 100, training becomes unstable.",
    ),
    _scale(
        "max_abs_logit",
        "max |logit|",
        "The largest score of either sign: what the dtype must hold.",
    ),
    _scale(
        "logit_std",
        "spread in row",
        "How strongly the scores tell keys apart. 0: not at all. About 1: as initialised.",
    ),
    _scale(
        "mean_logit",
        "mean logit",
        "The typical score. Only differences between keys matter, so its sign says little.",
    ),
    _scale(
        "log_sum_exp",
        "log-sum-exp",
        "The logarithm of what the softmax divides by; it grows with the scores and the length.",
    ),
)
# From the weights alone, but for the induction score, which is on random tokens that repeat.
CIRCUIT_STATISTICS: Final = (
    _circuit(
        "qk_effective_rank_folded",
        "rank of W_QK",
        "How many directions of the stream the head compares. Low: it looks for one thing.",
    ),
    _circuit(
        "ov_effective_rank_folded",
        "rank of W_OV",
        "How many directions the head moves. Low: whatever it reads, it writes the same few.",
    ),
    _circuit(
        "copying",
        "copying",
        "1: the head makes the tokens it looks at likelier. −1: less likely. 0: neither.",
    ),
    _circuit(
        "qk_spectral_norm_folded",
        "norm of W_QK",
        "The strongest match of a query and a key. High: the head can be very sure.",
        "log",
    ),
    _circuit(
        "ov_spectral_norm_folded",
        "norm of W_OV",
        "How strongly the head writes what it reads best.",
        "log",
    ),
    _circuit(
        "qk_sign",
        "sign of W_QK",
        "1: tokens look for what resembles them. −1: for the opposite. 0: for something else.",
    ),
    _circuit(
        "rotary_slow_share",
        "slow pairs",
        "How much of W_QK stands in rotary pairs that hardly turn: content, not distance.",
    ),
    _circuit(
        "repeated_induction",
        "induction",
        "On random tokens that repeat. High: the head looks at what came after this token before.",
    ),
    _circuit(
        "text_induction",
        "induction on text",
        "On the text that was read. High: the head looks at what came after this token before.",
    ),
    _circuit("qk_change_relative", "change of W_QK", "How far tuning moved W_QK.", "log"),
    _circuit("ov_change_relative", "change of W_OV", "How far tuning moved W_OV.", "log"),
)
FLOW: Final = (
    _flow("stream_out_rms", "stream", "Size of the residual stream after the block."),
    _flow(
        "stream_out_rms_first",
        "stream, first token",
        "The same at the first token, which often carries a huge vector.",
    ),
    _flow("attention_write_rms", "attention write", "How much the attention adds to the stream."),
    _flow("mlp_write_rms", "MLP write", "How much the MLP adds to the stream."),
    _flow("stream_gradient_rms", "gradient", "Size of the loss gradient at the stream."),
)
DERIVED_WORDS: Final = {
    "local_mass": ("weight within 16 tokens", "mean over rows of the weight on keys nearer than 16")
}
