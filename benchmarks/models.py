"""Our own models against the same models elsewhere: forward, training step, decoding, encoder.

    python benchmarks/models.py [--sizes llama-15m smollm2-135m] [--lengths 512 2048]
                                [--work forward train generate encoder] [--threads 1] [--repeats 5]

The decoder has the weights of a random transformers ``LlamaForCausalLM`` (sdpa attention) and is
asserted to give the same logits; the encoder has the sizes of ``torch.nn.TransformerEncoder`` (six
layers, norms after each sublayer, ReLU) without its embedding. ``forward`` is logits of every
position without gradients; ``train`` is next-token loss, backward and one AdamW step;
``generate`` is greedy decoding of 64 tokens with a key-value cache, n tokens with the prompt
(``model.generate`` with its dynamic cache, the default; asserted to give the same tokens). The two
take turns in one process. ``ratio`` is the median over the repeats of our time / theirs in the
same turn, smallest and largest beside it; CPU time with one thread, wall time with more.
``memory`` is the growth of the peak (Linux) during one pass, ours / theirs, smallest of all turns.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from peak import measured
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from headwise.cli.heap import keep_large_blocks_out_of_the_heap
from headwise.models import Architecture, Context, Decoder, build, preset, transformer_sizes
from headwise.models.generation import generate
from headwise.training.step import Objective

TOKENS = 64
Run = Callable[[], object]


def theirs(a: Architecture) -> LlamaForCausalLM:
    """The same decoder in transformers, random."""
    stack = a.stack
    assert stack.rotary is not None
    assert a.unembedding is not None
    config = LlamaConfig(
        vocab_size=a.vocab, hidden_size=a.d_model, intermediate_size=stack.d_ff,
        num_hidden_layers=stack.layers, num_attention_heads=stack.heads,
        num_key_value_heads=stack.kv_heads, max_position_embeddings=max(a.context, 2048),
        rms_norm_eps=stack.norm_eps, tie_word_embeddings=a.unembedding.tied,
        rope_parameters={"rope_type": "default", "rope_theta": stack.rotary.base},
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def copied(a: Architecture, model: LlamaForCausalLM) -> Decoder:
    """Our decoder with the same weights."""
    own = build(a)
    assert isinstance(own, Decoder)
    own.allow_long = True
    names = {
        "attention.norm": "input_layernorm", "attention.branch.query": "self_attn.q_proj",
        "attention.branch.key": "self_attn.k_proj", "attention.branch.value": "self_attn.v_proj",
        "attention.branch.output": "self_attn.o_proj",
        "feed_forward.norm": "post_attention_layernorm",
        "feed_forward.branch.gate": "mlp.gate_proj", "feed_forward.branch.up": "mlp.up_proj",
        "feed_forward.branch.down": "mlp.down_proj",
    }  # fmt: skip
    stored = model.state_dict()
    for name, parameter in own.named_parameters():
        if name.startswith("decoder.blocks."):
            layer, rest = name.removeprefix("decoder.blocks.").split(".", 1)
            part = rest.removesuffix(".weight")
            parameter.copy_(stored[f"model.layers.{layer}.{names[part]}.weight"])
        elif name.startswith("embedding"):
            parameter.copy_(stored["model.embed_tokens.weight"])
        else:
            parameter.copy_(stored["model.norm.weight" if "norm" in name else "lm_head.weight"])
    return own.eval()


def decoder_runs(a: Architecture, n: int, work: str) -> dict[str, Run]:
    model = theirs(a)
    own = copied(a, model)
    ids = torch.randint(0, a.vocab, (1, n), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        x, y = own(ids[:, :64]), model(ids[:, :64]).logits
    assert (x - y).abs().max() < 1e-5 * y.abs().max()
    if work == "generate":
        return generating(own, model, ids[:, : n - TOKENS])
    if work == "forward":

        def forward(call: Callable[[], object]) -> Run:
            return torch.inference_mode()(call)

        return {
            "ours": forward(lambda: own(ids)),
            "transformers": forward(lambda: model(ids, use_cache=False)),
        }
    objective = Objective(own)
    targets, weights = ids.roll(-1, 1), torch.full(ids.shape, 1 / (n - 1))
    weights[:, -1] = 0  # the last token has no next one
    own_step = torch.optim.AdamW(own.parameters(), lr=1e-4)
    their_step = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def ours() -> None:
        own_step.zero_grad()
        objective(ids, targets, weights)[0].backward()
        own_step.step()

    def other() -> None:
        their_step.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        their_step.step()

    own.train(), model.train()
    return {"ours": ours, "transformers": other}


def generating(own: Decoder, model: LlamaForCausalLM, ids: Tensor) -> dict[str, Run]:
    mask = torch.ones_like(ids)

    def ours(tokens: int = TOKENS) -> list[int]:
        return generate(own, ids, tokens=tokens).rows()[0]

    def other(tokens: int = TOKENS) -> list[int]:
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, pad_token_id=0,
        )[0, ids.shape[1] :].tolist()  # fmt: skip

    model.generation_config.eos_token_id = None
    assert ours(8) == other(8)
    return {"ours": ours, "transformers": other}


def encoder_runs(n: int) -> dict[str, Run]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    torch.manual_seed(0)
    model = nn.TransformerEncoder(layer, 6).eval()
    a = transformer_sizes(vocab=1, d_model=512, layers=6, heads=8, d_ff=2048, context=n)
    own = build(a).eval().encoder
    x = torch.randn(1, n, 512, generator=torch.Generator().manual_seed(1))

    def ours() -> Tensor:
        return own(x, Context(1, n, 0, x.device, x.dtype))

    return {
        "ours": torch.inference_mode()(ours),
        "nn.TransformerEncoder": torch.inference_mode()(lambda: model(x)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["llama-15m", "smollm2-135m"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--work", nargs="+", default=["forward", "train", "generate", "encoder"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    keep_large_blocks_out_of_the_heap()
    torch.set_num_threads(args.threads)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    kind = "CPU time, 1 thread" if args.threads == 1 else f"wall time, {args.threads} threads"
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, float32, batch 1, {kind}, {args.repeats} repeats"
    )
    for work in args.work:
        sizes = ["encoder 512 x 6"] if work == "encoder" else args.sizes
        for size in sizes:
            for n in args.lengths:
                runs = encoder_runs(n) if work == "encoder" else decoder_runs(preset(size), n, work)
                compare(f"{work:8} {size:16} {n:5}", runs, args.repeats, clock)


def compare(title: str, runs: dict[str, Run], repeats: int, clock: Callable[[], float]) -> None:
    """Turns, then one line with the ratios."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            gc.collect()
            turn = measured(run, clock)
            if repeat:
                turns[name].append(turn)
    (_, ours), (peer, other) = turns.items()
    ratios = [a / b for (a, _), (b, _) in zip(ours, other, strict=True)]
    peaks = min(m for _, m in ours), min(m for _, m in other)
    print(
        f"{title}  ratio {statistics.median(ratios):5.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        f"  memory {peaks[0]:6.0f} / {peaks[1]:6.0f} MiB  against {peer}",
        flush=True,
    )


if __name__ == "__main__":
    main()
