"""What one pass, or one training step, needs in memory: exact bytes of every part.

    inference   weights + cache + the largest transient
    training    weights + gradients + master weights + optimizer states + what the backward pass
                needs + the largest transient

Mixed precision with Adam: 2 (weights) + 2 (gradients) + 4 (master weights) + 4 + 4 (states) = 16
bytes a parameter, Rajbhandari et al. 2020 (arXiv:1910.02054), section 3.1. Not in it: what an
allocator loses between blocks, and the code itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwise.cost.activations import Activations, activations
from headwise.cost.formats import format_of, stored_bytes
from headwise.cost.kv_cache import KeyValueCache, kv_cache
from headwise.cost.optimizer_states import optimizer_bytes, trained_parameters
from headwise.cost.parts import Parts
from headwise.cost.transients import Transient, transients
from headwise.cost.workload import Workload
from headwise.errors import OptionError

__all__ = ["Memory", "memory"]

_KEEPERS = ("transformers", "ideal", "paged", "paged_hybrid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Exact integers of bytes.

    Attributes:
        weights, gradients, master, states: of the parameters; ``master`` are the float32 weights
            beside 16-bit ones.
        activations: what is kept for the backward pass.
        cache: keys and values of earlier tokens and of these.
        transients: what is alive for a moment, largest first; one of them counts.
        saved, keys_and_values: the tables behind ``activations`` and ``cache``.
        notes: which rule each figure follows.
    """

    weights: int
    gradients: int
    master: int
    states: int
    activations: int
    cache: int
    transients: tuple[Transient, ...]
    saved: Activations | None
    keys_and_values: KeyValueCache
    notes: tuple[str, ...]

    @property
    def transient(self) -> int:
        """Bytes of the largest transient."""
        return self.transients[0].bytes

    @property
    def total(self) -> int:
        """All parts together."""
        return sum(self.by_part().values())

    @property
    def dominant(self) -> str:
        """The part that is largest."""
        parts = self.by_part()
        return max(parts, key=lambda name: parts[name])

    def by_part(self) -> dict[str, int]:
        """Name → bytes, in the order of the table.

        Example:
            >>> from headwise.cost.explicit import explicit
            >>> parts = explicit(d_model=64, layers=2, heads=4, vocab=257)
            >>> found = memory(parts, Workload(length=8), training=True).by_part()
            >>> [found[name] // 131_520 for name in ("weights", "gradients", "master", "states")]
            [2, 2, 4, 8]
        """
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "master": self.master,
            "states": self.states,
            "activations": self.activations,
            "cache": self.cache,
            "transient": self.transient,
        }


def memory(
    parts: Parts,
    workload: Workload,
    *,
    weights: str = "bfloat16",
    training: bool = False,
    optimizer: str = "adamw",
    master: bool = True,
    convention: str = "transformers",
    dropout: bool = False,
    activation: str | None = None,
    cache: str | None = None,
    keeps: str = "transformers",
    page: int = 16,
) -> Memory:
    """The memory of a forward pass under ``workload``, or of a training step over it.

    Args:
        weights: their format (``formats.FORMATS``); blocks of numbers are computed in bfloat16.
        training: whether there is a backward pass and an optimizer; there is no cache then.
        optimizer: sgd, momentum, adam, adamw, adafactor or adam8bit.
        master: keep float32 weights, and states in float32, beside 16-bit weights.
        convention, dropout, activation: as in ``activations``.
        cache: type of keys and values; None: that in which the weights are computed.
        keeps: whose rule the cache follows: transformers, ideal, paged or paged_hybrid.
        page: tokens of a page.

    Raises:
        OptionError: training with weights in blocks, or a word that is not known.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> parts = explicit(d_model=64, layers=2, heads=4, vocab=257)
        >>> found = memory(parts, Workload(length=8))
        >>> found.weights, found.cache, found.dominant
        (263040, 4096, 'weights')
    """
    form = format_of(weights)
    if keeps not in _KEEPERS:
        raise OptionError(f"a cache kept by {keeps!r}", allowed=", ".join(_KEEPERS))
    computed = weights if form.plain and form.size in (2, 4) else "bfloat16"
    keys = kv_cache(
        parts, tokens=workload.cached + workload.length, batch=workload.batch,
        source=workload.source, dtype=cache or computed, page=page,
    )  # fmt: skip
    moments = transients(
        parts, workload, convention=convention, dtype=computed, training=training,
        activation=activation,
    )  # fmt: skip
    notes = [f"weights in {weights}, computed in {computed}"]
    if not training:
        return Memory(
            weights=stored_bytes(parts, weights), gradients=0, master=0, states=0, activations=0,
            cache=getattr(keys, keeps), transients=moments, saved=None, keys_and_values=keys,
            notes=(*notes, f"cache as {keeps} keeps it"),
        )  # fmt: skip
    if weights != computed:
        raise OptionError(
            f"training with weights in {weights}", allowed="float32, bfloat16 or float16"
        )
    saved = activations(
        parts, workload, convention=convention, dtype=weights, dropout=dropout,
        activation=activation,
    )  # fmt: skip
    doubled = master and form.size < 4
    trained = trained_parameters(parts)
    if saved.transient:
        again = Transient("one block, made again", saved.transient, "recomputation")
        moments = tuple(sorted((*moments, again), key=lambda each: -each.bytes))
    return Memory(
        weights=stored_bytes(parts, weights),
        gradients=trained * form.size,
        master=4 * trained if doubled else 0,
        states=optimizer_bytes(parts, optimizer, "float32" if doubled else weights),
        activations=saved.bytes,
        cache=0,
        transients=moments,
        saved=saved,
        keys_and_values=keys,
        notes=(*notes, f"states of {optimizer}, without step counters", *saved.notes),
    )
