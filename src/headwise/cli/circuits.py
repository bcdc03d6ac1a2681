"""``headwise circuits``: what every head of a model is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli import options as o

__all__ = ["circuits"]


def circuits(
    model: o.Model = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Also what heads do on a text: UTF-8; - is standard input. [no text]",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens of the text to read. [the model's context, 2,048 at most]",
        ),
    ] = None,
    window: o.Window = None,
    allow_long: o.AllowLong = False,
    layers: Annotated[
        str | None, typer.Option(metavar="LIST", help="Layers to read, such as 0,3-5. [all]")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="What MODEL was tuned from: also the change."),
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A PEFT LoRA adapter for MODEL: also its change."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The page (.html), the data set (.nc, .zarr) or a row per head (.csv)."
            " [headwise-circuits-MODEL.html]",
        ),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE.json]",
            help="A row per head as JSON, to standard output unless a FILE is named.",
        ),
    ] = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    trust_remote_code: o.TrustRemoteCode = False,
    quiet: o.Quiet = False,
) -> int:
    """Take the heads of MODEL apart: W_QK and W_OV, what they copy, and which heads compose."""
    reading = o.reading(text=text, tokens=tokens, window=window)
    numbers = o.numbers("--layers", layers)
    from headwise.cli.circuit_output import START, check, finish
    from headwise.cli.output import page_name, progress_bar
    from headwise.observation.reading import EMBEDDED

    target = out or page_name(model or EMBEDDED, START)
    check(target, json, read=(model, text, base, adapter))
    from headwise.circuits.dataset import circuits as read

    with progress_bar(quiet) as progress:
        found = read(
            model or None,
            **reading,
            allow_long=allow_long,
            layers=numbers,
            base=base,
            adapter=adapter,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    return finish(found.dataset, target, json, quiet=quiet)
