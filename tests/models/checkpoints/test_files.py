"""Checkpoint folders: opened strictly, read lazily, written whole or not at all."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headwise.errors import FileError, ModelError
from headwise.models.checkpoints.files import TensorFiles, write_folder

INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "a.weight": torch.randn(5, 3, generator=generator),
        "b.weight": torch.randn(7, generator=generator).to(torch.bfloat16),
        "c.count": torch.tensor(11),
    }


def sharded(folder: Path) -> dict[str, Tensor]:
    """Two shards and their index; the tensors in them."""
    folder.mkdir()
    made = tensors()
    where = dict(zip(made, ("one.safetensors", "two.safetensors", "two.safetensors"), strict=True))
    for file in set(where.values()):
        save_file({name: made[name] for name in made if where[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return made


def same(files: TensorFiles, want: dict[str, Tensor]) -> None:
    assert set(files) == set(want)
    assert len(files) == len(want)
    for name, tensor in want.items():
        assert (files.shape(name), files.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(files.read(name), tensor)
        assert torch.equal(files[name](), tensor)


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        TensorFiles.open(path)
    return str(caught.value)


def test_one_file_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tensors(), {"config.json": {"size": 5}})
    same(TensorFiles.open(folder), tensors())
    same(TensorFiles.open(folder / "model.safetensors"), tensors())
    assert TensorFiles.open(folder).config() == {"size": 5}


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    made = sharded(tmp_path / "m")
    same(TensorFiles.open(tmp_path / "m"), made)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    (tmp_path / "m" / "two.safetensors").unlink()
    assert "lacks two.safetensors of its 2 weight files" in refused(tmp_path / "m")


def test_an_index_that_is_wrong_about_a_tensor(tmp_path: Path) -> None:
    sharded(tmp_path / "m")
    index = tmp_path / "m" / INDEX
    names = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**names, "d": "one.safetensors"}}))
    assert refused(tmp_path / "m") == (
        f"{index} names tensors that are not where it says: d in one.safetensors; fetch the files"
        " of one checkpoint only"
    )
    index.write_text(json.dumps({"weight_map": {**names, "a.weight": "two.safetensors"}}))
    assert "a.weight in two.safetensors" in refused(tmp_path / "m")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    made = sharded(tmp_path / "m")
    save_file(made, tmp_path / "m" / "two.safetensors")
    assert "both hold a.weight; fetch" in refused(tmp_path / "m")


def test_broken_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tensors(), {})
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    assert f"{file} is truncated" in refused(folder)
    file.write_bytes(data.replace(b"[5,3]", b"[5,4]"))  # the header contradicts itself
    assert refused(folder).startswith(f"{file} is corrupt (")
    file.rename(folder / "pytorch_model.bin")
    assert "which can run code when it is opened; allowed: safetensors" in refused(folder)
    assert refused(tmp_path / "none") == f"there is no file or folder {tmp_path / 'none'}"


def test_headers_and_indices_of_other_kinds(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tensors(), {})
    file = folder / "model.safetensors"
    for header in ('{"a": {"data_offsets": ["x", "y"]}}', "[1]", "[" * 100_000):
        file.write_bytes(struct.pack("<Q", len(header)) + header.encode())
        assert refused(folder) == f"the header of {file} cannot be read; fetch the file again"
    index = folder / INDEX
    for content in ('{"weight_map": {"a": 1}}', '{"weight_map": []}', "[" * 100_000, "\x00"):
        index.write_text(content)
        assert refused(folder) == f"{index} does not hold a weight map; fetch the file again"
    write_folder(tmp_path / "other", tensors(), {"config.json": "[" * 100_000})
    with pytest.raises(ModelError, match=r"config\.json is nested too deeply$"):
        TensorFiles.open(tmp_path / "other").config()


def test_an_unknown_name_is_refused_with_what_is_there(tmp_path: Path) -> None:
    files = TensorFiles.open(write_folder(tmp_path / "m", tensors(), {}))
    with pytest.raises(ModelError, match=r"has no tensor d; allowed: a\.weight, b\.weight, c\.co"):
        files.read("d")
    with pytest.raises(KeyError):
        files["d"]


def test_a_part_of_a_tensor_is_written_alone(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(6, 4)
    parts = {"q": whole[:3], "k": whole[3:], "t": whole.T}
    folder = write_folder(tmp_path / "m", parts, {})
    assert (folder / "model.safetensors").stat().st_size < 1000
    same(TensorFiles.open(folder), parts)


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    one = torch.ones(3)
    with pytest.raises(ModelError, match=r"^a and b are one tensor; write it under one name$"):
        write_folder(tmp_path / "m", {"a": one, "b": one}, {})
    with pytest.raises(ModelError, match=r"^a holds no numbers: the model was never filled$"):
        write_folder(tmp_path / "m", {"a": torch.ones(3, device="meta")}, {})
    with pytest.raises(TypeError):
        write_folder(tmp_path / "m", {"a": one}, {"config.json": {"x": object()}})
    assert os.listdir(tmp_path) == []


FULL = """
import resource, signal, sys
from pathlib import Path
import torch
from headwise.errors import FileError
from headwise.models.checkpoints.files import write_folder
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_folder(Path(sys.argv[1]), {"a": torch.zeros(50_000)}, {"config.json": {}})
except FileError as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="files cannot be limited here")
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", tensors(), {"config.json": {"old": True}})
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "m")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"cannot write {tmp_path / 'm'}: file too large\n"
    same(TensorFiles.open(tmp_path / "m"), tensors())
    assert TensorFiles.open(tmp_path / "m").config() == {"old": True}
    assert os.listdir(tmp_path) == ["m"]


def test_other_peoples_files_are_not_lost(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "README.md").touch()
    with pytest.raises(FileError, match=r"the folder holds README\.md, which would be lost"):
        write_folder(tmp_path / "m", tensors(), {})
    assert os.listdir(tmp_path / "m") == ["README.md"]
