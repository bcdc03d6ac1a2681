"""What other counters would say of the same model, and why they would be wrong.

Only what follows from how a counter works is computed: which products it sees. Every rule was
checked against the counters themselves (versions below, transformers 5.24) on GPT-2, SmolLM2 and
BERT; those of attention and experts on Mixtral, Gemma 2, gpt-oss and DeepSeek-V3 too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from headwise.cost.counting import Counts, count
from headwise.cost.parts import Component, Parts, Rows
from headwise.cost.workload import Workload

__all__ = ["Other", "other_counters"]

_PRODUCTS = (Component.SCORES, Component.MIX)
_EXPERTS = (Component.EXPERTS,)
_COMPOSED = ("gemma2", "gpt_oss")  # transformers multiplies them eagerly unless told otherwise
_UNSEEN = "scaled_dot_product_attention on the CPU has no formula: both products count as 0"
_GROUPED = "transformers multiplies experts by grouped_mm, which has no formula: they count as 0"
_IN_BLOCKS = (Component.QUERY, Component.KEY, Component.VALUE, Component.OUTPUT, Component.MLP)


@dataclass(frozen=True, slots=True)
class Other:
    """One counter: what it would give, what is right in its own convention, and why they differ.

    Attributes:
        what: the quantity, with its unit.
    """

    tool: str
    what: str
    counted: int
    right: int
    why: str

    @property
    def ratio(self) -> Fraction:
        """counted / right."""
        return Fraction(self.counted, self.right)


def other_counters(parts: Parts, workload: Workload) -> tuple[Other, ...]:
    """The counters that would be wrong about this model, each with its error.

    Forward passes without a cache are counted, over all pairs and all logits: their convention.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> parts = explicit(d_model=768, layers=12, heads=12, vocab=50257, tied=True)
        >>> found = other_counters(parts, Workload(length=2048))
        >>> found[0].tool, round(float(found[0].ratio), 3)
        ('torch FlopCounterMode (2.13)', 0.766)
    """
    plain = replace(
        workload, cached=0, documents=(), pairs="all", logits="all", recompute="none",
        attention="materialised", absorbed=False,
    )  # fmt: skip
    counts = count(parts, plain)
    found = [*_forward(parts, counts), *_parameters(parts, counts), *_training(parts, counts)]
    return tuple(other for other in found if other.counted != other.right)


def _without(counts: Counts, components: Iterable[Component]) -> int:
    hidden = set(components)
    return 2 * sum(line.macs for line in counts.lines if line.component not in hidden)


def _forward(parts: Parts, counts: Counts) -> Iterable[Other]:
    flops, unit = counts.flops, "forward FLOPs"
    experts = any(line.component in _EXPERTS for line in counts.lines)
    for tool in ("torch FlopCounterMode (2.13)", "calflops (0.3.2)", "fvcore (0.1.5)"):
        fused = _is_fused(parts, tool)
        missed = [*(_PRODUCTS if fused else ()), *(_EXPERTS if experts else ())]
        why = "; ".join([_UNSEEN] * fused + [_GROUPED] * experts)
        yield Other(tool, unit, _without(counts, missed), flops, why)
        if experts and fused:
            eager = _without(counts, _EXPERTS)
            yield Other(tool, f"{unit}, eager attention", eager, flops, _GROUPED)
    hidden = {*_PRODUCTS, *_EXPERTS}
    reason = "it sees nn.Linear modules only: no attention products"
    reason += " and no experts" if experts else ""
    if parts.family == "gpt2":
        hidden |= set(_IN_BLOCKS)
        reason = "it sees nn.Linear modules only; the blocks of GPT-2 are Conv1D"
    yield Other("thop (0.1.1)", unit, _without(counts, hidden), flops, reason)
    windowed = replace(counts.workload, pairs="visible")
    visible = count(parts, windowed).flops
    if any(a.window is not None for _, _, a in parts.attentions()):
        yield Other(
            "any counter", f"{unit}, eager attention, of the pairs that the mask shows",
            flops, visible,
            "dense kernels multiply all n² pairs; windows and the causal mask leave fewer",
        )  # fmt: skip


def _is_fused(parts: Parts, tool: str) -> bool:
    """Whether the default attention of transformers hides both products from a counter.

    Where keys and values differ in width, the CPU takes the composed form: torch's own counter
    sees its products, those that look at the call do not.
    """
    if parts.family in _COMPOSED:
        return False
    composed = any(a.d_qk != a.d_value for _, _, a in parts.attentions())
    return not (composed and tool.startswith("torch"))


def _parameters(parts: Parts, counts: Counts) -> Iterable[Other]:
    tied = sum(m.d_in * m.d_out for _, _, m in parts.matrices() if m.tied and m.rows is Rows.LOGITS)
    yield Other(
        "torchinfo (1.8.0)", "parameters", counts.parameters + tied, counts.parameters,
        "a tied unembedding is counted twice",
    )  # fmt: skip


def _training(parts: Parts, counts: Counts) -> Iterable[Other]:
    """6 N per token, the rule of thumb: without attention, and with all experts if N is the sum."""
    tokens = counts.workload.batch * counts.workload.length
    if len(parts.stacks) > 1 or parts.stacks[0].tokens is not None:
        return
    right = counts.training_flops
    unembedding = sum(
        m.d_in * m.d_out for _, _, m in parts.matrices() if m.component is Component.UNEMBEDDING
    )
    without_tables = counts.parameters - counts.embedding
    tied = any(m.tied for _, _, m in parts.matrices())
    yield Other(
        "6 · N · tokens", "training FLOPs (N without tables)",
        6 * tokens * (without_tables - (0 if tied else unembedding)), right,
        "no attention products and no unembedding"
        + ("; all experts instead of those used" if counts.active < counts.parameters else ""),
    )  # fmt: skip
    yield Other(
        "6 · N · tokens", "training FLOPs (N = all)", 6 * tokens * counts.parameters, right,
        "no attention products; tables that are only looked up"
        + ("; all experts instead of those used" if counts.active < counts.parameters else ""),
    )  # fmt: skip
