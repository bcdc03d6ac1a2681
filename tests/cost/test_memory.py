"""Memory: states equal to torch's optimizers, transients against what was alive at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headwise.cost.explicit import explicit
from headwise.cost.formats import stored_bytes
from headwise.cost.memory import memory
from headwise.cost.optimizer_states import optimizer_bytes, trained_parameters
from headwise.cost.parts import Matrix
from headwise.cost.transients import transients
from headwise.cost.workload import Workload
from headwise.errors import OptionError
from headwise.models import build
from headwise.models.presets import decoder_sizes
from headwise.training.objective import next_token_loss
from tests.cost import tiny
from tests.cost.peak import Peak

PARTS = explicit(d_model=28, layers=3, heads=4, vocab=97, gated=True)
FAMILIES = (
    "gpt2", "llama", "qwen3", "gemma", "gpt_neox", "opt", "bert", "mixtral", "gpt_oss",
    "deepseek_v3", "t5", "bart",
)  # fmt: skip
TORCH = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


def state_bytes(model, optimizer):
    """Bytes of the states after one step, without the counters of steps."""
    made = TORCH[optimizer](list(model.parameters()))
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    made.step()
    tensors = [
        value
        for state in made.state.values()
        for name, value in state.items()
        if name != "step" and isinstance(value, torch.Tensor)
    ]
    return sum(each.nbytes for each in tensors)


@pytest.mark.parametrize("optimizer", TORCH)
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_torch(family, optimizer):
    parts = tiny.parts(family, head=True)
    model = tiny.model_of(family, head=True)
    assert optimizer_bytes(parts, optimizer) == state_bytes(model, optimizer)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "momentum"])
def test_states_have_the_type_of_the_weights(optimizer):
    model = tiny.model_of("llama", head=True).to(torch.bfloat16)
    found = memory(
        tiny.parts("llama", head=True), Workload(length=7), training=True, master=False,
        optimizer=optimizer,
    )  # fmt: skip
    assert found.states == state_bytes(model, optimizer)
    assert found.gradients == sum(each.grad.nbytes for each in model.parameters())
    assert found.weights == sum(each.nbytes for each in model.parameters())


def test_mixed_precision_is_sixteen_bytes_as_a_sum():
    found = memory(PARTS, Workload(length=7), training=True)
    numbers = trained_parameters(PARTS)
    parts = [found.weights, found.gradients, found.master, found.states]
    assert [each // numbers for each in parts] == [2, 2, 4, 8]
    assert sum(parts) == 16 * numbers
    single = memory(PARTS, Workload(length=7), training=True, weights="float32")
    assert single.weights + single.gradients + single.master + single.states == 16 * numbers
    assert single.master == 0


def test_eight_bits_have_scales():
    """Matrices of 4096 numbers or more: a byte twice, and a float32 for each 256, twice."""
    parts = explicit(d_model=64, layers=1, heads=4, vocab=97)
    large, small = 4 * [64 * 64] + 2 * [64 * 256] + 2 * [97 * 64], 3 * [64]
    want = sum(2 * (n + 4 * -(-n // 256)) for n in large) + 8 * sum(small)
    assert optimizer_bytes(parts, "adam8bit") == want
    assert optimizer_bytes(parts, "adam8bit") < optimizer_bytes(parts, "adam") * 0.27


def test_what_is_not_learned_has_no_gradient():
    stack = PARTS.stacks[0]
    fixed: list[Matrix] = [
        replace(each, learned=False) if each.name == "tokens" else each for each in stack.matrices
    ]
    parts = replace(PARTS, stacks=(replace(stack, matrices=tuple(fixed)),))
    assert trained_parameters(PARTS) - trained_parameters(parts) == 97 * 28
    whole, less = (memory(each, Workload(length=7), training=True) for each in (PARTS, parts))
    assert whole.gradients - less.gradients == 2 * 97 * 28
    assert whole.weights == less.weights


def peak_of_a_pass(family, form, tokens, dtype, **sizes):
    """What was alive at most, what the planner says, and one copy of the stream."""
    model = tiny.model_of(family, head=True, implementation=form, **sizes)
    model = model.to(getattr(torch, dtype)).eval()
    ids = torch.randint(3, 97, (2, tokens))
    with torch.no_grad(), Peak([*model.parameters(), *model.buffers()]) as watched:
        model(ids, use_cache=True)
    attention = "materialised" if form == "eager" else "fused"
    found = memory(
        tiny.parts(family, head=True, **sizes), Workload(length=tokens, batch=2,
                                                         attention=attention),
        weights=dtype,
    )  # fmt: skip
    return watched.peak, found, 2 * tokens * tiny.D * (4 if dtype == "float32" else 2)


@pytest.mark.parametrize("form", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_cache_that_grows_is_copied_layer_by_layer(family, form):
    model = tiny.model_of(family, head=True, implementation=form, **long(family)).eval()
    ids = torch.randint(3, 97, (2, 101))
    with torch.no_grad(), Peak([*model.parameters(), *model.buffers()]) as watched:
        cache = model(ids[:, :100], use_cache=True).past_key_values
        before = watched.peak = watched.bytes
        model(ids[:, 100:], cache=cache, use_cache=True)
    attention = "materialised" if form == "eager" else "fused"
    found = memory(
        tiny.parts(family, head=True, **long(family)),
        Workload(length=1, cached=100, batch=2, attention=attention), weights="float32",
    )  # fmt: skip
    first = found.transients[0]
    repeated = family == "llama" and form == "eager"
    assert first.name == ("queries, keys and values" if repeated else "cache of one layer")
    grown = 2 * found.keys_and_values.per_token  # one token in every layer
    scores = 3 * 4 * 101  # of four heads: scores, weights, and one more as the mask is added
    rest = 2 * 4 * (4 * tiny.D + scores + tiny.VOCAB)  # of the token: vectors, scores, logits
    assert first.bytes <= watched.peak - before <= first.bytes + 2 * grown + rest


FF = {"gpt2": "n_inner", "llama": "intermediate_size", "mistral": "intermediate_size"}
CONTEXT = {"gpt2": "n_positions"}
WIDE = {"gpt2": {}, "llama": {}, "mistral": {}}


def long(family):
    return {CONTEXT.get(family, "max_position_embeddings"): 128}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["eager", "sdpa"])
@pytest.mark.parametrize("family", WIDE)
def test_transients_of_a_forward_pass(family, form, dtype):
    """The largest one is a lower bound; above it stand at most 16 copies of the stream.

    Those are: the stream and its norm (in 16 bits also in float32), queries, keys and values as
    they were made, turned, and repeated, and the output of the heads.
    """
    cases = [("logits", 29, {"vocab_size": 4999}), ("feed-forward", 29, {FF[family]: 2003})]
    if form == "eager":
        cases.append(("scores", 101, {}))
    for name, tokens, sizes in cases:
        peak, found, stream = peak_of_a_pass(family, form, tokens, dtype, **sizes, **long(family))
        assert found.transients[0].name == name
        assert found.transient <= peak - found.cache <= found.transient + 16 * stream


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_a_training_step_is_bounded(family, dtype):
    """From above by what is kept and the largest transient; reached where logits are largest."""
    for form, attention in (("eager", "materialised"), ("sdpa", "fused")):
        cases = [({"vocab_size": 4999}, 29), ({FF[family]: 2003}, 29), ({}, 101)]
        for sizes, tokens in cases:
            sizes = {**sizes, **long(family)}
            peak, found, stream = peak_of_a_step(family, form, attention, tokens, dtype, sizes)
            bound = found.activations + found.transient
            assert peak <= bound + stream
            if "vocab_size" in sizes:
                assert found.transients[0].name == "logits"
                assert peak >= bound - stream


def peak_of_a_step(family, form, attention, tokens, dtype, sizes):
    """A step that finds gradients there already, as all but the first of an accumulation do."""
    model = tiny.model_of(family, head=True, implementation=form, **sizes)
    model = model.to(getattr(torch, dtype)).train()
    ids = torch.randint(3, 97, (2, tokens))
    model(ids, labels=ids.clone(), use_cache=False).loss.backward()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    known = [*model.parameters(), *model.buffers(), *gradients]
    with Peak(known) as watched:
        out = model(ids, labels=ids.clone(), use_cache=False)
        out.loss.backward()
    found = memory(
        tiny.parts(family, head=True, **sizes),
        Workload(length=tokens, batch=2, attention=attention), weights=dtype, training=True,
    )  # fmt: skip
    return watched.peak, found, 2 * tokens * tiny.D * (4 if dtype == "float32" else 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_headwises_loss_makes_logits_by_chunks(dtype):
    tokens, vocab, size = 1031, 4999, 4 if dtype == "float32" else 2
    model = build(
        decoder_sizes(vocab=vocab, d_model=28, layers=2, heads=4, kv_heads=2, d_head=6, d_ff=44,
                      context=2048)
    ).to(getattr(torch, dtype)).train()  # fmt: skip
    ids = torch.randint(0, vocab, (1, tokens))
    table = model.embedding.tokens.weight
    with Peak(model.parameters()) as watched:
        vectors = model.hidden(ids).flatten(0, 1)
        weights = torch.ones(tokens)
        next_token_loss(vectors, ids.flatten(), weights, model.unembed, [table])
    parts = tiny.parts(
        "llama", head=True, vocab_size=vocab, tie_word_embeddings=True,
        max_position_embeddings=2048,
    )  # fmt: skip
    found = memory(
        parts, Workload(length=tokens), weights=dtype, training=True, convention="headwise"
    )
    assert found.transients[0].name == "logits"
    stream, gradients = tokens * 28 * size, 2 * vocab * 28 * size
    bound = found.activations + found.transient
    assert bound - gradients - stream <= watched.peak <= bound + gradients + stream


def test_fused_attention_has_no_scores():
    names = {each.name for each in transients(PARTS, Workload(length=101))}
    assert "scores" not in names
    more = transients(PARTS, Workload(length=101, attention="materialised"))
    assert more[0].name == "scores"


def test_the_last_logits_alone_are_small():
    one, many = (
        {each.name: each.bytes for each in transients(PARTS, Workload(length=101, logits=kind))}
        for kind in ("last", "all")
    )
    assert many["logits"] == 101 * one["logits"]


def test_inference_is_weights_cache_and_a_moment():
    found = memory(PARTS, Workload(length=1, cached=100, batch=3), weights="q4_0", keeps="paged")
    assert found.weights == stored_bytes(PARTS, "q4_0")
    assert found.cache == found.keys_and_values.paged == 3 * 112 * found.keys_and_values.per_token
    assert found.total == found.weights + found.cache + found.transient
    assert found.gradients == found.states == found.activations == 0
    assert found.by_part()[found.dominant] == max(found.by_part().values())


def test_recomputation_moves_bytes_from_kept_to_transient():
    work = Workload(length=101, batch=5)
    plain, again = (
        memory(PARTS, replace(work, recompute=how), training=True) for how in ("none", "full")
    )
    assert again.activations < plain.activations
    block = next(each for each in again.transients if each.name == "one block, made again")
    assert block.bytes == again.saved.transient


def test_an_encoder_has_no_cache_and_a_long_past_has_one():
    found = memory(tiny.parts("bert", head=True), Workload(length=7))
    assert found.cache == 0
    parts = tiny.parts("llama", head=True)
    near, far = (memory(parts, Workload(length=1, cached=n)) for n in (9, 99))
    assert far.cache == 10 * near.cache


def test_doubling_the_feed_forward_moves_no_other_transient():
    narrow, wide = (
        explicit(d_model=28, layers=3, heads=4, vocab=97, gated=True, d_ff=n) for n in (50, 100)
    )
    one, two = (
        {t.name: t.bytes for t in transients(p, Workload(length=7))} for p in (narrow, wide)
    )
    assert two.pop("feed-forward") == 2 * one.pop("feed-forward")
    assert one == two


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weights": "q4_0", "training": True}, "training with weights in q4_0"),
        ({"weights": "int3"}, "the number format 'int3'"),
        ({"training": True, "optimizer": "lion"}, "the optimizer 'lion'"),
        ({"keeps": "ram"}, "a cache kept by 'ram'"),
        ({"cache": "q8_0"}, "a cache in q8_0"),
    ],
)
def test_what_is_refused(settings, said):
    with pytest.raises(OptionError, match=said):
        memory(PARTS, Workload(length=7), **settings)
