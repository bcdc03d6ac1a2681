"""Text: read with clear refusals, cut into tokens, arranged as the documents each model reads."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwise.errors import HeadwiseError, ModelError, OptionError, TextError
from headwise.observation.loading import LoadedModel, wrap_model
from headwise.observation.reading import default_text, read_text
from headwise.observation.text import DEFAULT_TOKENS, tokenize
from tests.observation import tiny_models
from tests.observation.tiny_models import CONTEXT, VOCABULARY

TEXT = "abcdefghijklmnopqrstuvwxyz" * 20


def model(architecture: str = "llama", head: str | None = "causal", **changes: int) -> LoadedModel:
    around = architecture in ("bert", "bart")
    built = tiny_models.build(architecture, head, **changes)
    return wrap_model(built, tiny_models.tokenizer(around=around), name=f"tiny-{architecture}")


def letters(ids: torch.Tensor) -> str:
    return tiny_models.tokenizer().decode(ids.tolist())


def message(error: type[HeadwiseError], *arguments: object, **options: object) -> str:
    with pytest.raises(error) as caught:
        tokenize(*arguments, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Files


def test_a_file_is_read_as_utf8(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_bytes("\ufeffΣ a² – ß\r\n".encode())
    assert read_text(file) == "Σ a² – ß\r\n"


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("naïve".encode())))
    assert read_text("-") == "naïve"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    with pytest.raises(TextError, match=r"^the text standard input is empty"):
        read_text("-")


def test_refused_files(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    for content, expected in (
        (b"", f"the text {file} is empty; name a file with text in it"),
        (b" \n\t", f"the text {file} is empty; name a file with text in it"),
        (
            b"one\ntwo \xe9t\xe9",
            f"the text {file} is not UTF-8: byte 0xe9 at position 8 (line 2); convert it first,"
            " for example: iconv -f LATIN1 -t UTF-8",
        ),
        (
            b"\xef\xbb\xbfab\xff",
            f"the text {file} is not UTF-8: byte 0xff at position 5 (line 1); convert it first,"
            " for example: iconv -f LATIN1 -t UTF-8",
        ),
    ):
        file.write_bytes(content)
        with pytest.raises(TextError) as caught:
            read_text(file)
        assert str(caught.value) == expected
    with pytest.raises(TextError) as caught:
        read_text(tmp_path)
    assert str(caught.value) == f"cannot read the text {tmp_path}: is a directory"
    with pytest.raises(TextError) as caught:
        read_text(tmp_path / "none")
    assert str(caught.value) == f"there is no text file {tmp_path / 'none'}"


def test_the_default_text_is_long_plain_and_small() -> None:
    text = default_text()
    assert text.isascii()
    assert len(text) < 100_000
    assert len(text.split()) > 12_000  # more words than 8,000 tokens in any large vocabulary
    assert "Gutenberg" not in text


# Decoders


def test_a_decoder_reads_one_piece_up_to_its_context() -> None:
    (document,) = tokenize(model(), TEXT)
    assert letters(document.ids) == TEXT[:CONTEXT]
    assert document.target is None
    assert document.tokens == CONTEXT


def test_without_a_context_the_default_bounds_the_tokens() -> None:
    loaded = replace(model(), context=None)
    (document,) = tokenize(loaded, TEXT * 10)
    assert document.tokens == DEFAULT_TOKENS
    (document,) = tokenize(loaded, TEXT)
    assert document.tokens == len(TEXT)


def test_a_bos_token_is_counted() -> None:
    built = tiny_models.build("llama")
    loaded = wrap_model(built, tiny_models.tokenizer(around=True))
    (document,) = tokenize(loaded, TEXT, tokens=7)
    assert document.ids.tolist()[0] == 1
    assert letters(document.ids[1:]) == TEXT[:6]


def test_windows_cut_the_tokens_and_lose_none() -> None:
    documents = tokenize(model(), TEXT, tokens=101, window=23)
    assert [d.tokens for d in documents] == [23, 23, 23, 23, 9]
    assert letters(torch.cat([d.ids for d in documents])) == TEXT[:101]


def test_batch_alone_cuts_into_as_many_pieces() -> None:
    documents = tokenize(model(), TEXT, tokens=47, batch=3)
    assert [d.tokens for d in documents] == [16, 16, 15]


def test_several_texts_are_several_documents() -> None:
    documents = tokenize(model(), ["hello", "to be"], batch=2)
    assert [letters(d.ids) for d in documents] == ["hello", "to be"]
    assert [d.tokens for d in tokenize(model(), ["hello", "to be"], tokens=3)] == [3, 3]


@pytest.mark.parametrize("given", [[5, 6, 7], (5, 6, 7), torch.tensor([5, 6, 7])])
def test_ids_are_taken_as_they_are(given: object) -> None:
    (document,) = tokenize(replace(model(), tokenizer=None), given)  # type: ignore[arg-type]
    assert document.ids.tolist() == [5, 6, 7]
    two = tokenize(model(), torch.tensor([[5, 6, 7], [8, 9, 10]]))
    assert [d.ids.tolist() for d in two] == [[5, 6, 7], [8, 9, 10]]


def test_a_very_long_text_is_not_cut_into_tokens_as_a_whole() -> None:
    loaded = model()
    seen: list[int] = []

    class Counting:
        def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
            seen.append(len(text))
            return {"input_ids": [5] * (len(text) // 1000)}

    counting = replace(loaded, tokenizer=Counting())
    (document,) = tokenize(counting, "x" * 3_000_000, tokens=97)
    assert document.tokens == 97
    assert seen == [1_000_000 + 64 * 97]
    seen.clear()
    # A text of very long tokens needs the whole.
    tokenize(replace(counting, context=None), "x" * 3_000_000, tokens=2_000)
    assert seen == [1_000_000 + 64 * 2_000, 3_000_000]


# Encoders and encoder-decoders


def test_an_encoder_reads_windows_with_its_special_tokens() -> None:
    documents = tokenize(model("bert", None), TEXT, tokens=200)
    assert [d.tokens for d in documents] == [CONTEXT, CONTEXT, 10 + 2]
    for document in documents:
        assert document.ids[0] == 1
        assert document.ids[-1] == 2
    assert letters(torch.cat([d.ids[1:-1] for d in documents])) == TEXT[:200]
    assert [d.tokens for d in tokenize(model("bert", None), TEXT, tokens=20, window=13)] == [13, 11]
    assert message(OptionError, model("bert", None), TEXT, window=2) == (
        "--window is 2, which the special tokens fill; allowed: 3 or more"
    )


def test_an_encoder_decoder_reads_halves() -> None:
    loaded = model("t5", "seq2seq")
    (document,) = tokenize(loaded, TEXT, tokens=21)
    assert document.target is not None
    assert letters(document.ids) == TEXT[:10]
    assert document.target[0] == 0  # decoder_start_token_id
    assert letters(document.target[1:]) == TEXT[10:21]
    assert document.tokens == 22
    windows = tokenize(loaded, TEXT, tokens=21, window=10)
    assert [len(d.ids) for d in windows] == [5, 5]
    # The 21st token cannot be both a source and a target; it joins the second window.
    assert [0 if d.target is None else len(d.target) for d in windows] == [1 + 5, 1 + 6]


def test_an_encoder_decoder_takes_a_pair() -> None:
    loaded = model("t5", "seq2seq")
    (document,) = tokenize(loaded, ("source", "the target"), tokens=4)
    assert document.target is not None
    assert letters(document.ids) == "sour"
    assert letters(document.target[1:]) == "the "
    (document,) = tokenize(loaded, (torch.tensor([5, 6]), torch.tensor([0, 7, 8])))
    assert document.target is not None
    assert (document.ids.tolist(), document.target.tolist()) == ([5, 6], [0, 7, 8])


# Refused


def test_short_and_empty_texts() -> None:
    assert message(TextError, model(), "a") == "the text has 1 token; at least 2 are needed"
    assert message(TextError, model(), "") == "the text is empty"
    assert message(TextError, model(), " \n") == "the text holds only white space"
    assert message(TextError, model(), []) == "no text was given: the list is empty"


def test_more_tokens_than_the_text_has() -> None:
    assert message(OptionError, model(), "hello", tokens=7) == (
        "--tokens is 7, but the text has 5 tokens; give a longer text, or --tokens 5 at most"
    )


def test_more_tokens_than_the_model_was_trained_on() -> None:
    expected = (
        "a piece of 101 tokens, but tiny-llama was trained on at most 97; add --allow-long to go"
        " on, or take --tokens 97 or less"
    )
    assert message(OptionError, model(), TEXT, tokens=101) == expected
    (document,) = tokenize(model(), TEXT, tokens=101, allow_long=True)
    assert document.tokens == 101
    assert [d.tokens for d in tokenize(model(), TEXT, tokens=101, window=97)] == [97, 4]


def test_a_table_of_positions_is_a_hard_limit() -> None:
    assert message(OptionError, model("gpt2"), TEXT, tokens=98, allow_long=True) == (
        "a piece of 98 tokens, but tiny-gpt2 has positions for 97 only; take --window 97 at most,"
        " or --tokens 97"
    )
    assert message(OptionError, model("bert", None), TEXT, window=98) == (
        "a piece of 98 tokens, but tiny-bert has positions for 97 only; take --window 97 at most"
    )


def test_ids_beyond_the_vocabulary() -> None:
    assert message(TextError, model(), [5, VOCABULARY]) == (
        f"token id {VOCABULARY}, but the vocabulary of tiny-llama has {VOCABULARY} entries; the"
        " tokenizer or the ids belong to another model"
    )
    assert message(TextError, model(), [5, -1]).startswith("token id -1, but the vocabulary")
    assert message(TextError, model(), torch.tensor([0.5, 1.0])) == (
        "token ids of dtype torch.float32; allowed: whole numbers"
    )


def test_text_without_a_tokenizer() -> None:
    assert message(ModelError, replace(model(), tokenizer=None), TEXT) == (
        "tiny-llama has no tokenizer, so it cannot read text; give token ids, or a model folder"
        " with its tokenizer"
    )
    broken = ("a note", "the tokenizer of tiny-llama could not be loaded (EOF)")
    assert message(ModelError, replace(model(), tokenizer=None, notes=broken), TEXT) == (
        "tiny-llama has no tokenizer, so it cannot read text: the tokenizer of tiny-llama could not"
        " be loaded (EOF); give token ids, or a model folder with its tokenizer"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tokens": 1}, "--tokens is 1; allowed: 2 or more"),
        ({"window": 1}, "--window is 1; allowed: 2 or more"),
        ({"batch": 0}, "--batch is 0; allowed: 1 or more"),
    ],
)
def test_sizes(options: dict[str, int], expected: str) -> None:
    assert message(OptionError, model(), TEXT, **options) == expected
