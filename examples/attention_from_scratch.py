"""A reference solution of the exercise "implement multi-head attention", graded.

    python examples/attention_from_scratch.py

Only matrix products, a softmax, and the shapes between them; mask is True where a query may attend.
"""

import math

import torch

from headwise.theorems.grading import grade


def attention(x, w_q, w_k, w_v, w_o, heads, *, mask=None, kv_heads=None):
    batch, n, d = x.shape
    kv_heads = kv_heads or heads
    d_k = d // heads

    def split(y, count):  # batch n (count d_k) -> batch count n d_k
        return y.reshape(batch, n, count, d_k).transpose(1, 2)

    q = split(x @ w_q, heads)
    k, v = split(x @ w_k, kv_heads), split(x @ w_v, kv_heads)
    k, v = (y.repeat_interleave(heads // kv_heads, dim=1) for y in (k, v))  # neighbours share

    logits = q @ k.transpose(-1, -2) / math.sqrt(d_k)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    weights = torch.softmax(logits, dim=-1)
    if mask is not None:  # a row that sees nothing is 0/0: it gives 0
        weights = weights.masked_fill(~mask, 0.0)

    merged = (weights @ v).transpose(1, 2).reshape(batch, n, d)
    return merged @ w_o


def main() -> None:
    found = grade(attention)
    for each in found.results:
        print(f"{each.mark:<8} {each.requirement}: {each.asks}")
        if each.mark == "FAILED":
            print(f"         {each.sentence} {each.cause}")
    print(found.sentence)


if __name__ == "__main__":
    main()
