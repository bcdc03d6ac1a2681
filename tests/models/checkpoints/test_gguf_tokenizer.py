"""The tokenizer of a GGUF file gives the tokens of transformers' tokenizer of the same file."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import headwise
from headwise.errors import ModelError
from headwise.models.checkpoints.gguf import GgufFile
from headwise.models.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from tests.models.checkpoints import gguf_files

UNICODE = (
    "Zwölf Boxkämpfer jagen Eva über den großen Sylter Deich, 1'234'567 Mal!\n\n\n"
    "日本語のテキスト、العربية، русский 🙂👩‍👩‍👧 \t  x²+y³ = ½ — e\u0301 é\r\n"
    "I'LL don't we've   it's 2026-11-30   \n <begin>a<tool> <end>"
)


@cache
def page() -> str:
    return (Path(headwise.__file__).parent / "data" / "hamlet.txt").read_text()[:20_000]


def written(path: Path, **changes: Any) -> GgufFile:
    """A tiny file with a vocabulary trained on the page."""
    given = {**gguf_files.trained(page(), "gpt-2"), **changes}
    model = gguf_files.build("llama")
    gguf_files.write(path, "llama", model, tokenizer=given)
    return GgufFile.open(path)


def theirs(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2"])
def test_tokens_are_those_of_transformers(pre: str, tmp_path: Path) -> None:
    ours = tokenizer_from_gguf(written(tmp_path / "m.gguf", pre=pre))
    other = theirs(tmp_path / "m.gguf")
    for text in (page(), UNICODE.replace("e\u0301", "")):
        assert plain(ours, text) == other(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_text_comes_back(pre: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(written(tmp_path / "m.gguf", pre=pre))
    text = UNICODE if pre != "qwen2" else UNICODE.replace("e\u0301", "é")
    assert tokenizer.decode(plain(tokenizer, text), skip_special_tokens=False) == text
    assert tokenizer.get_vocab_size() == 700


def pieces(pre: str, text: str, tmp_path: Path) -> list[str]:
    splitter = tokenizer_from_gguf(written(tmp_path / "m.gguf", pre=pre)).pre_tokenizer
    assert splitter is not None
    return [piece.replace("Ġ", " ") for piece, _ in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'LL", " eat", " 12345", "!!"]),
        ("smollm", ["I", "'LL", " eat", " ", "1", "2", "3", "4", "5", "!!"]),
        ("llama-bpe", ["I", "'LL", " eat", " ", "123", "45", "!!"]),
        ("qwen2", ["I", "'LL", " eat", " ", "1", "2", "3", "4", "5", "!!"]),
    ],
)
def test_each_way_of_splitting(pre: str, expected: list[str], tmp_path: Path) -> None:
    """Numbers whole, digit by digit, in threes; contractions in capitals only in the later two."""
    if pre in ("gpt-2", "smollm"):
        expected = ["I", "'", "LL", *expected[2:]]
    assert pieces(pre, "I'LL eat 12345!!", tmp_path) == expected


def test_special_tokens_stay_whole_and_are_put_around(tmp_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(written(tmp_path / "m.gguf"))
    ids = tokenizer.encode("<begin>a<tool>").ids
    assert [ids[0], ids[-1]] == [0, 2]
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "a<tool>"  # a user-defined token is text
    around = tokenizer_from_gguf(written(tmp_path / "m.gguf", add_bos=True, add_eos=True))
    assert around.encode("a").ids == [0, ids[1], 1]
    assert around.encode("a", "a").ids == [0, ids[1], 1, 0, ids[1], 1]
    assert around.encode("a", add_special_tokens=False).ids == [ids[1]]
    llama = tokenizer_from_gguf(written(tmp_path / "m.gguf", pre="llama-bpe"))
    assert llama.encode("a").ids == [0, ids[1]]  # Llama 3 files need not say so


def test_characters_that_are_composed_only_by_qwen(tmp_path: Path) -> None:
    for pre, equal in (("qwen2", True), ("gpt-2", False)):
        tokenizer = tokenizer_from_gguf(written(tmp_path / "m.gguf", pre=pre))
        assert (plain(tokenizer, "e\u0301") == plain(tokenizer, "é")) is equal


def refused(path: Path, **changes: Any) -> str:
    with pytest.raises(ModelError) as caught:
        tokenizer_from_gguf(written(path, **changes))
    return str(caught.value)


def test_refusals(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert refused(path, pre="tekken") == (
        f"{path} splits text as 'tekken'; allowed: default, gpt-2, smollm, llama-bpe, llama3,"
        " llama-v3, qwen2; use the tokenizer.json of the model"
    )
    assert "tokenizer of the kind 'llama'; allowed: gpt2" in refused(path, model="llama")
    assert "the merges of" in refused(path, merges=["zzz qqq"])
    tokens = gguf_files.trained(page(), "gpt-2")["tokens"]
    twice = [*tokens[:-1], tokens[-2]]
    assert f"holds {tokens[-2]!r} twice" in refused(path, tokens=twice, merges=["a b"])
    gguf_files.write(path, "llama", gguf_files.build("llama"))
    with pytest.raises(ModelError, match=r"tokenizer of the kind None"):
        tokenizer_from_gguf(GgufFile.open(path))


@pytest.mark.real_model
def test_the_real_file_gives_the_tokens_of_transformers() -> None:
    path = next((Path(os.environ["HEADWISE_MODELS"]) / "smollm2").glob("*.gguf"))
    ours, other = tokenizer_from_gguf(GgufFile.open(path)), theirs(path)
    # "½" is a digit to SmolLM, which transformers' reading of GGUF files does not split off.
    assert ours.encode(" ½").tokens == ["Ġ", "Â½"]
    for text in (page(), UNICODE.replace("½", ""), "<|im_start|>user\nHi<|im_end|>\n"):
        assert plain(ours, text) == other(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text).ids == other(text)["input_ids"]
        assert ours.decode(plain(ours, text), skip_special_tokens=False) == text
