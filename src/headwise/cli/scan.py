"""``headwise scan``: measure a model and save the data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli import options as o
from headwise.errors import OptionError

__all__ = ["scan"]


def scan(
    model: o.Model = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to save: .nc or .zarr. Required.")
    ] = None,
    text: o.Text = None,
    tokens: o.Tokens = None,
    batch: o.Batch = 1,
    window: o.Window = None,
    layers: o.Layers = None,
    heads: o.Heads = None,
    rows: o.Rows = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    keep_rows: Annotated[
        bool, typer.Option("--keep-rows", help="Keep the statistics of every query row.")
    ] = False,
    gradients: o.Gradients = False,
    allow_long: o.AllowLong = False,
    trust_remote_code: o.TrustRemoteCode = False,
    quiet: o.Quiet = False,
) -> int:
    """Measure MODEL over a text and save the data set (.nc or .zarr)."""
    if out is None:
        named = f" {model}" if model else ""
        raise OptionError(
            "--out is missing", to_do=f"for example: headwise scan{named} --out scan.nc"
        )
    arguments = o.measuring(
        text=text,
        tokens=tokens,
        batch=batch,
        window=window,
        layers=layers,
        heads=heads,
        rows=rows,
        dtype=dtype,
        device=device,
        keep_rows=keep_rows,
        gradients=gradients,
        allow_long=allow_long,
        trust_remote_code=trust_remote_code,
    )
    from headwise.cli.output import Outputs, exit_code, progress_bar

    Outputs(scan=out, read=(model, text)).check()
    from headwise.observation.run import scan as measure
    from headwise.results.io import save

    with progress_bar(quiet) as progress:
        measured = measure(model or None, progress=progress, **arguments)
    path = save(measured.dataset, out)
    if not quiet:
        typer.echo(f"{measured}\nwrote {path}")
    return exit_code(measured.dataset)
