"""``headwise show``: the page and the summary of a saved scan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwise.cli import options as o

__all__ = ["show"]


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A saved scan: .nc or .zarr.")],
    out: o.Out = None,
    json: o.Json = None,
    quiet: o.Quiet = False,
) -> int:
    """Write the page of a saved scan and print its summary."""
    from headwise.cli.output import Outputs, finish, page_name
    from headwise.results.io import load
    from headwise.results.validate import about

    dataset = load(file)
    page = out or page_name(str(about(dataset).get("model", file.stem)))
    outputs = Outputs(page=page, json=json, quiet=quiet, read=(file,))
    outputs.check()
    return finish(dataset, outputs)
