"""Everything that a model costs under one workload, as one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from headwise.cost.activation_styles import KNOWN_ACTIVATIONS
from headwise.cost.config import read_source
from headwise.cost.counting import Counts, count
from headwise.cost.crossovers import Crossover, Shares, crossovers, shares
from headwise.cost.elementwise import elementwise
from headwise.cost.fit import Fit, largest_batch, longest_context
from headwise.cost.formats import format_of
from headwise.cost.gguf import Stored
from headwise.cost.hardware import Hardware, hardware, hardware_from
from headwise.cost.layer_table import Row, layer_table
from headwise.cost.memory import Memory, memory
from headwise.cost.other_counters import Other, other_counters
from headwise.cost.parts import Parts, Stack
from headwise.cost.roofline import Time, roofline
from headwise.cost.workload import Workload

__all__ = ["Cost", "cost", "main_stack", "usual_length"]

_USUAL: Final = 8192
# Families that compute something else than the key says.
_OWN_ACTIVATION: Final = ("gpt_oss", "gemma", "gemma2", "gemma3_text", "gemma3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a model costs: exact integers, each in a stated convention.

    Attributes:
        name: what was asked about.
        workload: the pass that ``forward`` counts; training adds its backward pass.
        forward: parameters, and multiply-adds of one forward pass.
        decode: one more token for every sequence after it; None without a decoder.
        absorbed: the same where latent keys and values are never expanded; None without latents.
        crossovers, shares: when attention outweighs the rest.
        table: one block in the form of the textbook's table, of every stack.
        others: what other counters would say, where it is something else.
        beside: operations that are no matrix products, by convention.
        inference, training: bytes in memory; no ``training`` with weights in blocks, or where
            something is cached.
        time: on ``hardware``, None where none is named.
        fits: the longest contexts and the largest batches in given memory, by name.
        stored: what the tensors of a GGUF file take.
        config: the configuration of transformers that was counted, if it was one.
    """

    name: str
    parts: Parts
    workload: Workload
    forward: Counts
    decode: Counts | None
    absorbed: Counts | None
    crossovers: tuple[Crossover, ...]
    shares: Shares
    table: dict[str, tuple[Row, ...]]
    others: tuple[Other, ...]
    beside: dict[str, int]
    inference: Memory
    training: Memory | None
    time: Time | None = None
    fits: dict[str, Fit]
    stored: Stored | None = None
    config: Mapping[str, Any] | None = None

    @property
    def parameters(self) -> int:
        """Stored numbers, tied ones once."""
        return self.forward.parameters

    @property
    def flops(self) -> int:
        """Of the forward pass: 2 · multiply-adds."""
        return self.forward.flops

    @property
    def training_flops(self) -> int:
        """Of one forward and one backward pass, what is recomputed included."""
        return self.forward.training_flops

    @property
    def cache_bytes(self) -> int:
        """Keys and values after the pass, as the cache of transformers keeps them."""
        return self.inference.keys_and_values.transformers


def cost(
    config: object,
    *,
    length: int | None = None,
    batch: int = 1,
    source_length: int | None = None,
    cached: int = 0,
    documents: tuple[int, ...] = (),
    pairs: str = "all",
    logits: str = "all",
    attention: str = "fused",
    recompute: str = "none",
    absorbed: bool = False,
    weights: str | None = None,
    cache: str | None = None,
    optimizer: str = "adamw",
    on: str | Path | Hardware | None = None,
    efficiency: float | None = None,
    memory_bytes: int | None = None,
) -> Cost:
    """Count a model from its configuration: parameters, FLOPs, memory, crossovers, time.

    Nothing is loaded: no weights, no torch. FLOPs are 2 · multiply-adds of matrix products.

    Args:
        config: a config.json, a folder or an id on the hub that has one, a .gguf file, a mapping, a
            configuration of transformers, or parts from ``explicit``.
        length: new tokens of every sequence. None: the context it was trained for, 8,192 at most.
        batch: sequences.
        source_length: tokens that the encoder of an encoder–decoder reads. None: ``length``.
        cached: tokens that every sequence has behind it.
        documents, pairs, logits, attention, recompute, absorbed: see ``Workload``.
        weights: format of the weights, such as "bfloat16" or "q4_k". None: as a .gguf file stores
            them, else bfloat16.
        cache: format of keys and values. None: that in which the weights are computed.
        optimizer: of training: sgd, momentum, adam, adamw, adafactor or adam8bit.
        on: a machine of the table (``machines()``), a TOML file, or a calibrated machine: adds
            ``time``, and its memory to ``fits``.
        efficiency: share of a published peak that products reach. None: all of it.
        memory_bytes: adds ``fits``: the longest context and the largest batch in so many bytes.

    Raises:
        ModelError: a configuration that cannot be found, read or counted.
        OptionError: a number that is out of range, or a word that is not known.

    Example:
        >>> config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
        ...           "vocab_size": 50257, "n_positions": 1024}
        >>> found = cost(config, length=128)
        >>> found.parameters, found.flops
        (124439808, 32228179968)
        >>> found.crossovers[0].first
        3072
    """
    source = read_source(config)
    activation, note = _activation(source.config, source.parts)
    parts = replace(source.parts, notes=(*source.parts.notes, note)) if note else source.parts
    workload = Workload(
        length=usual_length(parts) if length is None else length,
        batch=batch, source=source_length, cached=cached, documents=tuple(documents), pairs=pairs,
        logits=logits, attention=attention, recompute=recompute, absorbed=absorbed,
    )  # fmt: skip
    stored = source.stored if weights is None else None
    named = weights or "bfloat16"
    form = format_of(named)
    options: dict[str, Any] = {"weights": named, "cache": cache, "activation": activation}
    machine = _machine(on)
    given = memory_bytes if memory_bytes is not None else _memory_of(machine)
    trains = form.plain and form.size in (2, 4) and not cached and stored is None
    stack = main_stack(parts)
    return Cost(
        name=source.where,
        parts=parts,
        workload=workload,
        forward=count(parts, workload),
        decode=_decode(parts, workload),
        absorbed=_decode(parts, replace(workload, absorbed=True))
        if any(a.latent for _, _, a in parts.attentions())
        else None,
        crossovers=crossovers(parts),
        shares=shares(stack, stack.tokens or workload.queries(stack) or workload.length),
        table=_tables(parts, workload),
        others=other_counters(parts, workload),
        beside=elementwise(parts, workload),
        inference=_as_stored(memory(parts, replace(workload, recompute="none"), **options), stored),
        training=memory(parts, workload, training=True, optimizer=optimizer, **options)
        if trains
        else None,
        time=_time(parts, workload, machine, named, cache, efficiency, stored),
        fits={}
        if given is None
        else _fits(parts, workload, given, optimizer, trains, options, stored),
        stored=source.stored,
        config=source.config,
    )


def _activation(config: Mapping[str, Any] | None, parts: Parts) -> tuple[str | None, str]:
    """The activation that a configuration names, where it says what is computed; and a note."""
    if config is None or parts.family in _OWN_ACTIVATION:
        return None, ""
    word = config.get("hidden_act") or config.get("activation_function")
    if word is None or word in KNOWN_ACTIVATIONS:
        return word, ""
    return None, f"what is kept of the activation {str(word)[:40]} is taken to be that of another"


def _as_stored(found: Memory, stored: Stored | None) -> Memory:
    """With the weights as a file holds them."""
    if stored is None:
        return found
    bits = stored.whole.bits_per_weight
    notes = (f"weights as the file stores them, {bits:.2f} bits each", *found.notes[1:])
    return replace(found, weights=stored.whole.bytes, notes=notes)


def usual_length(parts: Parts) -> int:
    """The context that a model was trained for, 8,192 tokens at most."""
    return min(main_stack(parts).context or _USUAL, _USUAL)


def main_stack(parts: Parts) -> Stack:
    """The decoder where there is one, else the first stack."""
    return parts.stack("decoder") or parts.stacks[0]


def _decode(parts: Parts, workload: Workload) -> Counts | None:
    """One more token after the pass, its logits included."""
    if parts.stack("decoder") is None:
        return None
    after = replace(
        workload, length=1, cached=workload.cached + workload.length, documents=(),
        source=workload.encoded if parts.stack("encoder") else None, recompute="none",
    )  # fmt: skip
    return count(parts, after)


def _tables(parts: Parts, workload: Workload) -> dict[str, tuple[Row, ...]]:
    """The last block of every stack: first ones may be dense where the rest are mixtures."""
    lengths = {stack.name: workload.queries(stack) or workload.length for stack in parts.stacks}
    return {
        stack.name: layer_table(stack, lengths[stack.name], -1)
        for stack in parts.stacks
        if stack.layers
    }


def _machine(on: str | Path | Hardware | None) -> Hardware | None:
    if on is None or isinstance(on, Hardware):
        return on
    named = str(on)
    return hardware_from(Path(named)) if named.endswith(".toml") else hardware(named)


def _memory_of(machine: Hardware | None) -> int | None:
    return None if machine is None else int(machine.memory.value)


def _time(
    parts: Parts,
    workload: Workload,
    machine: Hardware | None,
    weights: str,
    cache: str | None,
    efficiency: float | None,
    stored: Stored | None,
) -> Time | None:
    if machine is None:
        return None
    form = format_of(weights)
    dtype = weights if form.plain and form.size in (2, 4) else "bfloat16"
    cached: Fraction | None = None if cache is None else format_of(cache).bits
    return roofline(
        parts, workload, machine, dtype=dtype, cache_bits=cached, efficiency=efficiency,
        weight_bits=form.bits if stored is None else stored.whole.bits_per_weight,
    )  # fmt: skip


def _fits(
    parts: Parts,
    workload: Workload,
    given: int,
    optimizer: str,
    trains: bool,
    options: dict[str, Any],
    stored: Stored | None,
) -> dict[str, Fit]:
    """The longest context at this batch and the largest batch at this length."""
    found = {}
    for name, training in (("inference", False), ("training", True)):
        if training and not trains:
            continue

        def need(length: int, batch: int, training: bool = training) -> int:
            of = replace(
                workload, length=length, batch=batch, documents=(), source=None,
                recompute=workload.recompute if training else "none",
            )  # fmt: skip
            needed = memory(parts, of, training=training, optimizer=optimizer, **options)
            return _as_stored(needed, stored).total

        if main_stack(parts).tokens is None:
            found[f"{name} context"] = longest_context(need, given, batch=workload.batch)
        found[f"{name} batch"] = largest_batch(need, given, length=workload.length)
    return found
