"""A text and a config so small that a run takes a fraction of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwise.training.log import read_log

TEXT = "".join(
    f"{i}. The quick brown fox {'jumps' if i % 3 else 'leaps'} over {i * i} lazy dogs.\n"
    for i in range(97)
)


def settings(**changed: Any) -> dict[str, Any]:
    return {
        "tokenizer": "bytes",
        "context": 23,
        "batch": 6,
        "steps": 7,
        "lr": 3e-3,
        "warmup": 2,
        "repeated": 0.3,
        "shortest_period": 3,
        "longest_period": 5,
        "eval_every": 3,
        "eval_windows": 3,
        "save_every": 3,
        "log_every": 1,
        "device": "cpu",
        "model": {"d_model": 12, "layers": 2, "heads": 3, "d_ff": 17},
        **changed,
    }


def text_file(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text(TEXT)
    return path


def losses(folder: Path) -> list[dict[str, Any]]:
    """The log without what the clock says."""
    return [
        {name: value for name, value in line.items() if name != "seconds"}
        for line in read_log(folder)
    ]
