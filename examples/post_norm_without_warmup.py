"""Train a deep post-norm model without warmup beside the same model with pre-norm.

    python examples/post_norm_without_warmup.py

Writes a folder for each run and one health page, health-post-norm.html, with both.
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


def train(out: Path, steps: int, layers: int, placement: str) -> None:
    torch.manual_seed(0)
    sizes = decoder_sizes(
        vocab=256, d_model=64, layers=layers, heads=4, d_ff=192, context=64,
        norm="layer", placement=placement,
    )  # fmt: skip
    model = build(sizes, seed=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)  # from the first step on
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
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--out", type=Path, default=Path("health-post-norm"), help="a new folder")
    args = parser.parse_args()
    for placement in ("post", "pre"):
        train(args.out / placement, args.steps, args.layers, placement)
    post, pre = (read_run(args.out / placement) for placement in ("post", "pre"))
    print(first_signs(post, pre))
    print("wrote", write_health_page(args.out.with_suffix(".html"), post, pre))


if __name__ == "__main__":
    main()
