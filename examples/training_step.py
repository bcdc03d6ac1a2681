"""Observe one training step: the largest logit and the gradient of every layer.

    python examples/training_step.py MODEL

Attention under observation has its own backward pass, so that the step is an ordinary one.
"""

import argparse
import math

import torch

import headwise as hw

TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a decoder: folder, hub id or .gguf file")
    loaded = hw.load_model(parser.parse_args().model, dtype="float32")
    model = loaded.model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = loaded.tokenizer(TEXT, return_tensors="pt").input_ids

    with hw.observe(model) as scan:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    print(f"loss {loss.item():.3f}")
    print("layer  largest logit  entropy share  gradient of its attention")
    for index, module in enumerate(scan.dataset["module"].to_numpy()):
        layer = scan.dataset.isel(layer=index)
        largest, entropy = float(layer.max_logit.max()), float(layer.entropy_fraction.mean())
        gradients = [p.grad for p in model.get_submodule(module).parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        print(f"{int(layer.number):5d}  {largest:13.2f}  {entropy:13.3f}  {norm:.3e}")

    for finding in hw.findings(scan):
        if finding.severity != "note":
            print(f"{finding.severity}: {finding.sentence}")
    optimiser.step()


if __name__ == "__main__":
    main()
