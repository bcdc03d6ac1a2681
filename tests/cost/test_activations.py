"""Bytes saved for the backward pass: equal to what torch saves, tensor by tensor and in all.

Measured as a difference: a model of three layers less one of two is one layer; what is left of two
layers stands outside of the blocks.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers

from headwise.cost.activation_styles import EXACT
from headwise.cost.activations import REST_DERIVED, activations
from headwise.cost.config import parts_of
from headwise.cost.explicit import explicit
from headwise.cost.workload import Workload
from headwise.errors import OptionError
from headwise.models import build
from headwise.models.architecture import Architecture, Embedding, Stack
from headwise.models.presets import decoder_sizes, encoder_sizes
from headwise.training.objective import next_token_loss
from tests.cost import tiny
from tests.cost.saved import saved_bytes

SHAPES = [(2, 13), (1, 5)]  # (batch, tokens): of one sequence, views serve where copies do else
FORMS = {"materialised": "eager", "fused": "sdpa"}
PAIRS = {
    "bart": "Bart", "mbart": "MBart", "marian": "Marian", "pegasus": "Pegasus",
    "whisper": "Whisper",
}  # fmt: skip
ALONE = tuple(name for name in EXACT if name not in PAIRS)
ENCODERS = ("bert", "roberta", "electra", "distilbert", "clip_text_model")
LAYERS = {"gpt2": "n_layer", "distilbert": "n_layers"}
P = 0.1
_BERT = {"hidden_dropout_prob": P, "attention_probs_dropout_prob": P}
DROPOUT = {
    "phi3": {"resid_pdrop": P, "embd_pdrop": P, "attention_dropout": P},
    "phi": {"resid_pdrop": P, "embd_pdrop": P, "attention_dropout": P},
    "starcoder2": {"residual_dropout": P, "embedding_dropout": P, "attention_dropout": P},
    "distilbert": {"dropout": P, "attention_dropout": P},
    "roberta": _BERT,
    "electra": _BERT,
    "gpt2": {"attn_pdrop": P, "resid_pdrop": P, "embd_pdrop": P},
    "gpt_neox": {"hidden_dropout": P, "attention_dropout": P},
    "opt": {"dropout": P, "attention_dropout": P},
    "bert": _BERT,
    "vit": _BERT,
}


def hidden(family, batch, tokens, dtype):
    """A pass without a head."""
    if family == "vit":
        pixels = torch.randn(batch, 3, 12, 12, dtype=dtype)
        return lambda model: model(pixels).last_hidden_state
    ids = torch.randint(3, tiny.VOCAB, (batch, tokens))
    more = {} if family in ENCODERS else {"use_cache": False}
    return lambda model: model(ids, **more).last_hidden_state


def loss(family, batch, tokens):
    """A pass with its loss; labels that are not the ids, as a data loader has them."""
    ids = torch.randint(3, tiny.VOCAB, (batch, tokens))
    labels = ids.clone()
    more = {} if family in ENCODERS else {"use_cache": False}
    return lambda model: model(ids, labels=labels, **more).loss


def one_layer(family, form, shape, dtype, checkpointing=False, **settings):
    """Bytes of one layer, and of what stands outside."""
    real = getattr(torch, dtype)
    name = LAYERS.get(family, "num_hidden_layers")
    found = []
    for layers in (2, 3):
        model = tiny.model_of(family, implementation=FORMS[form], **{name: layers}, **settings).to(
            real
        )
        if checkpointing:
            model.activation_checkpointing_enable()
        found.append(saved_bytes(model.train(), hidden(family, *shape, real)))
    return found[1] - found[0], found[0] - 2 * (found[1] - found[0])


def counted(found, layer=0):
    return sum(each.bytes for each in found.of_layer(layer))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ALONE)
def test_a_block_of_transformers(family, form, dtype):
    for batch, tokens in SHAPES:
        work = Workload(length=tokens, batch=batch, attention=form)
        found = activations(tiny.parts(family), work, dtype=dtype)
        assert found.exact
        assert counted(found) == one_layer(family, form, (batch, tokens), dtype)[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ALONE)
def test_a_block_with_dropout(family, form):
    for batch, tokens, dtype in ((2, 13, "bfloat16"), (1, 5, "float32")):
        work = Workload(length=tokens, batch=batch, attention=form)
        found = activations(tiny.parts(family), work, dtype=dtype, dropout=True)
        settings = DROPOUT.get(family, {"attention_dropout": P})
        measured = one_layer(family, form, (batch, tokens), dtype, **settings)[0]
        masked = family in (
            "mistral",
            "ministral",
            "gemma3_text",
        )  # a window and dropout together: derived
        assert found.exact != masked
        assert masked or counted(found) == measured


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [name for name in ALONE if name not in REST_DERIVED])
def test_a_whole_model_with_its_loss(family, dtype):
    for batch, tokens in SHAPES:
        work = Workload(length=tokens, batch=batch)
        found = activations(tiny.parts(family, head=True), work, dtype=dtype)
        model = tiny.model_of(family, head=True, implementation="sdpa").to(getattr(torch, dtype))
        assert found.exact
        assert found.rest_exact
        assert found.bytes == saved_bytes(model.train(), loss(family, batch, tokens))


def pair(family, layers, source, dropout):
    """The configuration of an encoder–decoder of (encoder, decoder) layers."""
    sizes = {
        "d_model": 28, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 44, "decoder_ffn_dim": 46, "vocab_size": tiny.VOCAB,
        "max_position_embeddings": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2, "encoder_layers": layers[0], "decoder_layers": layers[1],
        "dropout": dropout, "attention_dropout": dropout, "activation_dropout": 0.0,
    }  # fmt: skip
    if family == "whisper":
        sizes |= {"max_source_positions": source, "max_target_positions": 31, "num_mel_bins": 8}
    return getattr(transformers, f"{PAIRS[family]}Config")(**sizes)


def pair_bytes(family, form, layers, shape, dtype, dropout):
    batch, source, tokens = shape
    real = getattr(torch, dtype)
    kind = getattr(transformers, f"{PAIRS[family]}Model")
    config = pair(family, layers, source, dropout)
    model = kind._from_config(config, attn_implementation=FORMS[form]).to(real).train()
    given = {"input_ids": torch.randint(3, tiny.VOCAB, (batch, source))}
    if family == "whisper":
        given = {"input_features": torch.randn(batch, 8, 2 * source, dtype=real)}
    own = torch.randint(3, tiny.VOCAB, (batch, tokens))
    return saved_bytes(
        model,
        lambda model: model(**given, decoder_input_ids=own, use_cache=False).last_hidden_state,
    )


@pytest.mark.parametrize("dropout", [0.0, P])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", PAIRS)
def test_blocks_of_an_encoder_decoder(family, form, dropout):
    for shape, dtype in (((2, 13, 7), "bfloat16"), ((1, 5, 3), "float32")):
        batch, source, tokens = shape
        few, deep, deeper = (
            pair_bytes(family, form, layers, shape, dtype, dropout)
            for layers in ((2, 2), (3, 2), (2, 3))
        )
        found = activations(
            parts_of(pair(family, (2, 2), source, dropout).to_dict()),
            Workload(length=tokens, source=source, batch=batch, attention=form),
            dtype=dtype, dropout=dropout > 0,
        )  # fmt: skip
        assert found.exact
        assert not found.rest_exact
        assert sum(each.bytes for each in found.of_layer(0, "encoder")) == deep - few
        assert sum(each.bytes for each in found.of_layer(0, "decoder")) == deeper - few


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_checkpoints_keep_the_input_of_each_block(family, form):
    work = Workload(length=13, batch=2, attention=form, recompute="full")
    found = activations(tiny.parts(family), work)
    assert counted(found) == 2 * 13 * tiny.D * 2
    assert counted(found) == one_layer(family, form, (2, 13), "bfloat16", checkpointing=True)[0]
    plain = activations(tiny.parts(family), replace(work, recompute="none"))
    assert found.transient == counted(plain)
    assert found.outside == plain.outside


@pytest.mark.parametrize("tokens", [12, 13, 14])
def test_a_window_costs_a_mask_in_every_layer(tokens):
    """From n = W on, the fused kernel of transformers reads an n × n array: O(n) no more."""
    work = Workload(length=tokens, batch=2)
    found = activations(tiny.parts("mistral", sliding_window=13), work)
    have = one_layer("mistral", "fused", (2, tokens), "bfloat16", sliding_window=13)[0]
    assert counted(found) == have
    assert bool(found.square) == (tokens >= 13)
    assert any("n × n mask" in note for note in found.notes) == (tokens >= 13)


def test_latent_attention_says_what_a_cpu_does():
    found = activations(tiny.parts("deepseek_v3"), Workload(length=13))
    assert any("keys and values of two widths" in note for note in found.notes)
    assert found.square == 0


def own_sizes(**more):
    return {"vocab": 97, "d_model": 28, "heads": 4, "d_ff": 44, "context": 31, **more}


def own_gpt2(layers, **more):
    stack = Stack.checked(
        layers=layers, heads=4, kv_heads=4, d_head=7, d_ff=44, norm="layer",
        activation="gelu_tanh", gated=False, qkv_bias=True, output_bias=True,
        feed_forward_bias=True, **more,
    )  # fmt: skip
    return build(
        Architecture.checked(
            family="gpt2", vocab=97, d_model=28, context=31, decoder=stack,
            embedding=Embedding(positions="learned"),
        )
    )  # fmt: skip


def own(**settings):
    def make(layers, **more):
        grouped = own_sizes(kv_heads=2, d_head=6)
        return build(decoder_sizes(layers=layers, **grouped, **settings, **more))

    return make


TIED = {"tie_word_embeddings": True}
OWN = {
    "llama": (own(), tiny.parts("llama", head=True, **TIED), {}),
    "qk norms": (own(qk_norm="head"), tiny.parts("qwen3", head=True, **TIED), {}),
    "gemma": (
        own(norm="rms+1", activation="gelu_tanh"), tiny.parts("gemma", head=True), {},
    ),
    "window": (own(windows=(5,)), tiny.parts("mistral", head=True, **TIED), {}),
    "softcap": (own(softcap=30.0), tiny.parts("llama", head=True, **TIED), {"streaming": True}),
    "relu": (
        own(gated=False, activation="relu"),
        explicit(d_model=28, layers=2, heads=4, kv_heads=2, d_head=6, d_ff=44, vocab=97, tied=True),
        {"activation": "relu"},
    ),
    "gpt2": (own_gpt2, tiny.parts("gpt2", head=True), {}),
    "bert": (
        lambda layers, **more: build(encoder_sizes(**own_sizes(), layers=layers, **more)),
        tiny.parts("bert", head=True), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "dropout"),
    [(name, False) for name in OWN]
    + [(name, True) for name in OWN if name not in ("window", "softcap")],
)
def test_headwises_own_models(name, dtype, dropout):
    make, parts, settings = OWN[name]
    more = {"dropout": P, "attention_dropout": P} if dropout else {}
    for batch, tokens in SHAPES:
        ids = torch.randint(0, 97, (batch, tokens))
        two, three = (own_bytes(make(layers, **more), dtype, own_hidden(ids)) for layers in (2, 3))
        found = activations(
            parts, Workload(length=tokens, batch=batch), convention="headwise", dtype=dtype,
            dropout=dropout, **settings,
        )  # fmt: skip
        assert found.exact
        assert counted(found) == three - two
        if name != "bert":
            size = 4 if dtype == "float32" else 2
            inner = batch * tokens * 28 * size  # the loss's own pass over a chunk: gone after it
            assert found.bytes + inner == own_bytes(make(2, **more), dtype, own_loss(ids))


def own_bytes(model, dtype, run):
    return saved_bytes(model.to(getattr(torch, dtype)).train(), run)


def own_hidden(ids):
    return lambda model: model.hidden(ids)


def own_loss(ids):
    def run(model):
        vectors, weights = model.hidden(ids).flatten(0, 1), torch.ones(ids.numel())
        table = model.embedding.tokens.weight
        return next_token_loss(vectors, ids.flatten(), weights, model.unembed, [table])[0]

    return run


def test_an_architecture_of_ones_own_is_read_alike():
    model = own()(2)
    parts = parts_of(json.loads(model.architecture.model_dump_json()))
    work = Workload(length=13, batch=2)
    found = activations(parts, work, convention="headwise")
    assert found.exact
    assert counted(found) == counted(activations(OWN["llama"][1], work, convention="headwise"))


def per_number(found, tokens, batch, d):
    return counted(found) / (tokens * batch * d)


# The records act/measured of shared/reference/cost_reference.json: bytes over s·b·h of one layer.
GPT = explicit(d_model=128, layers=2, heads=4, vocab=97, bias=True)
GPT2 = {"n_embd": 128, "n_inner": 512, "n_positions": 256}
LLAMA = {
    "hidden_size": 128, "head_dim": 32, "num_key_value_heads": 2, "intermediate_size": 256,
}  # fmt: skip
RECORDS = [
    ("gpt2", GPT2, 64, "materialised", {"activation": "gelu"}, 36.0625),
    ("gpt2", GPT2, 64, "fused", {"activation": "gelu"}, 32.1875),
    ("gpt2", GPT2, 64, "materialised", {"activation": "gelu", "dropout": True}, 48.0625),
    ("gpt2", GPT2, 64, "materialised", {"dtype": "float32"}, 120.125),
    ("gpt2", GPT2, 128, "materialised", {"dtype": "float32"}, 128.125),
    ("gpt2", GPT2, 128, "fused", {"dtype": "float32"}, 112.25),
    ("llama", LLAMA, 64, "materialised", {"dtype": "float32"}, 80.0625),
    ("llama", LLAMA, 128, "materialised", {"dtype": "float32"}, 88.0625),
    ("llama", LLAMA, 128, "fused", {"dtype": "float32"}, 68.1875),
]


@pytest.mark.parametrize(("family", "sizes", "tokens", "form", "settings", "want"), RECORDS)
def test_measured_records(family, sizes, tokens, form, settings, want):
    work = Workload(length=tokens, batch=2, attention=form)
    found = activations(tiny.parts(family, **sizes), work, **settings)
    assert per_number(found, tokens, 2, 128) == want


def test_the_record_of_checkpoints():
    work = Workload(length=64, batch=2, recompute="full")
    assert per_number(activations(tiny.parts("gpt2", **GPT2), work), 64, 2, 128) == 2.0


@pytest.mark.parametrize(("tokens", "batch"), [(64, 1), (48, 3)])
def test_korthikantis_formula(tokens, batch):
    s, b, h, a = tokens, batch, 128, 4
    work = Workload(length=s, batch=b, attention="materialised")
    found = activations(GPT, work, convention="megatron")
    assert counted(found) * h == s * b * h * (34 * h + 5 * a * s)
    selective = activations(GPT, replace(work, recompute="selective"), convention="megatron")
    assert counted(selective) == 34 * s * b * h
    assert selective.transient * h == s * b * h * 5 * a * s
    full = activations(GPT, replace(work, recompute="full"), convention="megatron")
    assert counted(full) == 2 * s * b * h
    assert not found.exact


@pytest.mark.parametrize(("a", "s", "h", "ratio"), [(96, 2048, 12288, 80), (128, 2048, 20480, 64)])
def test_korthikantis_ratio(a, s, h, ratio):
    parts = explicit(d_model=h, layers=1, heads=a, vocab=97, bias=True)
    found = activations(parts, Workload(length=s, attention="materialised"), convention="megatron")
    assert found.square == ratio * s * h
    assert found.bytes - found.square == 34 * s * h


def test_what_grows_as_n_squared():
    parts = tiny.parts("llama")
    one, two = (activations(parts, Workload(length=n, attention="materialised")) for n in (17, 34))
    assert two.square == 4 * one.square > 0
    assert activations(parts, Workload(length=34)).square == 0


def test_the_table_names_what_it_counts():
    found = activations(tiny.parts("gpt2"), Workload(length=13, attention="materialised"))
    names = [each.name for each in found.of_layer(1)]
    assert len(set(names)) == len(names)
    assert {"input of norm 1", "queries", "weights", "input of W_out"} <= set(names)
    assert found.bytes == sum(each.bytes for each in found.tensors)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "t5", "gpt_oss"])
def test_what_was_not_measured_says_so(family):
    found = activations(tiny.parts(family, head=True), Workload(length=13))
    assert not found.exact
    assert not found.rest_exact
    assert any("derived, not measured" in note for note in found.notes)
    assert found.bytes > 0


def test_packed_documents_are_one_sequence_and_said_to_be():
    parts = tiny.parts("llama")
    packed = activations(parts, Workload(length=13, documents=(6, 7)))
    assert packed.bytes == activations(parts, Workload(length=13)).bytes
    assert not packed.exact
    assert any("packed documents" in note for note in packed.notes)


def test_a_wrong_style_is_noticed():
    """The equality above can fail: another activation, another norm."""
    work = Workload(length=13, batch=2)
    measured = one_layer("gpt2", "fused", (2, 13), "bfloat16")[0]
    assert counted(activations(tiny.parts("gpt2"), work, activation="gelu")) != measured
    assert counted(activations(tiny.parts("gpt2"), work, convention="headwise")) != measured


@pytest.mark.parametrize(
    ("work", "settings", "said"),
    [
        ({"cached": 3}, {}, "a training step over a cache"),
        ({}, {"dtype": "float8"}, "activations in float8"),
        ({}, {"convention": "jax"}, "the convention 'jax'"),
        ({}, {"activation": "sine"}, "the activation 'sine'"),
        ({}, {"convention": "megatron", "dtype": "float32"}, "16-bit figures for float32"),
        ({"attention": "materialised"}, {"convention": "headwise"}, "materialised attention"),
        ({}, {"streaming": True}, "the streaming form elsewhere"),
    ],
)
def test_what_is_refused(work, settings, said):
    with pytest.raises(OptionError, match=said):
        activations(GPT, Workload(length=13, **work), **settings)
