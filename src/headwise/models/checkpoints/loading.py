"""A model on disk, in any of the formats that are read: found out, opened, read whole or refused.

a folder with architecture.json   Headwise's own
a folder with config.json         Hugging Face, of one of ``FAMILIES``
a .gguf file                      of the Llama family
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from headwise.errors import ModelError, OptionError
from headwise.models.build import Model
from headwise.models.checkpoints.bert import BERT
from headwise.models.checkpoints.checks import is_gguf, read_config
from headwise.models.checkpoints.family import Family, assemble
from headwise.models.checkpoints.files import TensorFiles
from headwise.models.checkpoints.gemma2 import GEMMA2
from headwise.models.checkpoints.gguf import GgufFile
from headwise.models.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from headwise.models.checkpoints.gpt2 import GPT2
from headwise.models.checkpoints.gpt_neox import GPT_NEOX
from headwise.models.checkpoints.llama import LLAMA
from headwise.models.checkpoints.marian import MARIAN
from headwise.models.checkpoints.own import ARCHITECTURE, read_own
from headwise.models.checkpoints.settings import Settings
from headwise.models.checkpoints.t5 import T5
from headwise.models.embedded import is_embedded
from headwise.models.joined import join
from headwise.models.placement import chosen_device, chosen_dtype

__all__ = ["FAMILIES", "Checkpoint", "load"]

FAMILIES: Final[tuple[Family, ...]] = (GPT2, GPT_NEOX, LLAMA, GEMMA2, BERT, MARIAN, T5)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model in evaluation mode, its tokenizer, and where both came from.

    ``tokenizer`` is None where there is none that can be read; ``note`` then says why.
    """

    model: Model
    tokenizer: Tokenizer | None
    path: Path
    note: str | None = None


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> Checkpoint:
    """A model as this library's own modules, from a folder or a file.

    Strict: a tensor or a setting that is missing, left over or not understood is an error that
    names it; nothing is left at random values, and no code from the folder runs.

    Args:
        path: a Hugging Face folder (config.json and safetensors), a Headwise folder
            (architecture.json) or a ``.gguf`` file. Names on a hub are not fetched.
        dtype: of all parameters, such as "bfloat16"; None: as stored (where a foreign checkpoint
            mixes types, the widest of them; quantised GGUF weights and the model inside the
            package become float32).
        device: such as "cuda:0"; None: the CPU.

    Raises:
        ModelError: what was found, and what is allowed.
        OptionError: a dtype or a device that cannot be used here.

    Example:
        >>> import tempfile
        >>> from headwise.models import build, preset
        >>> from headwise.models.checkpoints import save
        >>> folder = save(build(preset("tiny")), Path(tempfile.mkdtemp()) / "tiny")
        >>> load(folder).model.architecture == preset("tiny")
        True
    """
    here, wanted, place = Path(path).expanduser(), chosen_dtype(dtype), _one_device(device)
    if not here.exists():
        raise _not_there(str(path))
    if here.is_file():
        return _from_gguf(here, wanted, place)
    if (here / ARCHITECTURE).is_file():
        if wanted is None and is_embedded(here):
            wanted = torch.float32
        return _with_tokenizer(join(read_own(here, dtype=wanted, device=place)), here)
    config = read_config(here)
    family = _family(config.get("model_type"), here)
    stored = TensorFiles.open(here)
    settings = Settings(config, str(here / "config.json"))
    model = assemble(family, settings, stored, dtype=wanted, device=place, source=str(here))
    return _with_tokenizer(join(model), here)


def _one_device(device: torch.device | str | None) -> str:
    place = "cpu" if device is None else chosen_device(device)
    if place == "auto":
        raise OptionError(
            "device is 'auto', which spreads a model over several devices",
            allowed="one device, such as cpu or cuda:0",
            to_do="hw.load_model spreads transformers' modules",
        )
    return place


def _from_gguf(file: Path, dtype: torch.dtype | None, device: str) -> Checkpoint:
    if not is_gguf(file):
        raise _not_a_model(file)
    stored = GgufFile.open(file)
    settings = Settings(stored.config(), str(file))
    model = assemble(LLAMA, settings, stored, dtype=dtype, device=device, source=str(file))
    try:
        return Checkpoint(join(model), tokenizer_from_gguf(stored), file)
    except ModelError as error:
        return Checkpoint(join(model), None, file, note=str(error))


def _family(model_type: object, folder: Path) -> Family:
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = sorted(word for family in FAMILIES for word in family.model_types)
    raise ModelError(
        f"{folder} holds a model of the architecture {model_type!r}",
        allowed=", ".join(known),
        to_do="hw.scan and hw.load_model measure others as transformers' modules",
    )


def _with_tokenizer(model: Model, folder: Path) -> Checkpoint:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return Checkpoint(model, None, folder, note=f"{folder} has no tokenizer.json")
    try:
        return Checkpoint(model, Tokenizer.from_file(str(path)), folder)
    except Exception as error:  # the library raises no narrower one
        raise ModelError(f"{path} cannot be read: {error}", to_do="fetch the file again") from None


def _not_there(path: str) -> ModelError:
    hub = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path)
    return ModelError(
        f"there is no file or folder {path}",
        to_do="a name on a hub is not fetched here: download the model and give its folder"
        if hub
        else None,
    )


def _not_a_model(file: Path) -> ModelError:
    part = file.suffix in (".safetensors", ".json", ".bin")
    return ModelError(
        f"{file} is a file, but not a GGUF file",
        allowed="a folder with config.json or architecture.json, or a .gguf file",
        to_do=f"name its folder: {file.parent}" if part else None,
    )
