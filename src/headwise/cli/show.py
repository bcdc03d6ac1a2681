"""``headwise show``: the page and the summary of a saved scan, or of saved circuits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli import options as o

__all__ = ["show"]


def show(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A saved scan or set of circuits: .nc or .zarr.")
    ],
    out: o.Out = None,
    json: o.Json = None,
    quiet: o.Quiet = False,
) -> int:
    """Write the page of a saved scan, or of saved circuits, and print its summary."""
    from headwise.cli import circuit_output
    from headwise.cli.output import Outputs, finish, page_name
    from headwise.results.io import load_either
    from headwise.results.validate import about, holds_circuits

    dataset = load_either(file)
    model = str(about(dataset).get("model", file.stem))
    if holds_circuits(dataset):
        page = out or page_name(model, circuit_output.START)
        circuit_output.check(page, json, read=(file,))
        return circuit_output.finish(dataset, page, json, quiet=quiet)
    page = out or page_name(model)
    outputs = Outputs(page=page, json=json, quiet=quiet, read=(file,))
    outputs.check()
    return finish(dataset, outputs)
