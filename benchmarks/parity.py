"""The parity table: every family that is loaded, every check, the largest error.

    python -m benchmarks.parity [--only WORD] [--real FOLDER]

Tiny random models of transformers are saved, loaded by ``headwise.load`` and run beside the
original, in float32 on the CPU. An error is max |ours − theirs| / max |theirs| over the logits of
real tokens (of encoders: over their streams too). Prints Markdown. --only: cases whose name holds
the word. --real: also the decoder under FOLDER/smollm2 (a minute).
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers

import headwise as hw
from tests.parity.loaded_encoders import ENCODER_CASES
from tests.parity.loaded_models import CASES, Case, errors
from tests.parity.loaded_real import smollm2

BOUND = 1e-5


def table(title: str, rows: Mapping[str, Mapping[str, float]]) -> float:
    """Print one table, a row for each case; the largest error in it."""
    checks = list(dict.fromkeys(name for row in rows.values() for name in row))
    print(f"\n| {title} | " + " | ".join(checks) + " |")
    print("|---" * (len(checks) + 1) + "|")
    for name, row in rows.items():
        cells = (f"{row[check]:.1e}" if check in row else "–" for check in checks)
        print(f"| {name} | " + " | ".join(cells) + " |")
    return max(error for row in rows.values() for error in row.values())


def measured(cases: list[Case], word: str) -> dict[str, dict[str, float]]:
    found = {}
    for case in cases:
        if word in case.name:
            print(case.name, file=sys.stderr, flush=True)
            found[case.name] = dict(errors(case))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--real", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions = f"headwise {hw.__version__}, torch {torch.__version__}"
    print(f"{versions}, transformers {transformers.__version__}, {platform.machine()}, float32")
    tables = {
        "decoder": measured(CASES, options.only),
        "encoder, encoder–decoder": measured(ENCODER_CASES, options.only),
    }
    if options.real is not None:
        tables["real model"] = {"SmolLM2-135M (GGUF)": smollm2(options.real / "smollm2")}
    worst = max(table(title, rows) for title, rows in tables.items() if rows)
    print(f"\nLargest error {worst:.1e}; bound {BOUND:.0e}.")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
