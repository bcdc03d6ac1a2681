"""A ``config.json`` read so that nothing in it is passed over.

Every key is asked for by its family, or is known to say nothing about the mathematics, or holds
nothing (null, false, 0, empty). Whatever is left is refused by name: a setting that is not
understood could change what the model computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

from headwise.errors import ModelError

__all__ = ["Settings"]

T = TypeVar("T")

# Where the file comes from, how text is generated, how a model is trained or run: no mathematics.
_SILENT: Final = frozenset(
    """
    _num_labels n_special num_labels output_past predict_special_tokens
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled
    _name_or_path architectures attn_implementation bad_words_ids begin_suppress_tokens
    bos_token_id cache_implementation chunk_size_feed_forward classifier_dropout
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_factor
    initializer_range keys_to_ignore_at_inference label2id length_penalty max_length
    max_new_tokens min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
    pretraining_tp problem_type remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905, a column of strings would be three pages
)


class Settings:
    """The keys of a configuration, each read once and checked; ``finish`` refuses the others.

    A null is as good as a missing key, except in the ``_or_none`` forms, where it means "none".

    Example:
        >>> settings = Settings({"hidden_size": 64, "use_cache": True, "clip_qkv": 8.0})
        >>> settings.whole("hidden_size")
        64
        >>> settings.finish()
        Traceback (most recent call last):
            ...
        headwise.errors.ModelError: config.json has clip_qkv = 8.0, which is not known here ...
    """

    def __init__(self, values: Mapping[str, Any], source: str = "config.json") -> None:
        self._values = dict(values)
        self._read: set[str] = set()
        self.source = source

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands, null for null."""
        self._read.add(key)
        return self._values.get(key, default)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1; without a default, the key has to be there."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.source} lacks {key}", to_do="fetch the file again")
            return default
        return self._whole(key, value)

    def whole_or_none(self, key: str, default: int | None = None) -> int | None:
        """A whole number of at least 1, or None where the file says null."""
        value = self.get(key, default)
        return None if value is None else self._whole(key, value)

    def number(self, key: str, default: float) -> float:
        """A number."""
        value = self.get(key)
        return default if value is None else self._number(key, value)

    def number_or_none(self, key: str, default: float | None = None) -> float | None:
        """A number, or None where the file says null."""
        value = self.get(key, default)
        return None if value is None else self._number(key, value)

    def positive(self, key: str, default: float) -> float:
        """A number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise self.refusal(key, "a number above 0")
        return value

    def positive_or_none(self, key: str, default: float | None = None) -> float | None:
        """A number above 0, or None where the file says null."""
        value = self.number_or_none(key, default)
        if value is not None and value <= 0:
            raise self.refusal(key, "a number above 0, or null")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def word(self, key: str, words: Mapping[str, T], default: str) -> T:
        """What a word stands for."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in words:
            raise self.refusal(key, ", ".join(words))
        return words[value]

    def words(self, key: str, allowed: Iterable[str]) -> list[str] | None:
        """A list of words, or None where there is none."""
        value, allowed = self.get(key), list(allowed)
        if value is None:
            return None
        if not isinstance(value, list) or any(each not in allowed for each in value):
            raise self.refusal(key, "a list of " + ", ".join(allowed))
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any other value than these; a missing key and null are fine."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise self.refusal(key, ", ".join(repr(each) for each in allowed))

    def silent(self, *keys: str) -> None:
        """Keys that say nothing about the mathematics of this family."""
        self._read.update(keys)

    def refusal(self, key: str, allowed: str) -> ModelError:
        """The error that says what stands under a key and what may."""
        return ModelError(
            f"{self.source} has {key} = {self._values.get(key)!r}",
            allowed=allowed,
            to_do="this variant of the model cannot be loaded",
        )

    def finish(self) -> None:
        """Refuse what nobody asked for, unless it says nothing."""
        for key, value in self._values.items():
            if value and key not in self._read and key not in _SILENT:
                raise ModelError(
                    f"{self.source} has {key} = {value!r}, which is not known here and could change"
                    " what the model computes",
                    to_do="remove the key if it says nothing about the forward pass",
                )

    def _whole(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(key, "a whole number of at least 1")
        return value

    def _number(self, key: str, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) < math.inf:
            raise self.refusal(key, "a number")
        return float(value)
