"""Generation with our own models: what it must not depend on, where it ends, what it refuses."""

from __future__ import annotations

import pytest
import torch

from headwise.errors import ModelError, NonFiniteError, OptionError, ShapeError, TextError
from headwise.models import Architecture, build, preset
from headwise.models.architecture import Embedding, Unembedding
from headwise.models.generation import generate, stream
from headwise.models.presets import decoder_sizes, transformer_sizes
from headwise.models.sampling import choice

SIZES = {"vocab": 131, "d_model": 24, "layers": 3, "heads": 4, "d_ff": 53, "context": 61}


def decoders() -> dict[str, Architecture]:
    learned = decoder_sizes(**SIZES, rotary=None)
    return {
        "rotary": decoder_sizes(**SIZES, kv_heads=2),
        "learned": learned.model_copy(update={"embedding": Embedding(positions="learned")}),
        "alibi": decoder_sizes(**SIZES, rotary=None, alibi=True),
        "window": decoder_sizes(**SIZES, windows=(5, None, 3)),
        "softcap": decoder_sizes(**SIZES, softcap=2.0, sinks=True),
    }


DECODERS = decoders()


def made(architecture: Architecture, seed: int = 0):
    """A model whose answers vary: large weights, and logits that are not those of the input."""
    untied = architecture.model_copy(update={"unembedding": Unembedding(tied=False)})
    model = build(untied, seed=seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.mul_(0.2 if name.startswith("embedding.") else 2)
    return model


def prompts(*lengths: int, vocab: int = 131) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded ids and their mask; the padding is an id that also occurs in prompts."""
    generator = torch.Generator().manual_seed(0)
    width = max(lengths)
    ids = torch.randint(vocab, (len(lengths), width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return ids.where(mask, 7), mask


def without_cache(model, ids: torch.Tensor, tokens: int) -> list[int]:
    """The definition: the whole text is read again for every token."""
    for _ in range(tokens):
        with torch.no_grad():
            ids = torch.cat((ids, model(ids)[:, -1].argmax(-1)[:, None]), 1)
    return ids[0, -tokens:].tolist()


@pytest.mark.parametrize("name", DECODERS)
def test_the_cache_changes_nothing(name):
    model = made(DECODERS[name])
    ids, _ = prompts(11)
    wanted = without_cache(model, ids, 23)
    assert len(set(wanted)) > 5
    assert generate(model, ids, tokens=23).rows() == [wanted]


@pytest.mark.parametrize("name", DECODERS)
def test_padded_rows_answer_as_they_do_alone(name):
    model = made(DECODERS[name])
    ids, mask = prompts(11, 3, 7)
    together = generate(model, ids, tokens=17, mask=mask)
    alone = [generate(model, ids[i : i + 1, mask[i]], tokens=17).rows()[0] for i in range(3)]
    assert together.rows() == alone
    assert len({tuple(row) for row in alone}) == 3
    # Columns that are padding in every row count for nothing, not even towards the context.
    wide = torch.cat((torch.full((3, 40), 9), ids), 1)
    shown = torch.cat((torch.zeros(3, 40, dtype=torch.bool), mask), 1)
    assert torch.equal(generate(model, wide, tokens=17, mask=shown).ids, together.ids)


def test_a_batch_without_its_mask_answers_otherwise():
    model = made(DECODERS["rotary"])
    ids, mask = prompts(11, 3, 7)
    padded = generate(model, ids, tokens=17, mask=mask)
    assert not torch.equal(generate(model, ids, tokens=17).ids, padded.ids)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 5}])
def test_the_stream_is_the_same_and_lazy(settings):
    model = made(DECODERS["rotary"])
    ids, mask = prompts(11, 3)
    whole = generate(model, ids, tokens=13, mask=mask, choose=choice(**settings))
    columns = stream(model, ids, tokens=13, mask=mask, choose=choice(**settings))
    passes = []
    hook = model.decoder.register_forward_hook(lambda *_: passes.append(1))
    assert torch.equal(next(columns), whole.ids[:, 0])
    assert len(passes) == 1
    assert torch.equal(torch.stack(list(columns), 1), whole.ids[:, 1:])
    assert len(passes) == 13  # the last token is chosen, and not read
    hook.remove()


def test_stop_tokens_end_a_row_and_padding_fills_it():
    model = made(DECODERS["rotary"])
    ids, mask = prompts(11, 3, 7)
    free = generate(model, ids, tokens=17, mask=mask)
    rows = free.rows()
    stop = {rows[0][4], rows[1][9]}
    ended = generate(model, ids, tokens=17, mask=mask, stop=stop, pad=130)
    for row, ids_of_row, length in zip(rows, ended.ids.tolist(), ended.lengths, strict=True):
        n = next((i + 1 for i, id in enumerate(row) if id in stop), 17)
        assert int(length) == n
        padding = [130] * (ended.ids.shape[1] - n)
        assert ids_of_row == row[: ended.ids.shape[1]][:n] + padding
    assert {int(n) for n in ended.lengths} != {17}


def test_the_answer_ends_when_every_row_has():
    model = made(DECODERS["rotary"])
    ids, _ = prompts(11, 11)
    first = generate(model, ids, tokens=1).ids[:, 0].tolist()
    ended = generate(model, ids, tokens=17, stop=first)
    assert ended.ids.tolist() == [[id] for id in first]
    assert ended.lengths.tolist() == [1, 1]


def test_a_seed_fixes_the_answer():
    model = made(DECODERS["rotary"])
    ids, _ = prompts(11, 11)

    def drawn(seed: int) -> list[list[int]]:
        choose = choice(temperature=1.5, seed=seed)
        return generate(model, ids, tokens=17, choose=choose).ids.tolist()

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_the_penalty_sees_prompt_and_answer_and_no_padding():
    model = made(DECODERS["rotary"])
    ids, mask = prompts(11, 3)
    shown: list[torch.Tensor] = []

    def watching(logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        shown.append(seen.clone())
        return logits.argmax(-1)

    new = generate(model, ids, tokens=3, mask=mask, choose=watching).ids
    for step, seen in enumerate(shown):
        for row in range(2):
            held = {*ids[row, mask[row]].tolist(), *new[row, :step].tolist()}
            assert set(seen[row].nonzero()[:, 0].tolist()) == held
    assert not shown[0][1, 7]


def test_dropout_is_off_and_comes_back():
    model = made(decoder_sizes(**SIZES, dropout=0.5))
    ids, _ = prompts(11)
    quiet = generate(model.eval(), ids, tokens=13).ids
    model.train()
    model.decoder.blocks[1].eval()
    assert torch.equal(generate(model, ids, tokens=13).ids, quiet)
    assert model.training
    assert not model.decoder.blocks[1].training
    next(stream(model, ids, tokens=13))
    assert model.training


def test_the_answer_can_be_learned_from():
    model = build(preset("tiny"))
    new = generate(model, torch.tensor([[1, 2, 3]]), tokens=3).ids
    model(new).sum().backward()
    assert torch.is_grad_enabled()
    for _ in stream(model, torch.tensor([[1, 2, 3]]), tokens=2):
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()


def test_half_precision():
    model = made(DECODERS["rotary"]).to(torch.bfloat16)
    ids, mask = prompts(11, 3)
    assert generate(model, ids, tokens=5, mask=mask).ids.shape == (2, 5)


def translators() -> dict[str, Architecture]:
    sizes = {**SIZES, "context": 31}
    relative = transformer_sizes(**sizes)
    bias = {"relative": {"buckets": 8, "max_distance": 20}}
    stacks = {
        side: type(stack).checked(**{**stack.model_dump(), **bias})
        for side, stack in (("encoder", relative.encoder), ("decoder", relative.decoder))
        if stack is not None
    }
    plain = relative.model_copy(update={**stacks, "embedding": Embedding()})
    return {"sinusoidal": transformer_sizes(**sizes), "relative": plain}


@pytest.mark.parametrize("name", ["sinusoidal", "relative"])
def test_an_encoder_decoder_answers_as_without_a_cache(name):
    model = made(translators()[name])
    source, mask = prompts(11, 3, 7)
    answer = torch.full((3, 1), 5)
    for _ in range(19):
        with torch.no_grad():
            # Sources alone, without padding and cache.
            last = [
                model(source[i : i + 1, mask[i]], answer[i : i + 1])[0, -1].argmax()
                for i in range(3)
            ]
        answer = torch.cat((answer, torch.stack(last)[:, None]), 1)
    assert len(set(answer.flatten().tolist())) > 7
    encoded = []
    model.encoder.register_forward_hook(lambda *_: encoded.append(1))
    got = generate(model, source, tokens=19, mask=mask, start=5)
    assert torch.equal(got.ids, answer[:, 1:])
    assert encoded == [1]
    # Padding on the right, as translation models are fed.
    right = [torch.cat((row[keep], row[~keep])) for row, keep in zip(source, mask, strict=True)]
    kept = mask.sort(1, descending=True).values
    again = generate(model, torch.stack(right), tokens=19, mask=kept, start=5)
    assert torch.equal(again.ids, got.ids)


ONE = torch.tensor([[1, 2, 3]])
BAD = [
    ({"ids": ONE[0]}, ShapeError, "prompts of shape (3,) and type torch.int64; allowed: whole"),
    ({"ids": ONE.float()}, ShapeError, "prompts of shape (1, 3) and type torch.float32"),
    ({"ids": ONE[:, :0]}, TextError, "an empty prompt; give every row one token"),
    ({"mask": torch.zeros(1, 3, dtype=torch.bool)}, TextError, "an empty prompt"),
    ({"mask": torch.ones(1, 3)}, ShapeError, "a padding mask of shape (1, 3) and type torch.float"),
    ({"mask": torch.ones(1, 2, dtype=torch.bool)}, ShapeError, "a padding mask of shape (1, 2)"),
    (
        {"mask": torch.tensor([[True, True, False]])},
        ShapeError,
        "prompts with padding behind or between their tokens; allowed: padding on the left",
    ),
    ({"mask": torch.tensor([[True, False, True]])}, ShapeError, "prompts with padding behind"),
    ({"tokens": 0}, OptionError, "0 new tokens; allowed: 1 or more"),
    (
        {"tokens": 59},
        OptionError,
        "a prompt of 3 and 59 new tokens for a context of 61; allowed: 58 new tokens; shorten",
    ),
    (
        {"ids": torch.ones(1, 61, dtype=torch.long)},
        OptionError,
        "a prompt of 61 and 2 new tokens for a context of 61; allowed: a prompt of 60 or fewer",
    ),
    ({"start": 0}, OptionError, "the start 0 for a decoder; put it in front"),
]


@pytest.mark.parametrize(("changed", "kind", "message"), BAD)
def test_bad_input_is_refused_at_the_call(changed, kind, message):
    model = made(DECODERS["rotary"])
    model.decoder.register_forward_hook(lambda *_: pytest.fail("something was computed"))
    with pytest.raises(kind) as error:
        stream(model, **{"ids": ONE, "tokens": 2, **changed})
    assert str(error.value).startswith(message)


def test_other_models_are_refused():
    with pytest.raises(ModelError, match="generation with an encoder"):
        stream(build(preset("tiny-encoder")), ONE, tokens=2)
    with pytest.raises(OptionError, match="an encoder–decoder without a start"):
        stream(build(preset("tiny-encoder-decoder")), ONE, tokens=2)


def test_past_the_context_only_when_asked_and_possible():
    model = made(DECODERS["rotary"])
    model.allow_long = True
    assert generate(model, ONE, tokens=67).ids.shape == (1, 67)
    table = made(DECODERS["learned"])
    table.allow_long = True
    with pytest.raises(OptionError, match="a prompt of 3 and 67 new tokens"):
        stream(table, ONE, tokens=67)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_said(value):
    model = made(DECODERS["rotary"])
    with torch.no_grad():
        model.decoder.norm.weight[0] = value
    with pytest.raises(NonFiniteError, match="the logits of the next token are not finite"):
        generate(model, ONE, tokens=2)
