"""Every text comes back from its tokens; the same text gives the same tokenizer."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import OptionError, TextError
from headwise.training.corpus import encode
from headwise.training.tokenizer import (
    END_OF_TEXT,
    byte_tokenizer,
    bytes_as_characters,
    pieces,
    train_bpe,
)
from tests.training.small import TEXT

BYTES = byte_tokenizer()
BPE = train_bpe([TEXT], 311)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(ANY_TEXT)
def test_bytes_are_their_own_tokens(text):
    ids = BYTES.encode(text).ids
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text


@given(ANY_TEXT)
def test_every_text_comes_back(text):
    assert BPE.decode(BPE.encode(text).ids) == text


def test_the_vocabulary_is_as_large_as_asked():
    assert BPE.get_vocab_size() == 311
    assert BYTES.get_vocab_size() == 257
    assert BPE.token_to_id(END_OF_TEXT) is not None
    assert set(bytes_as_characters()) <= set(BPE.get_vocab())
    assert len(BPE.encode(TEXT).ids) < len(TEXT) / 2  # merges shorten


def test_training_is_the_same_in_another_process():
    code = (
        "from headwise.training.tokenizer import train_bpe\n"
        "from tests.training.small import TEXT\n"
        "import hashlib\n"
        "print(hashlib.sha256(train_bpe([TEXT], 311).to_str().encode()).hexdigest())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(said) == 1


@given(st.text("a b\n\t.é", max_size=80), st.integers(1, 9))
def test_pieces_do_not_change_the_tokens(text, size):
    cut = list(pieces(text, size))
    assert "".join(cut) == text
    assert [i for piece in cut for i in BPE.encode(piece).ids] == BPE.encode(text).ids


def test_pieces_cut_elsewhere_would_change_the_tokens():
    halves = [TEXT[:7], TEXT[7:]]  # inside a word
    assert [i for half in halves for i in BPE.encode(half).ids] != BPE.encode(TEXT).ids


def test_documents_end_with_the_end_of_text():
    end = BPE.token_to_id(END_OF_TEXT)
    tokens = encode(BPE, {"a": "one fox\n", "b": "two dogs"}).tolist()
    assert tokens.count(end) == 2
    assert tokens[-1] == end
    # The end of text in a document is plain text to no tokenizer: it counts as an end.
    assert BPE.decode(tokens, skip_special_tokens=True) == "one fox\ntwo dogs"


@pytest.mark.parametrize(
    ("texts", "vocab", "error", "line"),
    [
        ([TEXT], 256, OptionError, "a vocabulary of 256 tokens; allowed: 257 or more"),
        (["ab"], 300, TextError, "the text is too short for a vocabulary of 300 tokens: it gives"),
    ],
)
def test_what_cannot_be_trained_is_refused(texts, vocab, error, line):
    with pytest.raises(error, match=line):
        train_bpe(texts, vocab)
