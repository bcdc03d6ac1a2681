"""Where results go: checked before the work, written after it, and what the terminal shows."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.errors import OptionError

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["Outputs", "exit_code", "finish", "page_name", "print_summary", "progress_bar"]


@dataclass(frozen=True)
class Outputs:
    """Where the page, the scan and the JSON go; None leaves one out, ``-`` is standard output."""

    page: Path | None = None
    scan: Path | None = None
    other: Path | None = None  # whose suffix its own writer checks
    json: str | None = None
    quiet: bool = False
    read: tuple[str | Path | None, ...] = ()  # what must not be written over: model, text, scan

    def check(self) -> None:
        """Raise unless everything can be written; asked before the work begins."""
        from headwise.files import writable

        file = None if self.json in (None, "-") else Path(str(self.json))
        if "-" in (str(self.page), str(self.other)):
            raise OptionError("--out is -", allowed="the name of a file")
        named = [path for path in (self.page, self.scan, self.other, file) if path is not None]
        absolute = [path.expanduser().absolute() for path in named]
        for path in absolute:
            if absolute.count(path) > 1:
                raise OptionError(f"two results are to be written to {path}", allowed="one each")
        sources = [Path(name).expanduser() for name in self.read if name]
        for path in named:
            if any(source.exists() and _same(source, path) for source in sources):
                raise OptionError(
                    f"{path} is read, so it cannot be written over", to_do="name another file"
                )
        for target in (self.page, self.other, file):
            if target is not None:
                writable(target)
        if self.scan is not None:
            from headwise.results.io import save_path  # it loads torch and xarray

            save_path(self.scan)


def _same(source: Path, target: Path) -> bool:
    target = target.expanduser()
    return target.exists() and source.samefile(target)


def page_name(model: str, start: str = "headwise") -> Path:
    """``<start>-<model>.html`` in the current folder.

    Example:
        >>> str(page_name("models/SmolLM2.Q4_1.gguf"))
        'headwise-SmolLM2.Q4_1.html'
    """
    path = Path(model).expanduser()
    name = path.resolve().name if path.exists() else model.rstrip("/").rsplit("/", 1)[-1]
    name = re.sub(r"[^\w.-]+", "-", name.removesuffix(".gguf")).strip("-.")
    return Path(f"{start}-{name or 'model'}.html")


def finish(dataset: xr.Dataset, outputs: Outputs) -> int:
    """Write everything asked for, print the summary, and return the exit code."""
    from headwise.files import whole
    from headwise.report.findings import findings, to_json
    from headwise.report.page import write_report
    from headwise.report.terminal import summary
    from headwise.results.io import save

    written = [] if outputs.scan is None else [save(dataset, outputs.scan)]
    found = findings(dataset)
    if outputs.page is not None:
        written.append(write_report(dataset, outputs.page))
    if outputs.json is not None:
        text = json.dumps(to_json(dataset, found), indent=2, ensure_ascii=False) + "\n"
        if outputs.json == "-":
            sys.stdout.write(text)
        else:
            with whole(outputs.json) as temporary:
                temporary.write_text(text, encoding="utf-8")
            written.append(Path(outputs.json))
    if not outputs.quiet:
        print_summary(summary(dataset, found), written, to_stderr=outputs.json == "-")
    return exit_code(dataset)


def exit_code(dataset: xr.Dataset) -> int:
    """0; 2 with a line on stderr when layers are not finite; 130 when the run was stopped."""
    from headwise.results.validate import about

    reasons = [str(reason) for reason in dataset["non_finite"].to_numpy() if reason]
    if reasons:
        total = dataset.sizes["layer"]
        verb = "is" if len(reasons) == 1 else "are"
        print(
            f"headwise: {len(reasons)} of {total} attention layers {verb} not finite:"
            f" {reasons[0]}; the results hold the other {total - len(reasons)}",
            file=sys.stderr,
        )
        return 2
    weights = about(dataset).get("non_finite_weights")
    if weights:
        more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        print(
            f"headwise: NaN or infinity in the weights {weights[0]}{more}; no attention layer was"
            " reached by it",
            file=sys.stderr,
        )
        return 2
    if about(dataset).get("interrupted"):
        print("headwise: stopped; the results hold what was measured until then", file=sys.stderr)
        return 130
    return 0


def print_summary(shown: Any, written: list[Path], *, to_stderr: bool) -> None:
    """What a run found, and the files that were written."""
    from rich.console import Console

    console = Console(stderr=to_stderr)
    console.print(shown)
    for path in written:
        console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar on stderr while the block runs; None when quiet or when stderr is not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading the model", total=None)

        def advance(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield advance
