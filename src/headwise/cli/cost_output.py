"""Where the cost of a model goes: terminal, JSON, CSV, page; and the counts that check it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headwise.errors import OptionError

if TYPE_CHECKING:
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
        self, sources: Sequence[Any], lengths: Sequence[Any], calibrate: bool, on: str | None
    ) -> None:
        """Raise unless what is asked fits together and everything can be written."""
        from headwise.cli.output import Outputs

        if not sources:
            raise OptionError(
                "no model is named",
                allowed="a config.json, a folder, an id on the hub, a .gguf file, or explicit sizes"
                " (--d-model, --layers, --heads, --vocab)",
            )
        if len(sources) * len(lengths) > _MOST:
            raise OptionError(
                f"{len(sources)} models at {len(lengths)} lengths", allowed=f"{_MOST} in all"
            )
        if calibrate and on is not None:
            raise OptionError("--calibrate and --on were given", allowed="one of the two")
        if self.machine is not None and not calibrate:
            raise OptionError("--save-machine without --calibrate", to_do="add --calibrate")
        if self.tokens_per_second is not None and on is None and not calibrate:
            raise OptionError(
                "--tokens-per-second without a machine", to_do="add --on or --calibrate"
            )
        for path, suffix in ((self.page, ".html"), (self.csv, ".csv"), (self.machine, ".toml")):
            if path is not None and path.suffix != suffix:
                raise OptionError(f"{path} as a file", allowed=f"a name that ends in {suffix}")
        Outputs(page=self.page, other=self.csv, json=self.json, read=self.read).check()


def measured_machine(wanted: Wanted) -> Hardware:
    """Calibrate, and keep what was measured where that is asked."""
    from headwise.cli.output import progress_bar
    from headwise.cost.hardware import save_hardware
    from headwise.observation.machine import calibrate

    with progress_bar(wanted.quiet) as progress:
        told = None if progress is None else lambda done, of: progress(done, of, "measuring")
        found = calibrate(told)
    if wanted.machine is not None:
        save_hardware(found, wanted.machine)
    return found


def finish(costs: Sequence[Cost], wanted: Wanted) -> int:
    """Write everything asked for, print, and return the exit code: 2 where a check is not equal."""
    from headwise.files import whole

    written = [] if wanted.machine is None else [wanted.machine]
    if wanted.csv is not None:
        with whole(wanted.csv) as temporary:
            _write_csv(costs, temporary)
        written.append(wanted.csv)
    if wanted.page is not None:
        from headwise.report.cost_page import cost_page

        with whole(wanted.page) as temporary:
            temporary.write_text(cost_page(costs), encoding="utf-8")
        written.append(wanted.page)
    checks = [_checked(cost) for cost in costs] if wanted.verify else []
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


def _checked(cost: Cost) -> Any:
    """The model counted on the meta device; only a configuration of transformers can be built."""
    if cost.config is None:
        raise OptionError(
            f"--verify of {cost.name}", allowed="a config.json of transformers: it has to be built"
        )
    from headwise.observation.counted import verify

    work = cost.workload
    return verify(cost.config, length=work.length, batch=work.batch, source=work.source)
