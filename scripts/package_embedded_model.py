"""Turn the run that trained the embedded model into what the package and its page in docs hold.

    python scripts/package_embedded_model.py RUN_DIR

Writes ``src/headwise/data/model`` (the weights rounded once to float16, the architecture and the
tokenizer) and, beside the config of the run, ``losses.csv`` and ``losses.svg``.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

import torch

from headwise.models.checkpoints import load, save
from headwise.models.embedded import embedded_folder
from headwise.training.log import read_log

DOCS = Path(__file__).parent.parent / "docs" / "explanation" / "embedded-model"
COLUMNS = ("step", "tokens", "loss", "repeated_loss", "validation_loss", "lr", "grad_norm")
CURVES = {"loss": "#4269d0", "repeated_loss": "#c9410b", "validation_loss": "#111"}
NAMES = {"loss": "text", "repeated_loss": "repeated tokens", "validation_loss": "validation"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    found = load(run)
    save(found.model.to(torch.float16), embedded_folder(), tokenizer=found.tokenizer)
    rows = [row for row in read_log(run) if "loss" in row]
    with (DOCS / "losses.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    (DOCS / "losses.svg").write_text(picture(rows), encoding="utf-8")
    size = sum(file.stat().st_size for file in embedded_folder().iterdir())
    print(f"{embedded_folder()}: {size / 1e6:.2f} MB; last step {rows[-1]['step']}")


def picture(rows: list[dict[str, float]], width: int = 720, height: int = 320) -> str:
    """The losses by step, as SVG."""
    left, right, top, bottom = 48, 150, 16, 40
    last = rows[-1]["step"]
    most = max(math.ceil(row[name]) for row in rows for name in CURVES if row.get(name))

    def x(step: float) -> float:
        return left + (width - left - right) * step / last

    def y(loss: float) -> float:
        return top + (height - top - bottom) * (1 - loss / most)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for loss in range(most + 1):
        at = f"{y(loss):.1f}"
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{at}" y2="{at}" stroke="#ddd"/>'
            f'<text x="{left - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>'
        )
    for step in range(0, int(last) + 1, 400):
        parts.append(
            f'<text x="{x(step):.1f}" y="{height - 20}" text-anchor="middle">{step}</text>'
        )
    ends = sorted(
        (next(row[name] for row in reversed(rows) if row.get(name)), name) for name in CURVES
    )
    at = float(height)
    for end, name in ends:
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        line = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{CURVES[name]}" stroke-width="1.5"/>'
        )
        at = min(at - 18, y(end))
        parts.append(
            f'<text x="{width - right + 8}" y="{at + 4:.1f}" fill="{CURVES[name]}">'
            f"{NAMES[name]} {end:.2f}</text>"
        )
    parts.append(
        f'<text x="{(left + width - right) / 2}" y="{height - 4}" text-anchor="middle">step</text>'
        f'<text x="{left}" y="12">loss, nats per token</text></svg>\n'
    )
    return "\n".join(parts)


if __name__ == "__main__":
    main()
