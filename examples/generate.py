"""Generate under observation: what does each new token look at?

    python examples/generate.py MODEL [PROMPT] [--tokens N]

For every token that was read while generating: the share of the weight, mean over all heads, on the
first token, on the token before, and on itself; and the token that most heads look at most.
"""

import argparse
from collections import Counter

import headwise as hw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a decoder: folder, hub id or .gguf file")
    parser.add_argument("prompt", nargs="?", default="The capital of France is Paris, and")
    parser.add_argument("--tokens", type=int, default=12)
    options = parser.parse_args()
    loaded = hw.load_model(options.model)
    prompt = loaded.tokenizer(options.prompt, return_tensors="pt")
    inputs = {"input_ids": prompt.input_ids, "attention_mask": prompt.attention_mask}

    with hw.observe(loaded.model, tokenizer=loaded.tokenizer, keep_rows=True) as scan:
        new = options.tokens
        loaded.model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False)

    rows = scan.dataset  # one query row per token that was read, the last one being never read
    tokens = rows["token"].to_numpy()
    prompted = prompt.input_ids.shape[1]
    print(f"{'token':>16}  first  before    self  most heads look at")
    for i in range(len(tokens)):
        shares = [
            float(rows[name].isel(query=i).mean())
            for name in ("sink_mass_rows", "previous_mass_rows", "self_mass_rows")
        ]
        top = rows["top_key_rows"].isel(query=i).to_numpy().astype(int).ravel().tolist()
        most, count = Counter(top).most_common(1)[0]
        line = "  ".join(f"{share:6.3f}" for share in shares)
        looked = f"{tokens[most]!r} ({count} of {len(top)})"
        print(f"{tokens[i]!r:>16} {line}  {looked}{'  new' if i >= prompted else ''}")


if __name__ == "__main__":
    main()
