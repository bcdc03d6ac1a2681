"""``headwise cost``: what a model costs, from its configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headwise.cli import options as o

__all__ = ["cost"]

Size = Annotated[int | None, typer.Option(metavar="N")]


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
    d_model: Size = None,
    layers: Size = None,
    heads: Size = None,
    vocab: Size = None,
    kv_heads: Size = None,
    d_head: Size = None,
    d_ff: Size = None,
    window: Size = None,
    context: Size = None,
    experts: Size = None,
    experts_used: Size = None,
    shared_experts: Size = None,
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
    from headwise.cost.explicit import explicit
    from headwise.cost.planner import cost as count

    given = sizes({
        "d_model": d_model, "layers": layers, "heads": heads, "vocab": vocab, "kv_heads": kv_heads,
        "d_head": d_head, "d_ff": d_ff, "window": window, "context": context, "experts": experts,
        "experts_used": experts_used, "shared_experts": shared_experts, "gated": gated,
        "bias": bias, "tied": tied, "causal": False if encoder else None,
    })  # fmt: skip
    sources: list[Any] = [*(configs or ()), *(() if given is None else (explicit(**given),))]
    wanted = Wanted(
        page=out, csv=csv, json=json, verify=verify, machine=save_machine, quiet=quiet,
        tokens_per_second=tokens_per_second, devices=devices, read=tuple(configs or ()),
    )  # fmt: skip
    every = lengths(length)
    wanted.check(sources, every, calibrate, on)
    machine = measured_machine(wanted) if calibrate else on
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
            on=machine,
            efficiency=efficiency,
            memory_bytes=memory_bytes(memory),
        )
        for each in sources
        for tokens in every
    ]
    return finish(costs, wanted)
