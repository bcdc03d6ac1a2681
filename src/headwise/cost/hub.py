"""The config.json of a model on the Hugging Face hub: from the cache, or fetched."""

from __future__ import annotations

import re
from pathlib import Path

from headwise.errors import ModelError

__all__ = ["fetch_config", "is_hub_id"]


def is_hub_id(name: str) -> bool:
    """Whether a name can be one on the hub, such as ``HuggingFaceTB/SmolLM2-135M`` or ``gpt2``.

    Example:
        >>> is_hub_id("org/model-7B"), is_hub_id("../model"), is_hub_id("model.gguf")
        (True, False, False)
    """
    named = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None
    return named and not name.endswith((".json", ".gguf", ".safetensors", ".bin"))


def fetch_config(name: str) -> Path:
    """The file config.json of a model on the hub; nothing else is fetched.

    Raises:
        ModelError: the hub cannot be reached, or has no such model or file.
    """
    try:
        from huggingface_hub import (
            get_hf_file_metadata,
            hf_hub_download,
            hf_hub_url,
            try_to_load_from_cache,
        )
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            RepositoryNotFoundError,
        )
    except ImportError:
        raise ModelError(
            f"there is no file or folder {name}",
            to_do="to look it up on the hub, install huggingface_hub",
        ) from None
    try:
        found = try_to_load_from_cache(name, "config.json")
        if isinstance(found, str):
            return Path(found)
        get_hf_file_metadata(hf_hub_url(name, "config.json"))  # fails at once, without retrying
        return Path(hf_hub_download(name, "config.json"))
    except GatedRepoError:
        raise ModelError(
            f"{name} on the hub asks for its terms to be accepted",
            to_do="log in (hf auth login), or give its config.json",
        ) from None
    except RepositoryNotFoundError:
        reason = "and no model of that name on the hub"
    except EntryNotFoundError:
        raise ModelError(
            f"{name} on the hub has no config.json",
            to_do="if it holds .gguf files, download one and name it",
        ) from None
    except Exception as error:  # the errors of the library's clients have no narrower root
        reason = f"and the hub cannot be asked: {str(error) or type(error).__name__}"
    raise ModelError(
        f"there is no file or folder {name}, {reason}",
        to_do="give a config.json, its folder, a .gguf file, or the sizes as options",
    )
