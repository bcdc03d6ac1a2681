"""The same tokens as transformers' ``generate``, greedy, for every family that generates."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from headwise.models import choice, generate, text
from headwise.models.checkpoints import load
from headwise.models.special_tokens import special_tokens
from tests.parity.loaded_checks import saved
from tests.parity.loaded_models import CASES, Case

TOKENS = 23
LENGTHS = (13, 5, 2)
# The context of that case is shorter than prompt and answer.
GENERATING = [case for case in CASES if case.name != "llama, rope dynamic"]


def padded(vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    width = max(LENGTHS)
    ids = torch.randint(3, vocab, (len(LENGTHS), width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor(LENGTHS)[:, None]
    return ids.where(mask, 0), mask


def varied(case: Case) -> PreTrainedModel:
    """The model with larger weights between small embeddings: its answers repeat no one token."""
    model = case.make()
    tables = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(0.3 if id(parameter) in tables else 2.0)
    return model


def theirs(model: PreTrainedModel, ids: torch.Tensor, **how: Any) -> torch.Tensor:
    """The new tokens that transformers generates."""
    settings = {"do_sample": False, "max_new_tokens": TOKENS, "pad_token_id": 0, **how}
    out = model.generate(ids, **settings)
    assert isinstance(out, torch.Tensor)
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize("case", GENERATING, ids=lambda case: case.name)
def test_the_same_tokens(case: Case, tmp_path: Path) -> None:
    model = varied(case)
    ours = load(saved(model, tmp_path)).model
    ids, mask = padded(ours.architecture.vocab)
    never: dict[str, Any] = {"eos_token_id": None}
    one = theirs(model, ids[:1], attention_mask=mask[:1].long(), **never)
    assert torch.equal(generate(ours, ids[:1], tokens=TOKENS).ids, one)
    want = theirs(model, ids, attention_mask=mask.long(), **never)
    assert len(set(want.flatten().tolist())) > 7
    assert torch.equal(generate(ours, ids, mask=mask, tokens=TOKENS).ids, want)
    # A token that really comes up ends its row; the others go on until all have ended.
    stop = [int(want[0, 4]), int(want[1, 9])]
    want = theirs(model, ids, attention_mask=mask.long(), eos_token_id=stop)
    got = generate(ours, ids, mask=mask, tokens=TOKENS, stop=stop)
    assert torch.equal(got.ids, want)


@pytest.mark.parametrize("theta", [0.7, 1.4])
def test_the_same_tokens_under_a_repetition_penalty(theta: float, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "llama")
    model = varied(case)
    ours = load(saved(model, tmp_path)).model
    ids, _ = padded(ours.architecture.vocab)
    want = theirs(model, ids[:1], eos_token_id=None, repetition_penalty=theta)
    got = generate(ours, ids[:1], tokens=TOKENS, choose=choice(repetition_penalty=theta)).ids
    assert torch.equal(got, want)
    assert not torch.equal(generate(ours, ids[:1], tokens=TOKENS).ids, want)


PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea, there lived a",
)


@pytest.mark.real_model
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_real_decoder() -> None:
    folder = Path(os.environ["HEADWISE_MODELS"]) / "smollm2"
    file = next(folder.glob("*.gguf"))
    checkpoint = load(file)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file.name, dtype=torch.float32
    ).eval()
    stop = special_tokens(file, checkpoint.tokenizer).stop
    assert stop == {2}
    batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    want = theirs(model, batch.input_ids, attention_mask=batch.attention_mask, pad_token_id=2)
    got = generate(
        checkpoint.model,
        batch.input_ids,
        mask=batch.attention_mask.bool(),
        tokens=TOKENS,
        stop=stop,
        pad=2,
    )
    assert torch.equal(got.ids, want)
    for prompt, row in zip(PROMPTS, want, strict=True):
        answer = text.generate(checkpoint, prompt, tokens=TOKENS)
        assert answer == tokenizer.decode(row, skip_special_tokens=True)
