"""Text in, text out: whole characters, stop texts, special tokens, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headwise.errors import ModelError, OptionError, TextError
from headwise.models import build, preset
from headwise.models.architecture import Unembedding
from headwise.models.checkpoints import load, save
from headwise.models.generation import generate as generate_ids
from headwise.models.special_tokens import SpecialTokens, special_tokens
from headwise.models.text import Pieces, generate, stream, until

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def bytewise() -> Tokenizer:
    """256 bytes and an end of text, in the order of the bytes."""
    table = pre_tokenizers.ByteLevel.alphabet()
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (chr(code) for code in range(0x100, 0x200))
    letters = [chr(byte) if byte in printable else next(others) for byte in range(256)]
    assert set(letters) == set(table)
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def fallback() -> Tokenizer:
    """Words with a mark in front, and bytes for what is no word: as in Llama 2."""
    words = ["▁one", "▁two", "o", *BYTES]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def talking(seed: int = 0, **changes: object):
    """A tiny model over bytes whose answers vary."""
    architecture = preset("tiny").model_copy(
        update={"unembedding": Unembedding(tied=False), **changes}
    )
    model = build(architecture, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(10)
    return model


def pieces_of(tokenizer: Tokenizer, ids: list[int], before: list[int]) -> list[str]:
    pieces = Pieces(tokenizer.decode, before)
    return [*(pieces.add(id) for id in ids), pieces.rest()]


@given(st.text(max_size=17), st.text(max_size=5))
def test_pieces_are_the_text(text, prompt):
    words = bytewise()
    ids, before = words.encode(text).ids, words.encode(prompt).ids
    pieces = pieces_of(words, ids, before)
    assert "".join(pieces) == text
    whole = [piece for piece in pieces[:-1] if piece]
    assert all("\ufffd" not in piece for piece in whole) or "\ufffd" in text


@given(st.lists(st.integers(0, 255), max_size=23))
def test_pieces_of_bytes_that_are_no_text(ids):
    words = bytewise()
    assert "".join(pieces_of(words, ids, [])) == words.decode(ids)


@given(st.lists(st.sampled_from(["▁one", "▁two", "o", "é", "€", "😀"]), max_size=11))
def test_pieces_of_words_and_bytes(tokens):
    words = fallback()
    ids: list[int] = []
    for token in tokens:
        known = words.token_to_id(token)
        ids += [words.token_to_id(BYTES[b]) for b in token.encode()] if known is None else [known]
    before = [words.token_to_id("▁one")]
    wanted = words.decode(before + ids).removeprefix("one")
    assert "".join(pieces_of(words, ids, before)) == wanted
    # Behind the prompt, a word keeps the blank in front of it.
    assert wanted == "".join(tokens).replace("▁", " ")


@given(st.text("ab", max_size=23), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_a_stop_text_ends_the_pieces_wherever_they_are_cut(text, stops):
    ends = [place for stop in stops if (place := text.find(stop)) >= 0]
    wanted = text[: min(ends)] if ends else text
    for width in (1, 2, 5):
        pieces = [text[i : i + width] for i in range(0, len(text), width)]
        assert "".join(until(pieces, stops)) == wanted


def test_nothing_waits_that_need_not():
    assert list(until(["a", "b", "c"], [])) == ["a", "b", "c"]
    assert list(until(["a", "bx", "c"], ["xy"])) == ["a", "b", "xc"]


def test_the_stream_is_the_answer_and_comes_in_pieces():
    model, words = talking(), bytewise()
    answer = generate(model, "Where?", tokenizer=words, tokens=31)
    pieces = list(stream(model, "Where?", tokenizer=words, tokens=31))
    assert "".join(pieces) == answer
    assert len(pieces) > 7
    drawn = [
        generate(model, "Where?", tokenizer=words, tokens=31, temperature=1.0, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] != answer


def test_a_stop_text_is_not_part_of_the_answer():
    model, words = talking(), bytewise()
    answer = generate(model, "Where?", tokenizer=words, tokens=31)
    stop = answer[9:11]
    short = generate(model, "Where?", tokenizer=words, tokens=31, stop=["never", stop])
    assert short == answer[: answer.index(stop)]
    assert len(short) < len(answer)


def test_the_end_of_text_ends_the_answer():
    model, words = talking(), bytewise()
    with torch.no_grad():
        model.unembedding.weight[256] = 0
    long = generate(model, "Where?", tokenizer=words, tokens=31)
    ids = torch.tensor([words.encode("Where?").ids])
    sixth = generate_ids(model, ids, tokens=6).rows()[0][5]
    with torch.no_grad():  # the end of text is now a little likelier than the sixth token
        model.unembedding.weight[256] = model.unembedding.weight[sixth] * 1.01
    short = generate(model, "Where?", tokenizer=words, tokens=31)
    assert long.startswith(short)
    assert len(short) < len(long)


def test_without_a_number_the_answer_is_what_fits():
    model, words = talking(), bytewise()
    prompt = "A prompt of sixty bytes leaves four new ones of a context of"
    assert len(prompt) == 60
    four = generate(model, prompt, tokenizer=words)
    assert four == generate(model, prompt, tokenizer=words, tokens=4)
    with pytest.raises(OptionError, match="a prompt of 60 and 5 new tokens for a context of 64"):
        generate(model, prompt, tokenizer=words, tokens=5)


def test_a_folder_a_checkpoint_and_a_model_answer_alike(tmp_path):
    model, words = talking(), bytewise()
    folder = save(model, tmp_path / "model", words)
    answer = generate(model, "Where?", tokenizer=words, tokens=7)
    assert generate(folder, "Where?", tokens=7) == answer
    assert generate(str(folder), "Where?", tokens=7) == answer
    assert generate(load(folder), "Where?", tokens=7) == answer


BAD = [
    ("", {}, TextError, "the prompt is empty; give a text to go on from"),
    ("ab\udcff", {}, TextError, "the prompt is not UTF-8: character 2 of it"),
    ("a", {"temperature": -1.0}, OptionError, "a temperature of -1"),
    ("a", {"top_p": 0.0}, OptionError, "a top-p of 0"),
    ("a", {"tokens": 0}, OptionError, "0 new tokens"),
    ("a" * 64, {}, OptionError, "a prompt of 64 and 1 new tokens for a context of 64; allowed: a"),
    ("a", {"stop": "end"}, OptionError, "stop is 'end'; allowed: texts of one character or more"),
    ("a", {"stop": [""]}, OptionError, "stop is ['']"),
    ("a", {"dtype": "float16"}, OptionError, "a dtype or a device for a model that is loaded alr"),
]


@pytest.mark.parametrize(("text", "settings", "kind", "message"), BAD)
def test_bad_input_is_refused_at_the_call(text, settings, kind, message):
    with pytest.raises(kind) as error:
        stream(talking(), text, tokenizer=bytewise(), **settings)
    assert str(error.value).startswith(message)


def test_a_model_without_a_tokenizer(tmp_path):
    folder = save(talking(), tmp_path / "model")
    with pytest.raises(ModelError, match=r"model has no tokenizer\.json; put it there"):
        stream(folder, "a")
    with pytest.raises(ModelError, match="a model without a tokenizer"):
        stream(talking(), "a")


def test_a_bad_value_is_said_before_the_model_is_read():
    with pytest.raises(OptionError, match="a top-k of 0"):
        stream("/no/such/model", "a", top_k=0)
    with pytest.raises(TextError, match="the prompt is empty"):
        stream("/no/such/model", "")


def written(folder: Path, **files: dict) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_special_tokens_of_a_folder(tmp_path):
    words = bytewise()
    config = {"eos_token_id": 3, "bad_words_ids": [[7]]}
    folder = written(tmp_path, config=config)
    assert special_tokens(folder, words) == SpecialTokens(frozenset([3]), (7,))
    written(folder, generation_config={"eos_token_id": [5, 8], "suppress_tokens": [9, 1]})
    assert special_tokens(folder, words) == SpecialTokens(frozenset([5, 8]), (1, 7, 9))
    written(folder, generation_config={"bad_words_ids": [[1, 2]]})
    with pytest.raises(ModelError, match=r"forbids the sequence of tokens \[1, 2\]"):
        special_tokens(folder, words)
    assert special_tokens(None, words) == SpecialTokens(frozenset([256]))
    assert special_tokens(None, fallback()) == SpecialTokens()


def test_forbidden_tokens_are_never_chosen(tmp_path):
    model, words = talking(), bytewise()
    folder = save(model, tmp_path / "model", words)
    answer = generate(folder, "Where?", tokens=7)
    chosen = words.encode(answer).ids[0]
    # The same model as a Hugging Face folder would say it in its generation_config.json.
    checkpoint = load(folder)
    (folder / "architecture.json").unlink()
    written(folder, generation_config={"suppress_tokens": [chosen]})
    other = generate(checkpoint, "Where?", tokens=7)
    assert answer[0] not in other
