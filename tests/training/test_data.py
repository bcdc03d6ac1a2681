"""Batches are functions of seed, step and place; repeated sequences repeat; bad texts are named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.errors import OptionError, TextError
from headwise.training.corpus import encoded, fingerprint, read_documents
from headwise.training.data import Batches, Repeats, is_repeated, split, validation_windows
from headwise.training.tokenizer import byte_tokenizer

TOKENS = np.random.default_rng(0).integers(0, 97, 1009).astype(np.int32)


def batches(**changed):
    given = {
        "tokens": TOKENS,
        "context": 29,
        "size": 7,
        "seed": 3,
        "repeated": 0.4,
        "repeats": Repeats(tuple(range(97)), shortest=3, longest=7),
    }
    return Batches(**{**given, **changed})


@given(st.integers(0, 10**6), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_a_batch_is_the_same_however_it_is_cut(step, sizes):
    whole = batches(size=sum(sizes)).at(step)
    start = 0
    for size in sizes:
        part = batches(size=sum(sizes)).at(step, range(start, start + size))
        for mine, all_of_it in zip(part, whole, strict=True):
            assert mine.equal(all_of_it[start : start + size])
        start += size


def test_seed_step_and_place_each_change_the_sequence():
    first = batches(repeated=0.0).at(5)
    assert not first.ids[0].equal(first.ids[1])
    assert not first.ids.equal(batches(repeated=0.0).at(6).ids)
    assert not first.ids.equal(batches(repeated=0.0, seed=4).at(5).ids)
    assert first.ids.equal(batches(repeated=0.0).at(5).ids)


def test_text_windows_stand_in_the_text_and_every_start_is_drawn():
    tokens = np.arange(40, dtype=np.int32)
    starts = set()
    for step in range(60):
        batch = batches(tokens=tokens, repeated=0.0).at(step)
        assert batch.targets.equal(batch.ids + 1)
        assert bool(batch.counted.all())
        assert bool(batch.text.all())
        starts |= set(batch.ids[:, 0].tolist())
    assert starts == set(range(40 - 29))


@given(st.floats(0, 1), st.integers(1, 500))
def test_the_share_of_repeated_sequences_is_even(share, number):
    assert abs(sum(is_repeated(i, share) for i in range(number)) - share * number) < 1


def test_what_counts_is_what_an_earlier_copy_tells():
    seen = set()
    for step in range(40):
        batch = batches().at(step)
        for ids, targets, counted, text, documents in zip(*batch, strict=True):
            if bool(text):
                assert not documents.any()
                continue
            both = [*ids.tolist(), int(targets[-1])]
            begins = _blocks(counted.tolist())
            # A document ends where the next block begins; the target of its last token is no
            # longer in it, and does not count.
            starts = [0, *((documents[1:] != documents[:-1]).nonzero().flatten() + 1).tolist()]
            assert {b for b, _ in begins} <= set(starts)
            for i in range(29):
                if counted[i]:
                    # the target stands one period before, in the same block
                    period = next(e - b for b, e in begins if b <= i + 1 and e <= i + 1)
                    assert both[i + 1] == both[i + 1 - period]
                    seen.add(period)
    assert seen == {3, 4, 5, 6, 7}


def _blocks(counted: list[bool]) -> list[tuple[int, int]]:
    """(start, end of the first copy) of every block, latest first, from what counts."""
    known = [False, *counted]  # known[i]: token i repeats an earlier one
    out, start = [], 0
    for i in range(1, len(known)):
        if known[i] and not known[i - 1]:
            out.append((start, i))
        if not known[i] and known[i - 1]:
            start = i
    return out[::-1]


def test_repeats_draw_every_token_and_no_other():
    repeats = Repeats(tokens=(2, 3, 5), shortest=3, longest=7)
    ids, _, _ = repeats.sequence(np.random.default_rng(1), 499)
    assert set(ids.tolist()) == {2, 3, 5}


def test_the_split_is_contiguous_and_windows_are_fixed():
    training, validation = split(TOKENS, 0.1, context=29)
    assert np.concatenate((training, validation)).tolist() == TOKENS.tolist()
    assert len(validation) == 101
    once, again = (list(validation_windows(validation, 29, 2)) for _ in range(2))
    assert [w.tolist() for w in once] == [w.tolist() for w in again]
    assert [w[0] for w in once] == [validation[0], validation[58]]
    assert len(list(validation_windows(validation, 29, 99))) == 3
    assert list(validation_windows(validation[:0], 29, 9)) == []


@pytest.mark.parametrize(
    ("share", "context", "error", "line"),
    [
        (1.0, 29, OptionError, "a validation share of 1.0; allowed: 0"),
        (0.1, 101, TextError, "its validation part has 101 tokens; allowed: more than the context"),
        (0.0, 1009, TextError, "its training part has 1,009 tokens; allowed: more than the"),
    ],
)
def test_a_text_that_is_too_short_is_refused(share, context, error, line):
    with pytest.raises(error, match=line):
        split(TOKENS, share, context)


def test_a_folder_is_read_in_order_of_names(tmp_path):
    for name, text in (("b.txt", "bee"), ("a/c.md", "sea"), (".git/x.txt", "no"), ("n.bin", "no")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_documents(tmp_path) == {"a/c.md": "sea", "b.txt": "bee"}
    assert read_documents(tmp_path / "b.txt") == {"b.txt": "bee"}


@pytest.mark.parametrize(
    ("name", "data", "line"),
    [
        ("empty.txt", b" \n", "empty.txt is empty"),
        ("latin.txt", b"caf\xe9", "latin.txt is not UTF-8: byte 0xe9 at position 3 .line 1."),
        ("data.bin", b"x", "holds no text; allowed: files ending in .txt, .text, .md"),
    ],
)
def test_a_bad_file_in_a_folder_is_named(tmp_path, name, data, line):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(TextError, match=line):
        read_documents(tmp_path)


def test_tokens_are_made_once_and_again_when_the_text_changes(tmp_path, monkeypatch):
    tokenizer = byte_tokenizer()
    first = encoded(tokenizer, {"a": "one"}, tmp_path)
    stamp = (tmp_path / "tokens.npy").stat().st_mtime_ns
    assert encoded(tokenizer, {"a": "one"}, tmp_path).tolist() == first.tolist()
    assert (tmp_path / "tokens.npy").stat().st_mtime_ns == stamp
    assert encoded(tokenizer, {"a": "two"}, tmp_path)[0] == ord("t")
    (tmp_path / "tokens.json").write_text("{cut o")
    assert encoded(tokenizer, {"a": "two"}, tmp_path)[0] == ord("t")


def test_names_texts_and_their_borders_are_in_the_fingerprint():
    prints = {
        fingerprint(documents, tokenizer)
        for documents in ({"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {"a": "cb"})
        for tokenizer in ("", "t")
    }
    assert len(prints) == 8
