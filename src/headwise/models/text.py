"""Generation from text to text: a prompt in, pieces of the answer out as they are made.

A piece holds whole characters: bytes that are no complete UTF-8 yet wait for the rest of their
character, and what may turn out to be the beginning of a stop text waits too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor

from headwise.errors import ModelError, OptionError, TextError
from headwise.models.build import Model
from headwise.models.checkpoints import Checkpoint, load
from headwise.models.generation import room
from headwise.models.generation import stream as stream_ids
from headwise.models.sampling import Choice, Forbid, choice
from headwise.models.special_tokens import special_tokens

__all__ = ["Pieces", "generate", "stream", "until"]

_TOKENS: Final = 100
_BEFORE: Final = 8  # tokens of the prompt that the answer is decoded behind


def generate(
    model: str | Path | Checkpoint | Model,
    text: str,
    *,
    tokenizer: Tokenizer | None = None,
    tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop: Collection[str] = (),
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> str:
    """How a model goes on from a text (an encoder–decoder: what it answers).

    Greedy, unless ``temperature``, ``top_k`` or ``top_p`` asks for a draw; a seed fixes the draws.
    Ends before a text of ``stop``, at the model's own end of text, or after ``tokens`` tokens.

    Args:
        model: a Hugging Face or Headwise folder, a ``.gguf`` file, or what ``load`` gave.
        text: the prompt.
        tokenizer: of a model that is given as a module.
        tokens: the most new tokens; None: 100, or what the context leaves.
        temperature: the logits are divided by it; 0 is greedy.
        top_k: draw from the k most likely tokens.
        top_p: draw from the fewest tokens that have this probability together.
        repetition_penalty: above 1, makes tokens of prompt and answer less likely.
        seed: of the draws.
        stop: texts that end the answer; they are not part of it.
        dtype: of a model that is loaded here, such as "bfloat16"; None: as stored.
        device: of a model that is loaded here, such as "cuda:0"; None: the CPU.

    Raises:
        OptionError: a value that is not allowed, or more tokens than the context leaves.
        TextError: an empty prompt.
        ModelError: the model cannot be loaded, has no tokenizer, or predicts no next token.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from headwise.models import build, preset
        >>> words = Tokenizer(models.WordLevel({str(i): i for i in range(257)}, unk_token="0"))
        >>> answer = generate(build(preset("tiny")), "7", tokenizer=words, tokens=3)
        >>> len(answer.split())
        3
    """
    pieces = stream(
        model,
        text,
        tokenizer=tokenizer,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        dtype=dtype,
        device=device,
    )
    return "".join(pieces)


def stream(
    model: str | Path | Checkpoint | Model,
    text: str,
    *,
    tokenizer: Tokenizer | None = None,
    tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop: Collection[str] = (),
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> Iterator[str]:
    """The answer of ``generate`` in pieces, each as soon as its characters are certain.

    The model is loaded and everything is checked at the call; the arguments are those of
    ``generate``.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from headwise.models import build, preset
        >>> words = Tokenizer(models.WordLevel({str(i): i for i in range(257)}, unk_token="0"))
        >>> pieces = stream(build(preset("tiny")), "7", tokenizer=words, tokens=3)
        >>> len(list(pieces))
        3
    """
    rules = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
    }
    choice(**rules, seed=seed)  # type: ignore[arg-type]  # refused before a model is read
    if isinstance(stop, str) or "" in stop:
        raise OptionError(f"stop is {stop!r}", allowed="texts of one character or more, in a list")
    _check_prompt(text)
    loaded, words, path = _loaded(model, tokenizer, dtype, device)
    special = special_tokens(path, words)
    prompt = words.encode(text).ids
    if not prompt:
        raise TextError("the prompt has no tokens", to_do="give a text to go on from")
    ids = torch.tensor([prompt], device=loaded.embedding.tokens.weight.device)
    choose = choice(**rules, seed=seed, device=ids.device)  # type: ignore[arg-type]
    if special.forbidden:
        choose = Choice((Forbid(special.forbidden), *choose.rules), choose.pick)
    if tokens is None:
        left = room(loaded, len(prompt))
        tokens = _TOKENS if left is None else max(1, min(_TOKENS, left))
    columns = stream_ids(
        loaded,
        ids,
        tokens=tokens,
        choose=choose,
        stop=special.stop,
    )
    before = prompt[-_BEFORE:] if loaded.architecture.kind == "decoder" else []
    return until(_decoded(columns, words.decode, before, special.stop), stop)


def _check_prompt(text: str) -> None:
    if not text:
        raise TextError("the prompt is empty", to_do="give a text to go on from")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(f"the prompt is not UTF-8: character {error.start} of it") from None


def _loaded(
    model: str | Path | Checkpoint | Model,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
) -> tuple[Model, Tokenizer, Path | None]:
    if isinstance(model, str | Path):
        model = load(model, dtype=dtype, device=device)
    elif dtype is not None or device is not None:
        raise OptionError(
            "a dtype or a device for a model that is loaded already",
            to_do="convert the model itself: model.to(…)",
        )
    path = None
    if isinstance(model, Checkpoint):
        tokenizer, path, model = tokenizer or model.tokenizer, model.path, model.model
    if tokenizer is None:
        raise ModelError(
            "a model without a tokenizer" if path is None else f"{path} has no tokenizer.json",
            to_do="put it there, or give a tokenizer of the tokenizers library",
        )
    return model, tokenizer, path


def _decoded(
    columns: Iterable[Tensor],
    decode: Callable[[list[int]], str],
    before: Sequence[int],
    ends: Collection[int],
) -> Iterator[str]:
    pieces = Pieces(decode, before)
    for column in columns:
        new = int(column)
        if new in ends:
            break
        if piece := pieces.add(new):
            yield piece
    if rest := pieces.rest():
        yield rest


class Pieces:
    """Text of ids that come one at a time, decoded behind the ids ``before``.

    Example:
        >>> pieces = Pieces(lambda ids: bytes(ids).decode(errors="replace"))
        >>> [pieces.add(byte) for byte in "a€b".encode()], pieces.rest()
        (['a', '', '', '€', 'b'], '')
    """

    def __init__(self, decode: Callable[[list[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        # Ids whose text was shown last: what a token adds can depend on those in front of it.
        self._shown = list(before)
        self._new: list[int] = []

    def add(self, id: int) -> str:
        """What the id makes certain: empty while its last character is incomplete."""
        self._new.append(id)
        text = self._undecided()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._shown, self._new = self._new, []
        return text

    def rest(self) -> str:
        """What is left at the end, incomplete or not."""
        text, self._shown, self._new = self._undecided(), self._new, []
        return text

    def _undecided(self) -> str:
        shown = self._decode(self._shown) if self._shown else ""
        return self._decode(self._shown + self._new)[len(shown) :]


def until(pieces: Iterable[str], stops: Collection[str]) -> Iterator[str]:
    """The pieces up to the first text of ``stops``; a possible beginning of one is held back.

    Example:
        >>> list(until(["one, t", "wo; thr", "ee"], ["; th"]))
        ['one, t', 'wo']
    """
    held = ""
    for piece in pieces:
        held += piece
        found = [place for stop in stops if (place := held.find(stop)) >= 0]
        if found:
            if min(found):
                yield held[: min(found)]
            return
        keep = max((_beginning(held, stop) for stop in stops), default=0)
        certain, held = held[: len(held) - keep], held[len(held) - keep :]
        if certain:
            yield certain
    if held:
        yield held


def _beginning(text: str, stop: str) -> int:
    """The length of the longest end of the text that a stop text begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
