"""A learning rate at which attention logits explode, and two repairs: QK-norm and QK-Clip.

    python examples/logits_explode.py

Writes a folder for each run and one health page, health-logits.html, with all three.
"""

import argparse
from importlib.resources import files
from pathlib import Path

import torch

import headwise as hw
from headwise.models import build, decoder_sizes
from headwise.monitoring.qk_clip import qk_clip
from headwise.monitoring.record import read_run
from headwise.report.health_page import write_health_page
from headwise.report.health_terminal import first_signs

TEXT = torch.tensor(list((files("headwise") / "data" / "hamlet.txt").read_bytes()))
TAU = 30.0  # the largest logit that QK-Clip leaves


def train(out: Path, steps: int, repair: str) -> None:
    torch.manual_seed(0)
    shape = {"vocab": 256, "d_model": 64, "layers": 4, "heads": 4, "d_ff": 192, "context": 64}
    norm = "head" if repair == "qk-norm" else None
    model = build(decoder_sizes(**shape, qk_norm=norm), seed=0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-2)
    every = 1 if repair == "qk-clip" else 5  # the clip needs the logits of every step
    with hw.Monitor(model, every=every, out=out) as monitor:
        for _ in range(steps):
            starts = torch.randint(len(TEXT) - 64, (8,))
            batch = torch.stack([TEXT[i : i + 65] for i in starts.tolist()])
            logits = model(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            monitor.log(loss=loss.item())
            optimizer.step()
            if repair == "qk-clip":
                qk_clip(model, monitor, tau=TAU)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("health-logits"), help="a new folder")
    args = parser.parse_args()
    names = ("plain", "qk-norm", "qk-clip")
    for name in names:
        train(args.out / name, args.steps, name)
    print(first_signs(*(runs := [read_run(args.out / name) for name in names])))
    print("wrote", write_health_page(args.out.with_suffix(".html"), *runs))


if __name__ == "__main__":
    main()
