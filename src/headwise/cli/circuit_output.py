"""Where the circuits of a model go, and what the terminal shows of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headwise.cli.output import Outputs, print_summary

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["START", "check", "finish"]

START: Final = "headwise-circuits"  # of the names of their pages


def check(out: Path, target: str | None, read: tuple[str | Path | None, ...]) -> None:
    """Raise unless everything can be written; asked before the work begins."""
    if out.suffix == ".html":
        Outputs(page=out, json=target, read=read).check()
    else:
        Outputs(other=out, json=target, read=read).check()
        from headwise.circuits.dataset import circuits_path

        circuits_path(out)


def finish(dataset: xr.Dataset, out: Path, target: str | None, *, quiet: bool) -> int:
    """Write everything asked for, print the summary, and return the exit code."""
    from headwise.files import whole
    from headwise.report.circuit_facts import to_json
    from headwise.report.circuit_terminal import circuit_summary
    from headwise.report.page import write_report

    if out.suffix == ".html":
        written = [write_report(dataset, out)]
    else:
        from headwise.circuits.dataset import Circuits

        written = [Circuits(dataset).save(out)]
    if target is not None:
        text = json.dumps(to_json(dataset), indent=2, ensure_ascii=False) + "\n"
        if target == "-":
            sys.stdout.write(text)
        else:
            with whole(target) as temporary:
                temporary.write_text(text, encoding="utf-8")
            written.append(Path(target))
    if not quiet:
        print_summary(circuit_summary(dataset), written, to_stderr=target == "-")
    return 0
