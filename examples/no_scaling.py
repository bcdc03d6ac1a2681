"""Train a model without the factor 1/sqrt(d_k) beside the same model with it.

    python examples/no_scaling.py

Writes a folder for each run and one health page, health-no-scaling.html, with both.
"""

import argparse
from importlib.resources import files
from pathlib import Path

import torch

import headwise as hw
from headwise.models import build, decoder_sizes
from headwise.monitoring.record import read_run
from headwise.report.health_page import write_health_page
from headwise.report.health_terminal import first_signs

TEXT = torch.tensor(list((files("headwise") / "data" / "hamlet.txt").read_bytes()))


def train(out: Path, steps: int, scale: float | None) -> None:
    torch.manual_seed(0)
    sizes = decoder_sizes(
        vocab=256, d_model=128, layers=4, heads=2, d_ff=256, context=64, scales=(scale,)
    )
    model = build(sizes, seed=0).train()  # both runs begin with the same weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with hw.Monitor(model, every=5, out=out) as monitor:
        for _ in range(steps):
            starts = torch.randint(len(TEXT) - 64, (8,))
            batch = torch.stack([TEXT[i : i + 65] for i in starts.tolist()])
            logits = model(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            monitor.log(loss=loss.item())
            optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("health-no-scaling"), help="a new folder")
    args = parser.parse_args()
    for name, scale in (("unscaled", 1.0), ("scaled", None)):
        train(args.out / name, args.steps, scale)
    unscaled, scaled = (read_run(args.out / name) for name in ("unscaled", "scaled"))
    print(first_signs(unscaled, scaled))
    print("wrote", write_health_page(args.out.with_suffix(".html"), unscaled, scaled))


if __name__ == "__main__":
    main()
