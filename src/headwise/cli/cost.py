"""``headwise cost``: what a model costs, from its configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli import options as o

__all__ = ["cost"]


def _size(meaning: str) -> Any:
    return typer.Option(metavar="N", help=meaning)


def cost(
    configs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG...",
            help="A config.json, a folder or the id of a model on the hub that has one, or a .gguf"
            " file; several are compared. [the sizes given as options]",
        ),
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Tokens of a sequence, such as 8192 or 8k; several, such as 2k,8k,128k, are"
            " compared. [the trained context, 8,192 at most]",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences.")] = 1,
    source: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens that an encoder beside a decoder reads. [length]"),
    ] = None,
    cached: Annotated[int, typer.Option(metavar="N", help="Tokens cached before.")] = 0,
    documents: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Lengths of documents packed into the sequence."),
    ] = None,
    pairs: Annotated[
        str, typer.Option(metavar="all|visible", help="Count n² pairs, or those the mask shows.")
    ] = "all",
    logits: Annotated[
        str, typer.Option(metavar="all|last", help="Logits of which positions.")
    ] = "all",
    attention: Annotated[
        str,
        typer.Option(metavar="fused|materialised", help="Whether the n × n scores are kept."),
    ] = "fused",
    recompute: Annotated[
        str,
        typer.Option(metavar="none|selective|full", help="What a backward pass computes again."),
    ] = "none",
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="float32, bfloat16, int8, q4_k, mxfp4, …. [as a .gguf stores them, or bfloat16]",
        ),
    ] = None,
    cache: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Keys and values. [as computed]")
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(metavar="NAME", help="sgd, momentum, adam, adamw, adafactor or adam8bit."),
    ] = "adamw",
    on: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINE", help="Least times on a machine of the table, or of a .toml file."
        ),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine, for the least times.")
    ] = False,
    save_machine: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Keep what --calibrate measured, for --on."),
    ] = None,
    efficiency: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Of a published peak. [1]")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What fits in it, such as 80GB. [that of the machine]"),
    ] = None,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(metavar="X", help="Measured in training: the utilisation of --on (MFU)."),
    ] = None,
    devices: Annotated[int, typer.Option(metavar="N", help="Machines that made them.")] = 1,
    d_model: Annotated[
        int | None, _size("Sizes in place of a CONFIG: width of the stream.")
    ] = None,
    layers: Annotated[int | None, _size("Blocks.")] = None,
    heads: Annotated[int | None, _size("Query heads.")] = None,
    vocab: Annotated[int | None, _size("Tokens of the vocabulary.")] = None,
    kv_heads: Annotated[
        int | None, _size("Heads of keys and values. [as many as query heads]")
    ] = None,
    d_head: Annotated[int | None, _size("Width of a head. [d_model / heads]")] = None,
    d_ff: Annotated[int | None, _size("Width of the MLP. [4 · d_model]")] = None,
    window: Annotated[
        int | None, _size("Keys that a token sees, its own included. [all before]")
    ] = None,
    context: Annotated[int | None, _size("Tokens it is trained for. [not known]")] = None,
    experts: Annotated[
        int | None, _size("MLPs in each block, of width d_ff each. [one MLP]")
    ] = None,
    experts_used: Annotated[int | None, _size("Of them, by one token. [1]")] = None,
    shared_experts: Annotated[
        int | None, _size("Experts beside them, used by every token. [0]")
    ] = None,
    gated: Annotated[bool, typer.Option("--gated", help="Three matrices in the MLP.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="Biases, and LayerNorm.")] = False,
    tied: Annotated[bool, typer.Option("--tied", help="The embedding makes the logits.")] = False,
    encoder: Annotated[bool, typer.Option("--encoder", help="No causal mask.")] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Count the model on the meta device too (loads torch)."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="A page with plots. [none]")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="A row for each part of each layer.")
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE.json]", help="As JSON, to standard output unless a FILE is named."
        ),
    ] = None,
    quiet: o.Quiet = False,
) -> int:
    """Count CONFIG: parameters, FLOPs, memory, crossovers and least times. No weights, no torch."""
    from headwise.cli.cost_options import lengths, memory_bytes, packed, sizes
    from headwise.cli.cost_output import Wanted, finish, measured_machine
    from headwise.cost.config import read_source
    from headwise.cost.explicit import explicit
    from headwise.cost.planner import cost as count

    given = sizes({
        "d_model": d_model, "layers": layers, "heads": heads, "vocab": vocab, "kv_heads": kv_heads,
        "d_head": d_head, "d_ff": d_ff, "window": window, "context": context, "experts": experts,
        "experts_used": experts_used, "shared_experts": shared_experts, "gated": gated or None,
        "bias": bias or None, "tied": tied or None, "causal": False if encoder else None,
    })  # fmt: skip
    named: list[Any] = [*(configs or ()), *(() if given is None else (explicit(**given),))]
    sources = [read_source(each) for each in named]
    wanted = Wanted(
        page=out, csv=csv, json=json, verify=verify, machine=save_machine, quiet=quiet,
        tokens_per_second=tokens_per_second, devices=devices, read=tuple(configs or ()),
    )  # fmt: skip
    every = lengths(length)
    wanted.check(sources, every, calibrate=calibrate, on=on, share=efficiency)
    measured = measured_machine(wanted) if calibrate else None
    costs = [
        count(
            each,
            length=tokens,
            batch=batch,
            source_length=source,
            cached=cached,
            documents=packed(documents),
            pairs=pairs,
            logits=logits,
            attention=attention,
            recompute=recompute,
            weights=weights,
            cache=cache,
            optimizer=optimizer,
            on=on if measured is None else measured,
            efficiency=efficiency,
            memory_bytes=memory_bytes(memory),
        )
        for each in sources
        for tokens in every
    ]
    return finish(costs, wanted, measured)
