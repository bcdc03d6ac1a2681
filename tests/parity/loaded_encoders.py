"""Tiny random models with an encoder (BERT, Marian, T5), and the checks that they have to pass.

Each check compares every stream between blocks, at every real token, and every head, and gives the
largest relative error. Sizes are primes or their products; encoder and decoder differ in every size
that may differ.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from headwise.models import Cache, Encoder, EncoderDecoder
from headwise.models.checkpoints import load
from headwise.models.generation import generate
from tests.parity.loaded_checks import Check, relative_error, saved
from tests.parity.loaded_models import Case, shaken

__all__ = ["ENCODER_CASES", "encoder_pairs"]

Pairs = Iterator[tuple[Tensor, Tensor]]
WORDS, SOURCE, TARGET, PADDING = 61, 13, 11, 5

_BERT = {
    "vocab_size": WORDS, "hidden_size": 42, "num_hidden_layers": 3, "num_attention_heads": 3,
    "intermediate_size": 29, "max_position_embeddings": 37, "type_vocab_size": 3,
    "layer_norm_eps": 1e-6,
}  # fmt: skip
_MARIAN = {
    "vocab_size": WORDS, "d_model": 42, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 3, "decoder_attention_heads": 7, "encoder_ffn_dim": 29,
    "decoder_ffn_dim": 31, "max_position_embeddings": 37, "decoder_start_token_id": 59,
    "pad_token_id": 59,
}  # fmt: skip
_T5 = {
    "vocab_size": WORDS, "d_model": 23, "d_kv": 5, "d_ff": 29, "num_layers": 2,
    "num_decoder_layers": 3, "num_heads": 3, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 11, "layer_norm_epsilon": 1e-5,
    "decoder_start_token_id": 0,
}  # fmt: skip


def _tokens(length: int, seed: int) -> Tensor:
    return torch.randint(WORDS, (2, length), generator=torch.Generator().manual_seed(seed))


def _padding(side: str) -> Tensor:
    """Which tokens of the source are real: the second sequence is shorter."""
    keep = torch.ones(2, SOURCE, dtype=torch.bool)
    keep[1, slice(0, PADDING) if side == "left" else slice(SOURCE - PADDING, SOURCE)] = False
    return keep


def _streams(stack: nn.Module, run: Callable[[], Tensor]) -> list[Tensor]:
    """The stream after each block, and in the last place what the run gives."""
    seen: list[Tensor] = []
    blocks: Any = stack.blocks
    handles = [block.register_forward_hook(lambda *call: seen.append(call[2])) for block in blocks]
    try:
        final = run()
    finally:
        for handle in handles:
            handle.remove()
    return [*seen[:-1], final]  # transformers' last stream stands after the last norm, too


def encoder_pairs(theirs: PreTrainedModel, ours: Encoder, keep: Tensor | None = None) -> Pairs:
    """Our tensors and theirs, of an encoder over a batch that ``keep`` says the real tokens of."""
    ids = _tokens(SOURCE, 3)
    real = torch.ones_like(ids, dtype=torch.bool) if keep is None else keep
    given: dict[str, Tensor] = {} if keep is None else {"attention_mask": keep.long()}
    segments = None
    if ours.embedding.segments is not None:
        kinds = ours.embedding.segments.num_embeddings
        segments = given["token_type_ids"] = torch.arange(SOURCE).remainder(kinds).expand(2, -1)
    want = theirs(input_ids=ids, output_hidden_states=True, **given)
    streams = _streams(ours.encoder, lambda: ours.hidden(ids, mask=keep, segment_ids=segments))
    for mine, other in zip(streams, want.hidden_states[1:], strict=True):
        yield mine[real], other[real]
    pretraining = "prediction_logits" in want
    if ours.unembedding is not None:
        logits = want.prediction_logits if pretraining else want.logits
        yield ours(ids, mask=keep, segment_ids=segments)[real], logits[real]
    if ours.classifier is not None:
        classes = want.seq_relationship_logits if pretraining else want.logits
        yield ours.classify(streams[-1]), classes
    elif ours.pooler is not None:
        yield ours.pooled(streams[-1]), want.pooler_output


def _decoder_pairs(theirs: PreTrainedModel, ours: EncoderDecoder, keep: Tensor | None) -> Pairs:
    source, ids = _tokens(SOURCE, 3), _tokens(TARGET, 5)
    real = torch.ones_like(source, dtype=torch.bool) if keep is None else keep
    given = {} if keep is None else {"attention_mask": keep.long()}
    want = theirs(input_ids=source, decoder_input_ids=ids, output_hidden_states=True, **given)
    before = _streams(ours.encoder, lambda: ours.encode(source, mask=keep))
    for mine, other in zip(before, want.encoder_hidden_states[1:], strict=True):
        yield mine[real], other[real]
    after = _streams(ours.decoder, lambda: ours.hidden(ids, before[-1], source_mask=keep))
    yield from zip(after, want.decoder_hidden_states[1:], strict=True)
    if "logits" in want:
        yield ours.unembed(after[-1]), want.logits


def _largest(pairs: Pairs) -> float:
    found = []
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape, f"{tuple(ours.shape)} for {tuple(theirs.shape)}"
        found.append(relative_error(ours, theirs))
    return max(found)


@torch.no_grad()
def _compared(model: PreTrainedModel, folder: Path, keep: Tensor | None = None) -> float:
    ours = load(folder).model
    assert not ours.training
    if isinstance(ours, Encoder):
        return _largest(encoder_pairs(model, ours, keep))
    assert isinstance(ours, EncoderDecoder)
    return _largest(_decoder_pairs(model, ours, keep))


def plain(model: PreTrainedModel, folder: Path) -> float:
    """A batch of full sequences."""
    return _compared(model, folder)


def padding(model: PreTrainedModel, folder: Path) -> float:
    """A source padded on the right, then on the left."""
    return max(_compared(model, folder, _padding(side)) for side in ("right", "left"))


def shards(model: PreTrainedModel, folder: Path) -> float:
    """The same as plain from a folder with many weight files."""
    with tempfile.TemporaryDirectory() as place:
        split = saved(model, Path(place), max_shard_size="9KB")
        assert len(list(split.glob("model-*.safetensors"))) > 2
        return _compared(model, split)


@torch.no_grad()
def cache(model: PreTrainedModel, folder: Path) -> float:
    """The decoder step by step over a padded source, with a cache on both sides."""
    ours = load(folder).model
    assert isinstance(ours, EncoderDecoder)
    source, ids, keep = _tokens(SOURCE, 3), _tokens(TARGET, 5), _padding("left")
    memory = ours.encode(source, mask=keep)
    kept = Cache.empty(ours.architecture, batch=2, capacity=TARGET)

    def steps() -> Pairs:
        given: dict[str, Any] = {"input_ids": source, "attention_mask": keep.long(), "cache": None}
        for step in ids.split([3, *(1,) * (TARGET - 3)], 1):
            want = model(**given, decoder_input_ids=step, use_cache=True)
            given |= {"cache": want.cache, "encoder_outputs": (want.encoder_last_hidden_state,)}
            hidden = ours.hidden(step, memory, source_mask=keep, cache=kept)
            if "logits" in want:
                yield ours.unembed(hidden), want.logits
            else:
                yield hidden, want.last_hidden_state

    return _largest(steps())


def greedy(model: PreTrainedModel, folder: Path) -> float:
    """Tokens of greedy decoding from the model's own start: 0 if all are the same."""
    ours = load(folder).model
    assert isinstance(ours, EncoderDecoder)
    source = _tokens(SOURCE, 3)
    # No ends, so that all tokens are compared; and without its cache, for which it takes the
    # encoder's number of layers for the decoder's.
    model.generation_config = GenerationConfig(
        max_new_tokens=TARGET, do_sample=False, pad_token_id=0, use_cache=False,
        decoder_start_token_id=ours.architecture.start_token,
    )  # fmt: skip
    theirs = model.generate(source, attention_mask=torch.ones_like(source))
    same = torch.equal(generate(ours, source, tokens=TARGET).ids, theirs[:, 1:])
    return 0.0 if same else float("inf")


_ENCODER: dict[str, Check] = {"plain": plain, "padding": padding, "shards": shards}
_BARE: dict[str, Check] = {**_ENCODER, "cache": cache}
_BOTH: dict[str, Check] = {**_BARE, "greedy": greedy}


def _made(kind: str, sizes: dict[str, Any]) -> PreTrainedModel:
    """A shaken model; what Marian computes and only stores stays as it is."""
    torch.manual_seed(3)
    model: PreTrainedModel = getattr(transformers, kind)
    model = model(model.config_class(**sizes))
    fixed = {name: t.clone() for name, t in model.state_dict().items() if "embed_positions" in name}
    shaken(model).load_state_dict(fixed, strict=False)
    for name, bias in model.named_buffers():
        if name == "final_logits_bias":
            bias.normal_(std=0.1)
    return model


def _released(kind: str, sizes: dict[str, Any]) -> PreTrainedModel:
    """T5's second form as it was released, with two tables; transformers 5 makes them one."""
    model = _made(kind, {**sizes, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False})
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
    model.config.tie_word_embeddings = False
    return model


def _bert(name: str, kind: str, **others: Any) -> Case:
    return Case(name, lambda: _made(kind, {**_BERT, **others}), _ENCODER)


def _marian(name: str, kind: str = "MarianMTModel", **others: Any) -> Case:
    checks = _BARE if kind == "MarianModel" else _BOTH
    return Case(name, lambda: _made(kind, {**_MARIAN, **others}), checks)


def _t5(name: str, kind: str = "T5ForConditionalGeneration", **others: Any) -> Case:
    checks = {"T5EncoderModel": _ENCODER, "T5Model": _BARE}.get(kind, _BOTH)
    return Case(name, lambda: _made(kind, {**_T5, **others}), checks)


ENCODER_CASES: list[Case] = [
    _bert("bert", "BertForPreTraining"),
    _bert("bert, bare, tanh gelu", "BertModel", hidden_act="gelu_new"),
    _bert("bert, masked tokens, relu", "BertForMaskedLM", hidden_act="relu"),
    _bert("bert, masked tokens, untied", "BertForMaskedLM", tie_word_embeddings=False),
    _bert("bert, classes", "BertForSequenceClassification", num_labels=5),
    _marian("marian", scale_embedding=True, activation_function="swish"),
    _marian("marian, plain embedding, relu", activation_function="relu"),
    _marian("marian, bare", "MarianModel", scale_embedding=True),
    _t5("t5"),
    Case("t5, second form", lambda: _released("T5ForConditionalGeneration", _T5), _BOTH),
    _t5("t5, second form, tied", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    _t5("t5, gated silu", feed_forward_proj="gated-silu"),
    _t5("t5, bare", "T5Model"),
    _t5("t5, encoder", "T5EncoderModel"),
    Case("mt5", lambda: _released("MT5ForConditionalGeneration", _T5), _BOTH),
]
