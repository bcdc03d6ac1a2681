"""One layer at 32,768 positions, and the memory it took beyond the model.

    python examples/long_text.py MODEL [--layer N] [--tokens N]

The layers above the one that is looked at are cut off, so that a laptop gets there in a minute. The
weights of one head at this length would be 4 GiB in float32; here no such array exists.
"""

import argparse
import resource
from pathlib import Path

from torch import nn

import headwise as hw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a decoder: folder, hub id or .gguf file")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--text", type=Path, help="a text file; without it, numbers are counted")
    options = parser.parse_args()
    text = options.text.read_text() if options.text else counted(options.tokens)
    loaded = hw.load_model(options.model)
    blocks = next(part for part in loaded.model.modules() if isinstance(part, nn.ModuleList))
    del blocks[options.layer + 1 :]
    loaded.model.config.num_hidden_layers = len(blocks)

    before = peak()
    scan = hw.scan(loaded, text, tokens=options.tokens, layers=[options.layer], allow_long=True)
    print(scan)
    print()
    heads = scan.dataset.sizes["head"]
    print(f"peak memory beyond the loaded model: {(peak() - before) / 2**20:,.0f} MiB")
    print(f"the {heads} matrices of weights:     {heads * options.tokens**2 / 2**18:,.0f} MiB")


def counted(tokens: int) -> str:
    """A text of at least so many tokens."""
    return " ".join(f"{number}" for number in range(tokens))


def peak() -> int:
    """The most memory that this process has held, in bytes (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
