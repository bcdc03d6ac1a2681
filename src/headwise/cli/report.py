"""``headwise report``: measure a model and write the page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli import options as o

__all__ = ["report"]


def report(
    model: o.Model = None,
    text: o.Text = None,
    tokens: o.Tokens = None,
    batch: o.Batch = 1,
    window: o.Window = None,
    layers: o.Layers = None,
    heads: o.Heads = None,
    rows: o.Rows = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    out: o.Out = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also save the measurement, as .nc or .zarr."),
    ] = None,
    json: o.Json = None,
    gradients: o.Gradients = False,
    no_circuits: Annotated[
        bool, typer.Option("--no-circuits", help="Leave out what the heads are made of.")
    ] = False,
    no_theorems: Annotated[
        bool, typer.Option("--no-theorems", help="Leave out which statements of the theory hold.")
    ] = False,
    allow_long: o.AllowLong = False,
    trust_remote_code: o.TrustRemoteCode = False,
    quiet: o.Quiet = False,
) -> int:
    """Measure MODEL over a text and write one self-contained HTML page."""
    arguments = o.measuring(
        text=text,
        tokens=tokens,
        batch=batch,
        window=window,
        layers=layers,
        heads=heads,
        rows=rows,
        gradients=gradients,
        allow_long=allow_long,
    )
    from headwise.cli.output import Outputs, finish, page_name, progress_bar
    from headwise.observation.reading import EMBEDDED

    outputs = Outputs(
        page=out or page_name(model or EMBEDDED),
        scan=save,
        json=json,
        quiet=quiet,
        read=(model, text),
    )
    outputs.check()
    from headwise.circuits.dataset import add_circuits, text_reader
    from headwise.observation.costed import add_cost
    from headwise.observation.run import opened
    from headwise.observation.run import scan as measure
    from headwise.results.validate import about
    from headwise.theorems.reported import add_theorems

    with progress_bar(quiet) as progress:
        loaded = opened(model or None, dtype, device, trust_remote_code)
        reader = None if no_circuits else text_reader(loaded, arguments["heads"])
        each = None if reader is None else reader.absorb
        scan = measure(loaded, progress=progress, each=each, **arguments)
        dataset = scan.dataset
        if not about(dataset)["interrupted"]:
            try:
                if not no_circuits:
                    on_text = None if reader is None else reader.finish(scan)
                    dataset = add_circuits(dataset, loaded, on_text=on_text, progress=progress)
                dataset = add_cost(dataset, loaded)
                if not no_theorems:
                    dataset = add_theorems(
                        dataset, loaded, text=arguments["text"], tokens=tokens, progress=progress
                    )
            except KeyboardInterrupt:  # the scan is whole
                scan.facts["interrupted"] = True
                dataset = scan.dataset
    return finish(dataset, outputs)
