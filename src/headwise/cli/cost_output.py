"""Where the cost of a model goes: terminal, JSON, CSV, page; and the counts that check it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headwise.errors import OptionError

if TYPE_CHECKING:
    from headwise.cost.config import Source
    from headwise.cost.hardware import Hardware
    from headwise.cost.planner import Cost

__all__ = ["Wanted", "finish", "measured_machine"]

_MOST: Final = 24  # columns of a comparison


@dataclass(frozen=True)
class Wanted:
    """What is to be written, printed and checked."""

    page: Path | None
    csv: Path | None
    json: str | None
    verify: bool
    machine: Path | None
    quiet: bool
    tokens_per_second: float | None
    devices: int
    read: tuple[str, ...]

    def check(
        self,
        sources: Sequence[Source],
        lengths: Sequence[int | None],
        *,
        calibrate: bool,
        on: str | None,
        share: float | None,
    ) -> None:
        """Raise unless what is asked fits together and everything can be written."""
        from headwise.cli.output import Outputs
        from headwise.report.numbers import counted

        if not sources:
            raise OptionError(
                "no model is named",
                allowed="a config.json, a folder, an id on the hub, a .gguf file, or explicit sizes"
                " (--d-model, --layers, --heads, --vocab)",
            )
        if len(sources) * len(lengths) > _MOST:
            asked = f"{counted(len(sources), 'model')} at {counted(len(lengths), 'length')}"
            raise OptionError(asked, allowed=f"{_MOST} columns in all")
        if calibrate and on is not None:
            raise OptionError("--calibrate and --on were given", allowed="one of the two")
        if self.machine is not None and not calibrate:
            raise OptionError("--save-machine without --calibrate", to_do="add --calibrate")
        if self.tokens_per_second is not None and not 0 < self.tokens_per_second < math.inf:
            raise OptionError(f"--tokens-per-second {self.tokens_per_second}", allowed="above 0")
        if self.devices < 1:
            raise OptionError(f"--devices {self.devices}", allowed="1 or more")
        if self.devices > 1 and self.tokens_per_second is None:
            raise OptionError("--devices without --tokens-per-second", to_do="add what they made")
        for name, value in (("tokens-per-second", self.tokens_per_second), ("efficiency", share)):
            if value is not None and on is None and not calibrate:
                raise OptionError(f"--{name} without a machine", to_do="add --on or --calibrate")
        for each in sources if self.verify else ():
            _buildable(each)
        for path, suffix in ((self.page, ".html"), (self.csv, ".csv"), (self.machine, ".toml")):
            if path is not None and path.suffix != suffix:
                raise OptionError(f"{path} as a file", allowed=f"a name that ends in {suffix}")
        inside = [Path(name) / "config.json" for name in self.read]
        Outputs(page=self.page, other=self.csv, json=self.json, read=(*self.read, *inside)).check()


def measured_machine(wanted: Wanted) -> Hardware:
    """This machine, calibrated."""
    from headwise.cli.output import progress_bar
    from headwise.observation.machine import calibrate

    with progress_bar(wanted.quiet) as progress:
        told = None if progress is None else lambda done, of: progress(done, of, "measuring")
        return calibrate(told)


def finish(costs: Sequence[Cost], wanted: Wanted, machine: Hardware | None = None) -> int:
    """Write everything asked for, print, and return the exit code: 2 where a check is not equal.

    ``machine``: what was calibrated, to be kept where that is asked.
    """
    from headwise.cost.hardware import save_hardware
    from headwise.files import whole

    checks = [_checked(cost) for cost in costs] if wanted.verify else []
    written = []
    if wanted.machine is not None and machine is not None:
        save_hardware(machine, wanted.machine)
        written.append(wanted.machine)
    if wanted.csv is not None:
        with whole(wanted.csv) as temporary:
            _write_csv(costs, temporary)
        written.append(wanted.csv)
    if wanted.page is not None:
        from headwise.report.cost_page import cost_page

        with whole(wanted.page) as temporary:
            temporary.write_text(cost_page(costs), encoding="utf-8")
        written.append(wanted.page)
    if wanted.json is not None:
        text = json.dumps(_as_json(costs, checks), indent=2, ensure_ascii=False) + "\n"
        if wanted.json == "-":
            sys.stdout.write(text)
        else:
            with whole(wanted.json) as temporary:
                temporary.write_text(text, encoding="utf-8")
            written.append(Path(wanted.json))
    if not wanted.quiet:
        _print(costs, checks, wanted, written)
    return 0 if all(check.equal for check in checks) else 2


def _print(
    costs: Sequence[Cost], checks: Sequence[Any], wanted: Wanted, written: list[Path]
) -> None:
    from rich.console import Group

    from headwise.cli.output import print_summary
    from headwise.report.cost_terminal import compared, cost_summary, used, verified

    shown = [cost_summary(costs[0]) if len(costs) == 1 else compared(costs)]
    if wanted.tokens_per_second is not None:
        shown += [used(each, wanted.tokens_per_second, wanted.devices) for each in costs]
    shown += [verified(check) for check in checks]
    print_summary(Group(*shown), written, to_stderr=wanted.json == "-")


def _write_csv(costs: Sequence[Cost], path: Path) -> None:
    import csv

    from headwise.report.cost_json import COLUMNS, csv_rows

    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(csv_rows(costs))


def _as_json(costs: Sequence[Cost], checks: Sequence[Any]) -> Any:
    from dataclasses import asdict

    from headwise.report.cost_json import to_json

    found = [to_json(cost) for cost in costs]
    for each, check in zip(found, checks, strict=False):
        each["counted"] = {**asdict(check), "equal": check.equal}
    return found[0] if len(found) == 1 else found


def _buildable(source: Source) -> None:
    """Raise unless transformers can build the model, to count it."""
    if source.config is None:
        raise OptionError(
            f"--verify of {source.where}",
            allowed="a config.json of transformers: it has to be built",
        )


def _checked(cost: Cost) -> Any:
    """The model counted on the meta device."""
    from headwise.observation.counted import verify

    work = cost.workload
    assert cost.config is not None
    return verify(cost.config, length=work.length, batch=work.batch, source=work.source)
