"""A model in memory written as a folder that it can be loaded from, whole or not at all.

Headwise's own models in Headwise's format, models of transformers in that of transformers, each
with its tokenizer. What could not be loaded again as it is, is refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwise.circuits.cuts import Cut
from headwise.errors import FileError, ModelError
from headwise.files import whole_folder, writable_folder
from headwise.models.checkpoints import save as save_own
from headwise.observation.driver import is_own
from headwise.observation.loaded import LoadedModel
from headwise.observation.quiet import quiet
from headwise.observation.tokenizer import OwnTokenizer

__all__ = ["check_savable", "new_folder", "save_model"]


def new_folder(path: str | Path) -> Path:
    """The path, after making sure that a folder can be made there; an empty one may stand there.

    Raises:
        FileError: a file or a folder with something in it has that name, or it cannot be written.

    Example:
        >>> new_folder("/no/such/folder/model")
        Traceback (most recent call last):
            ...
        headwise.errors.FileError: cannot write /no/such/folder/model: ...
    """
    return writable_folder(path, replaces=())


def check_savable(loaded: LoadedModel, cuts: Sequence[Cut]) -> None:
    """Refuse to save a model that, cut, has parameters for which its format has no place.

    Raises:
        ModelError: the cut of W_O needs a bias where the family has none, or a tokenizer of a kind
            that a folder of Headwise cannot hold.
    """
    if any(cut.moved is not None and cut.moved[1].bias is None for cut in cuts):
        raise ModelError(
            f"cut, {loaded.name} needs a bias in its output projections, and a checkpoint of"
            f" {loaded.architecture} has no place for it",
            to_do="leave --save out; in Python, work with the model inside truncated(...)",
        )
    if is_own(loaded.model) and not isinstance(loaded.tokenizer, OwnTokenizer | None):
        raise ModelError(
            f"the tokenizer of {loaded.name} is a {type(loaded.tokenizer).__name__}",
            allowed="one of the tokenizers library, where a Headwise model is saved",
        )


def save_model(loaded: LoadedModel, path: str | Path) -> Path:
    """Write the model as it is now, and its tokenizer, to a new folder.

    Raises:
        FileError: see ``new_folder``; or the disk is full.
        ModelError: transformers cannot save the model; its reason is named.

    Example:
        >>> import tempfile
        >>> from headwise.models import build, preset
        >>> from headwise.observation.loading import load_model, wrap_model
        >>> loaded = wrap_model(build(preset("tiny")))
        >>> load_model(save_model(loaded, Path(tempfile.mkdtemp()) / "copy")).name
        'copy'
    """
    target = new_folder(path)
    if is_own(loaded.model):
        kept = loaded.tokenizer
        return save_own(loaded.model, target, None if kept is None else kept.tokenizer)
    with whole_folder(target, replaces=()) as temporary, quiet():
        try:
            loaded.model.save_pretrained(temporary)
            if loaded.tokenizer is not None:
                loaded.tokenizer.save_pretrained(temporary)
        except (OSError, FileError):
            raise
        except Exception as error:
            first = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
            raise ModelError(f"{loaded.name} cannot be saved ({first})") from None
    return target
