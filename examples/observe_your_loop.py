"""Measure a plain PyTorch loop: padded batches of texts through a transformers model.

    python examples/observe_your_loop.py MODEL

The loop stays what it was; the ``with`` line is all that is added.
"""

import argparse

import torch

import headwise as hw

TEXTS = [
    "The cat sat on the mat, and the dog sat beside the cat.",
    "One, two, three, four, five.",
    "A rose is a rose is a rose.",
    "Call me Ishmael. Some years ago, never mind how long precisely, I went to sea.",
]
BATCH = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder, hub id or .gguf file")
    loaded = hw.load_model(parser.parse_args().model)
    model, tokenizer = loaded.model, loaded.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    with hw.observe(model, tokenizer=tokenizer) as scan, torch.no_grad():
        for start in range(0, len(TEXTS), BATCH):
            batch = tokenizer(TEXTS[start : start + BATCH], return_tensors="pt", padding=True)
            model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)

    print(scan)
    print()
    heads = scan.to_dataframe()
    print("the heads that look most at the token before:")
    columns = ["layer", "head", "previous_mass", "entropy", "distance"]
    print(heads.nlargest(5, "previous_mass")[columns].to_string(index=False))


if __name__ == "__main__":
    main()
