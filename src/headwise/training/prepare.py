"""Before the first step: the folder, the tokenizer, the tokens, and the architecture of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from headwise.errors import FileError, OptionError, TextError
from headwise.files import whole
from headwise.models.architecture import Architecture
from headwise.training.checkpoint import STATE, State, read_state
from headwise.training.config import TrainConfig, read_config
from headwise.training.corpus import encoded, fingerprint, read_documents
from headwise.training.data import Batches, Repeats, split
from headwise.training.processes import Processes
from headwise.training.sizes import published
from headwise.training.tokenizer import END_OF_TEXT, byte_tokenizer, train_bpe

__all__ = ["Prepared", "continued", "prepare", "run_folder"]


@dataclass(frozen=True)
class Prepared:
    """What the loop needs besides the model."""

    architecture: Architecture
    tokenizer: Tokenizer
    batches: Batches
    validation: np.ndarray
    data: str  # fingerprint of the documents


def run_folder(out: str | Path, resume: bool) -> Path:
    """The folder of the run, looked at but not made; one that holds a run is entered to resume it.

    Raises:
        OptionError: it holds a run or a model and ``resume`` is off.
        FileError: it is a file.
    """
    folder = Path(out).expanduser()
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder} is a file", to_do="name a folder for the run")
    if not resume and (folder / STATE).exists():
        raise OptionError(
            f"{folder} holds a run already",
            to_do="add --resume to continue it, or name another folder",
        )
    if not resume and (folder / "model.safetensors").exists():
        raise OptionError(f"{folder} holds a model already", to_do="name another folder")
    return folder


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = str(error.strerror).lower()
        raise FileError(f"cannot make the folder {folder}: {reason}") from None
    return folder


def continued(folder: Path, config: TrainConfig | None) -> tuple[TrainConfig, State]:
    """The config and the state of the run in a folder; ``config`` may change what is allowed to.

    Raises:
        FileError: no run there.
        OptionError: a setting that would make another run of it.
    """
    state = read_state(folder)
    before = read_config(state.about["config"])
    changed = before.changed(config) if config is not None else []
    if changed:
        name = changed[0]
        raise OptionError(
            f"{name} is {getattr(config, name)} and was {getattr(before, name)} in the run",
            allowed="a resumed run may change how long it goes, and how often it saves and logs",
            to_do="leave it out, or start another run in another folder",
        )
    return config or before, state


def prepare(
    text: str | Path, config: TrainConfig, folder: Path, here: Processes, state: State | None
) -> Prepared:
    """Tokenizer, tokens and architecture; the first process makes them, the others read them."""
    documents = read_documents(text)
    data = fingerprint(documents)
    if state is not None and state.about["data"] != data:
        raise TextError(
            f"the text {text} is not the one that the run in {folder} was trained on",
            to_do="name the same text to resume, or start another run in another folder",
        )
    saved = _made(folder) / "tokenizer.json"
    if here.first:
        tokenizer = (
            Tokenizer.from_file(str(saved)) if state else chosen_tokenizer(config, documents)
        )
        if state is None:
            with whole(saved) as temporary:
                temporary.write_text(tokenizer.to_str(), encoding="utf-8")
        encoded(tokenizer, documents, folder)
    here.wait()
    tokenizer = Tokenizer.from_file(str(saved))
    tokens = encoded(tokenizer, documents, folder)
    training, validation = split(tokens, config.validation, config.context)
    return Prepared(
        architecture=_architecture(config, tokenizer.get_vocab_size()),
        tokenizer=tokenizer,
        batches=Batches(
            tokens=training,
            context=config.context,
            size=config.batch,
            seed=config.seed,
            repeated=config.repeated,
            repeats=_repeats(config, tokenizer) if config.repeated else None,
        ),
        validation=validation,
        data=data,
    )


def chosen_tokenizer(config: TrainConfig, documents: dict[str, str]) -> Tokenizer:
    """The tokenizer that a config asks for: trained on the documents, of bytes, or from a file."""
    if config.tokenizer == "bytes":
        return byte_tokenizer()
    if config.tokenizer == "bpe":
        return train_bpe(documents.values(), config.vocab)
    path = Path(config.tokenizer).expanduser()
    if not path.is_file():
        raise FileError(
            f"there is no tokenizer {config.tokenizer}",
            allowed='"bpe", "bytes", or a file tokenizer.json',
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise FileError(f"{path} is not a tokenizer: {error}") from None


def _architecture(config: TrainConfig, vocab: int) -> Architecture:
    if config.preset is not None:
        own = {"vocab": vocab, "context": config.context}
        return published(config.preset).model_copy(update=own)
    if config.architecture is None:
        return config.model.architecture(vocab=vocab, context=config.context)
    given = config.architecture
    if given.kind != "decoder" or given.unembedding is None or not given.stack.causal:
        raise OptionError("the architecture is no causal decoder", allowed="one that is")
    if given.vocab < vocab or given.context < config.context:
        raise OptionError(
            f"the architecture has a vocabulary of {given.vocab:,} and a context of"
            f" {given.context:,}; the run needs {vocab:,} and {config.context:,}",
            to_do="raise them in the architecture, or lower vocab and context",
        )
    return given


def _repeats(config: TrainConfig, tokenizer: Tokenizer) -> Repeats:
    special = {tokenizer.token_to_id(END_OF_TEXT)}
    return Repeats(
        tokens=tuple(i for i in range(tokenizer.get_vocab_size()) if i not in special),
        shortest=config.shortest_period,
        longest=config.longest_period,
        copies=config.copies,
    )
