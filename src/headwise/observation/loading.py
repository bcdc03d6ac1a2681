"""A model on disk or on the hub, opened for measuring: read whole, or refused with the reason.

Nothing in a model folder is executed, nothing is unpickled, and nothing is left at random values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.errors import ModelError, ResourceError
from headwise.gguf_header import GgufHeader
from headwise.models.checkpoints.checks import check_weights, is_gguf, listed, read_config
from headwise.models.placement import chosen_device, chosen_dtype
from headwise.observation.architecture import (
    check_routed,
    model_class,
    model_kind,
    position_limit,
)
from headwise.observation.checkpoint_files import check_loadable_gguf
from headwise.observation.driver import is_own
from headwise.observation.loaded import LoadedModel, described
from headwise.observation.own_loading import load_own, own_folder, wrap_own
from headwise.observation.quiet import parsed_once, quiet

__all__ = ["LoadedModel", "load_model", "wrap_model"]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "tekken.json",
    "tokenizer_config.json",
)
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.spm", "*.jinja"]


@dataclass(frozen=True)
class _Source:
    folder: Path
    name: str
    header: GgufHeader | None = None
    file: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"gguf_file": self.file} if self.file else {}


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model for measuring, from a folder, a hub id or a GGUF file.

    Args:
        path: a Hugging Face folder (config.json and safetensors), a Headwise folder
            (architecture.json), a ``.gguf`` file, or a hub id.
        dtype: float32, bfloat16, float16 or float64; None keeps the checkpoint's own (float32 for
            GGUF).
        device: such as "cpu" or "cuda:0"; "auto" spreads the model over all devices; None takes
            the first CUDA device, or the CPU where there is none.
        trust_remote_code: run the Python code inside the model folder, if it has any.

    Raises:
        ModelError: with what was found, before any weight is read where that is possible.

    Example:
        >>> load_model("/no/such/model")
        Traceback (most recent call last):
            ...
        headwise.errors.ModelError: there is no file or folder /no/such/model
    """
    chosen, place = chosen_dtype(dtype), chosen_device(device)
    own = own_folder(path)
    if own is not None:
        return load_own(own, dtype=chosen, device=place)
    import transformers  # noqa: F401  # before it is told to be quiet

    source = _find(str(path), trust_remote_code)
    with quiet(), parsed_once():
        config = _config(source, trust_remote_code)
        found = _class(config, trust_remote_code)
        check_routed(found, config.model_type)
        if source.file is None:
            check_weights(source.folder)
        tokenizer, notes = _tokenizer(source, trust_remote_code)
        model, more = _weights(found, source, config, chosen, place)
    notes += more + _rope_notes(source, model)
    return wrap_model(model, tokenizer, name=source.name, path=str(path), notes=tuple(notes))


def wrap_model(
    model: nn.Module,
    tokenizer: Any | None = None,
    *,
    name: str | None = None,
    path: str = "",
    notes: tuple[str, ...] = (),
) -> LoadedModel:
    """A model that is already in memory, described in the same way as a loaded one."""
    if is_own(model):
        return wrap_own(model, tokenizer, name=name, path=path, notes=notes)
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise ModelError(
            f"{type(model).__name__} has no transformers configuration",
            allowed="a transformers model, one of Headwise's own, a folder, a hub id or a GGUF"
            " file",
        )
    limit = position_limit(model)
    return described(
        model,
        tokenizer=tokenizer,
        name=name or config._name_or_path or type(model).__name__,
        architecture=config.model_type,
        context=_context(config, limit),
        path=path,
        kind=model_kind(model),
        position_limit=limit,
        notes=notes,
    )


def _find(path: str, trust_remote_code: bool) -> _Source:
    here = Path(path).expanduser()
    if here.is_dir():
        return _Source(here, here.resolve().name)
    if here.is_file():
        if not is_gguf(here):
            to_do = None
            if here.suffix in {".safetensors", ".json", ".bin"}:
                to_do = f"name its folder: {here.parent}"
            elif here.suffix == ".nc":
                to_do = f"for the page of what was saved: headwise show {path}"
            raise ModelError(
                f"{path} is a file, but not a GGUF file",
                allowed="a Hugging Face folder, a hub id or a GGUF file",
                to_do=to_do,
            )
        if here.suffix != ".gguf":  # transformers would take it for a pickle
            raise ModelError(
                f"{path} is a GGUF file, but its name does not end in .gguf", to_do="rename it"
            )
        return _Source(here.parent, here.stem, check_loadable_gguf(here), here.name)
    hub_id = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path)
    if hub_id is None or here.suffix in {".gguf", ".safetensors", ".json"}:
        raise ModelError(f"there is no file or folder {path}")
    return _Source(_from_hub(path, trust_remote_code), path)


def _from_hub(hub_id: str, trust_remote_code: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = _HUB_FILES + (["*.py"] if trust_remote_code else [])
    with quiet():
        try:
            return Path(
                snapshot_download(
                    hub_id,
                    allow_patterns=patterns,
                    ignore_patterns=["*/*", "consolidated*"],
                    etag_timeout=10,
                )
            )
        except Exception as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else ""
            raise ModelError(
                f"{hub_id} is neither a file nor a folder here, and it could not be fetched from"
                f" the Hugging Face hub ({type(error).__name__}: {first})",
                to_do="check the name, or give the path of a folder or a GGUF file",
            ) from None


def _config(source: _Source, trust_remote_code: bool) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if source.file is None:
        raw = read_config(source.folder)
        kind = raw.get("model_type")
        if raw.get("auto_map") and kind not in CONFIG_MAPPING and not trust_remote_code:
            raise ModelError(
                f"{source.folder} brings its own Python code, which is not run unasked",
                to_do="add --trust-remote-code if you trust its author",
            )
        if kind is None:
            raise ModelError(f"{source.folder / 'config.json'} does not name a model_type")
        if kind not in CONFIG_MAPPING and not trust_remote_code:
            raise ModelError(
                f"the architecture {kind!r} is not known to the installed transformers",
                allowed=f"its {len(CONFIG_MAPPING.keys())} architectures, such as llama, qwen3,"
                " gemma3, gpt2, bert, t5",
                to_do="update transformers if the model is newer",
            )
    try:
        return AutoConfig.from_pretrained(
            source.folder,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            **source.options,
        )
    except Exception as error:
        first = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        raise ModelError(f"the configuration of {source.name} cannot be used ({first})") from None


def _class(config: Any, trust_remote_code: bool) -> type[Any]:
    remote = getattr(config, "auto_map", None)
    if not (trust_remote_code and remote):
        return model_class(config)
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for name in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"):
        if name in remote:
            found: type[Any] = get_class_from_dynamic_module(remote[name], config._name_or_path)
            return found
    return model_class(config)


def _tokenizer(source: _Source, trust_remote_code: bool) -> tuple[Any | None, list[str]]:
    from transformers import AutoTokenizer

    if source.file is None and not any((source.folder / n).is_file() for n in _TOKENIZER_FILES):
        return None, [f"{source.folder} has no tokenizer"]
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.folder,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            **source.options,
        )
    except Exception as error:
        first = " ".join(str(error).split())[:200]
        return None, [f"the tokenizer of {source.name} could not be loaded ({first})"]
    return tokenizer, []


def _weights(
    found: type[Any],
    source: _Source,
    config: Any,
    dtype: torch.dtype | None,
    device: str,
) -> tuple[Any, list[str]]:
    from transformers import GgufConfig

    options = source.options
    if source.file is None:
        options["use_safetensors"] = True
        options["dtype"] = "auto" if dtype is None else dtype
    else:
        options["quantization_config"] = GgufConfig(dequantize=True)
        options["dtype"] = dtype
    if device != "cpu":
        options["device_map"] = "auto" if device == "auto" else {"": device}
    try:
        model, info = found.from_pretrained(
            source.folder,
            config=config,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # _complete refuses them by name
            **options,
        )
    except (MemoryError, torch.OutOfMemoryError):
        raise ResourceError(
            f"not enough memory on {device} for the weights of {source.name}",
            to_do="lower --dtype to bfloat16, or take another --device",
        ) from None
    except Exception as error:
        first = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        raise ModelError(f"{source.name} cannot be loaded ({first})") from None
    return model.eval(), _complete(model, info, source)


def _complete(model: Any, info: dict[str, Any], source: _Source) -> list[str]:
    """Refuse a model with tensors the checkpoint did not fill; say what was left unused."""
    notes = []
    missing = sorted(info["missing_keys"])
    if missing and all(name.startswith("pooler.") for name in missing):
        model.pooler = None  # the pooler reads the last block and feeds nothing that is measured
        notes.append("the checkpoint has no pooler; the model was read without it")
        missing = []
    wrong = [f"{name} (shape)" for name, *_ in sorted(info["mismatched_keys"])]
    if missing or wrong:
        raise ModelError(
            f"the weights of {source.name} do not fill the model: {listed(missing + wrong)}",
            to_do="the file does not belong to this configuration, or is incomplete",
        )
    unused = sorted(info["unexpected_keys"])
    if unused:
        notes.append(f"tensors of the checkpoint that the model does not use: {listed(unused)}")
    return notes


def _rope_notes(source: _Source, model: Any) -> list[str]:
    if source.header is None:
        return []
    header = source.header
    kind = header.metadata.get(f"{header.family}.rope.scaling.type", "none")
    scaled = "rope_freqs.weight" in header.tensors or kind != "none"
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if not scaled or rope.get("rope_type", "default") != "default":
        return []
    return [
        "the GGUF file scales its rotary positions, which transformers' GGUF loading leaves out:"
        " positions are those of the unscaled model"
    ]


def _context(config: Any, limit: int | None) -> int | None:
    if limit is not None:
        return limit
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
