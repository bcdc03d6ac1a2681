"""One step: accumulation is the big batch, decay spares what it should, clipping is global."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from headwise.attention.masks import Documents
from headwise.errors import OptionError
from headwise.models.build import build
from headwise.training import step as step_module
from headwise.training.config import read_config
from headwise.training.data import Batches, Repeats
from headwise.training.processes import Processes, chosen_device
from headwise.training.step import Stepper, autocast, optimizer_of
from tests.tolerance import UNIT

TOKENS = np.random.default_rng(0).integers(0, 97, 1009).astype(np.int32)
HERE = Processes(torch.device("cpu"))


def stepper(*, here=HERE, dtype=torch.float64, model=None, **changed):
    sizes = {"d_model": 12, "layers": 2, "heads": 3, "d_ff": 17, **(model or {})}
    config = read_config(
        {"context": 23, "batch": 6, "repeated": 0.4, "clip": None, "model": sizes, **changed},
        longest_period=7, shortest_period=3,
    )  # fmt: skip
    built = build(config.model.architecture(vocab=97, context=23), dtype=dtype)
    repeats = Repeats(tuple(range(97)), 3, 7)
    batches = Batches(TOKENS, 23, config.batch, 5, config.repeated, repeats)
    return Stepper(built, batches, config, here)


def gradients(step: Stepper) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in step.model.parameters()])


@pytest.mark.parametrize("accumulate", [2, 3, 6])
def test_accumulation_is_the_big_batch(accumulate):
    whole, cut = stepper(), stepper(accumulate=accumulate)
    one, other = whole.gradient(4), cut.gradient(4)
    assert one.tokens == other.tokens == 6 * 23
    # Weights of the loss are float32 sums; each gradient is a sum over all tokens.
    bound = 16 * UNIT[torch.float32] * 6 * 23 * float(gradients(whole).abs().max())
    assert float((gradients(whole) - gradients(cut)).abs().max()) <= bound
    assert other.loss == pytest.approx(one.loss, rel=1e-12)
    assert other.repeated_loss == pytest.approx(one.repeated_loss, rel=1e-12)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_processes_share_the_global_batch_out(accumulate, monkeypatch):
    monkeypatch.setattr(step_module, "DistributedDataParallel", lambda objective: objective)
    whole = stepper().micro_batches(4)[0]
    parts = [
        batch
        for rank in (0, 1)
        for batch in stepper(
            here=Processes(torch.device("cpu"), rank, 2), accumulate=accumulate
        ).micro_batches(4)
    ]
    for field, want in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.cat(field).equal(want)


def test_a_mean_of_means_would_be_another_gradient():
    whole, cut = stepper(), stepper(accumulate=6)
    whole.gradient(4)
    cut.optimizer.zero_grad()
    for batch in cut.micro_batches(4):  # each micro-batch by its own count
        cut._pull(batch, 6 * float(batch.counted.sum()))
    bound = 16 * UNIT[torch.float32] * 6 * 23 * float(gradients(whole).abs().max())
    assert float((gradients(whole) - gradients(cut)).abs().max()) > 100 * bound


def test_losses_are_those_of_the_plain_forward_pass():
    step = stepper()
    found = step.gradient(4)
    batch = step._batches.at(4)
    each = nn.functional.cross_entropy(
        step.model(batch.ids, mask=Documents(batch.documents)).detach().flatten(0, 1),
        batch.targets.flatten(),
        reduction="none",
    ).view(batch.targets.shape)
    on_text = each[batch.text]
    on_repeats = each[~batch.text][batch.counted[~batch.text]]
    assert found.loss == pytest.approx(float(on_text.mean()), rel=1e-12)
    assert found.repeated_loss == pytest.approx(float(on_repeats.mean()), rel=1e-12)
    both = torch.cat((on_text.flatten(), on_repeats))
    assert found.objective == pytest.approx(float(both.mean()), rel=1e-12)


def test_a_block_of_repeats_is_predicted_from_itself_alone():
    """Other blocks of the window change nothing; without documents they would."""
    objective = step_module.Objective(stepper().model)
    batch = next(b for i in range(9) if (b := stepper()._batches.at(i)).documents.any())
    row = int(batch.documents.any(1).nonzero()[0])
    ids, documents = batch.ids[[row]], batch.documents[[row]]
    last = documents == documents.max()
    other = torch.where(last, ids, (ids + 1) % 97)
    weights = torch.ones_like(ids, dtype=torch.float32)
    targets = batch.targets[[row]]

    def losses(of, *rest):
        return objective(of, targets, weights, *rest)[1][last]

    assert losses(ids, documents).equal(losses(other, documents))
    assert not losses(ids).equal(losses(other))


def test_clipping_is_by_the_norm_of_all_gradients():
    free, clipped = stepper(), stepper(clip=0.01)
    norm = free.gradient(0).grad_norm
    assert norm == pytest.approx(float(gradients(free).norm()), rel=1e-12)
    assert clipped.gradient(0).grad_norm == pytest.approx(norm, rel=1e-12)
    assert float(gradients(clipped).norm()) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_only_matrices_that_are_no_embeddings_decay(tied):
    step = stepper(model={"tied": tied})
    decayed, plain = ({id(p) for p in g["params"]} for g in step.optimizer.param_groups)
    for name, parameter in step.model.named_parameters():
        spared = parameter.dim() == 1 or name.startswith("embedding.")
        assert id(parameter) in (plain if spared else decayed), name
    assert step.optimizer.param_groups[1]["weight_decay"] == 0
    everything = optimizer_of(step.model, read_config(decay_all=True))
    assert len(everything.param_groups) == 1


def test_dropout_draws_by_the_step_alone():
    once, again = (stepper(model={"dropout": 0.3}) for _ in range(2))
    for step in (once, again):
        step.model.train()
    torch.manual_seed(1)
    first = once.gradient(3).loss
    torch.manual_seed(2)
    assert again.gradient(3).loss == first
    model = stepper()
    model.model.train()
    assert model.gradient(3).loss != first


@pytest.mark.parametrize("architecture", ["softcap", "scaled"])
def test_the_loss_goes_through_the_whole_unembedding(architecture):
    step = stepper()
    a = step.model.architecture
    changed = {"softcap": 2.0} if architecture == "softcap" else {"scale": 3.0, "bias": True}
    a = a.model_copy(update={"unembedding": a.unembedding.model_copy(update=changed)})
    other = Stepper(build(a, dtype=torch.float64), step._batches, step._config, HERE)
    found = other.gradient(2)
    batch = step._batches.at(2)
    each = nn.functional.cross_entropy(
        other.model(batch.ids, mask=Documents(batch.documents)).detach().flatten(0, 1),
        batch.targets.flatten(),
        reduction="none",
    )
    assert found.objective == pytest.approx(float(each[batch.counted.flatten()].mean()), rel=1e-12)


def test_bfloat16_keeps_weights_and_losses_in_float32():
    step = stepper(dtype=torch.float32, precision="bfloat16")
    exact = stepper(dtype=torch.float32).gradient(1)
    found = step.gradient(1)
    assert {p.dtype for p in step.model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in step.model.parameters()} == {torch.float32}
    assert found.loss == pytest.approx(exact.loss, rel=2**-7)
    assert found.loss != exact.loss


@pytest.mark.parametrize("device", [torch.device("mps"), torch.device("cuda")])
def test_bfloat16_is_refused_where_there_is_none(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(OptionError, match="which does not have it; allowed: float32 there"):
        autocast(SimpleNamespace(precision="bfloat16"), device)


def test_a_batch_that_cannot_be_shared_out_is_refused():
    with pytest.raises(OptionError, match="a batch of 6 over 4 processes and 1 micro-batches"):
        stepper(here=Processes(torch.device("cpu"), 1, 4))


@pytest.mark.parametrize("device", ["abacus", "cuda:7", "meta"])
def test_a_device_that_is_not_there_is_refused(device):
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(OptionError, match=device):
        chosen_device(device)
