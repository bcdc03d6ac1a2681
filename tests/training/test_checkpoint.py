"""Checkpoints are whole: a full disk, or a file that is cut off, never costs the old one."""

from __future__ import annotations

import resource
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file

from headwise.errors import FileError
from headwise.models.build import build
from headwise.training import checkpoint
from headwise.training.checkpoint import STATE, read_state, restore, save
from headwise.training.config import read_config
from headwise.training.log import LOG, Log, read_log
from headwise.training.loop import train
from headwise.training.step import optimizer_of
from tests.training.small import losses, settings, text_file


def made(seed=0, **sizes):
    config = read_config(model={"d_model": 12, "layers": 1, "heads": 3, **sizes})
    model = build(config.model.architecture(vocab=97, context=23), seed=seed)
    optimizer = optimizer_of(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def full_disk():
    """Writes beyond 3,000 bytes fail, as the system fails them.

    Only inside the block: a limit that outlives the call hits the file that pytest writes to.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_weights_and_moments_come_back(tmp_path):
    model, optimizer = made()
    save(tmp_path, model.architecture, model, optimizer, step=1, more=[2.5, "é"])
    state = read_state(tmp_path)
    assert state.about == {"step": 1, "more": [2.5, "é"]}
    other, others = made(seed=1)
    restore(state, other, others)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.equal(theirs)
        kept, restored = optimizer.state[mine], others.state[theirs]
        assert kept.keys() == restored.keys()
        assert all(kept[name].equal(restored[name]) for name in kept)
        assert all(kept[name].dtype == restored[name].dtype for name in kept)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    model, optimizer = made()
    save(tmp_path, model.architecture, model, optimizer, step=1)
    before = files(tmp_path)
    told = r"cannot write .*training.safetensors: .*what was there st"
    with pytest.raises(FileError, match=told), full_disk():
        save(tmp_path, model.architecture, model, optimizer, step=2)
    assert files(tmp_path) == before


def test_the_model_is_never_newer_than_the_state(tmp_path, monkeypatch):
    """Whatever fails between the files, a resumed run finds one step's weights and moments."""
    model, optimizer = made()
    save(tmp_path, model.architecture, model, optimizer, step=1)

    def fail(*arguments):
        raise FileError("full")

    monkeypatch.setattr(checkpoint, "write_model", fail)
    changed, others = made(seed=3)
    with pytest.raises(FileError, match="full"):
        save(tmp_path, model.architecture, changed, others, step=2)
    state = read_state(tmp_path)
    assert state.about["step"] == 2
    name, parameter = next(iter(changed.named_parameters()))
    assert state.tensors[f"model.{name}"].equal(parameter.detach())
    assert not load_file(tmp_path / "model.safetensors")[name].equal(parameter.detach())


def test_a_full_disk_while_training_is_one_line_and_the_run_goes_on(tmp_path, monkeypatch):
    text = text_file(tmp_path)
    train(text, settings(), out=tmp_path / "whole")
    write, calls = checkpoint.save_file, []

    def full(tensors, path, metadata):
        calls.append(path)
        if len(calls) > 2:  # the second checkpoint
            path.write_bytes(b"half of it")
            raise checkpoint.SafetensorError("I/O error: No space left on device (os error 28)")
        write(tensors, path, metadata=metadata)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(FileError, match=r"No space left on device .*; what was there stands"):
        train(text, settings(), out=tmp_path / "run")
    assert not list((tmp_path / "run").glob(".*"))
    assert read_state(tmp_path / "run").about["step"] == 3
    monkeypatch.undo()
    train(text, out=tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["cut", "other", "text", "empty"])
def test_a_broken_state_is_refused(tmp_path, damage):
    model, optimizer = made()
    save(tmp_path, model.architecture, model, optimizer, step=1)
    path = tmp_path / STATE
    whole = path.read_bytes()
    other = (tmp_path / "model.safetensors").read_bytes()
    path.write_bytes({"cut": whole[:-9], "other": other, "text": b"x" * 99, "empty": b""}[damage])
    with pytest.raises(FileError, match=r"training.safetensors is cut off or is not the state of"):
        read_state(tmp_path)


def test_a_state_of_another_model_is_refused(tmp_path):
    model, optimizer = made()
    save(tmp_path, model.architecture, model, optimizer, step=1)
    other, others = made(tied=False)
    with pytest.raises(
        FileError, match=r"does not fit the model: exp_avg\.unembedding\.weight and"
    ):
        restore(read_state(tmp_path), other, others)
    wider, widers = made(d_ff=19)
    with pytest.raises(FileError, match=r"does not fit the model: .* has the shape"):
        restore(read_state(tmp_path), wider, widers)


def test_a_log_that_is_opened_again_keeps_what_came_before(tmp_path):
    with Log(tmp_path, step=0) as log:
        for step in range(1, 6):
            log.write(step, loss=step / 2)
    with (tmp_path / LOG).open("a") as file:
        file.write('{"step": 6, "lo')  # the machine went down here
    with Log(tmp_path, step=3) as log:
        log.write(4, loss=7.0)
    assert [(line["step"], line["loss"]) for line in read_log(tmp_path)] == [
        (1, 0.5), (2, 1.0), (3, 1.5), (4, 7.0),
    ]  # fmt: skip
    with Log(tmp_path, step=0):
        pass
    assert read_log(tmp_path) == []
