"""To disk and back without a difference; written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray as xr

from headwise.errors import FileError, InputError
from headwise.files import whole, writable
from headwise.results import io
from headwise.results.label import to_dataset
from tests.results.synthetic import make_record

SUFFIXES = (".nc", ".zarr")


def same(a: xr.Dataset, b: xr.Dataset) -> bool:
    return (
        a.identical(b)
        and list(a.data_vars) == list(b.data_vars)
        and all(a[n].dtype == b[n].dtype for n in a.variables)
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_round_trip(dataset, suffix, tmp_path):
    path = io.save(dataset, tmp_path / f"scan{suffix}")
    assert same(io.load(path), dataset)
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_loaded_scan_can_be_saved_again_in_either_form(suffix, tmp_path):
    dataset = to_dataset(make_record(layers=2, tokens=211))
    loaded = io.load(io.save(dataset, tmp_path / f"one{suffix}"))
    for other in SUFFIXES:
        assert same(io.load(io.save(loaded, tmp_path / f"two{other}")), dataset)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_saving_replaces_the_old_scan(suffix, tmp_path):
    path = tmp_path / f"scan{suffix}"
    io.save(to_dataset(make_record(layers=5)), path)
    second = to_dataset(make_record(layers=2))
    io.save(second, path)
    assert same(io.load(path), second)
    assert os.listdir(tmp_path) == [path.name]


def test_transposed_data_loads_in_the_order_of_the_schema(tmp_path):
    dataset = to_dataset(make_record())
    turned = dataset.transpose(*reversed(list(dataset.sizes)))
    assert same(io.load(io.save(turned, tmp_path / "scan.nc")), dataset)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_failed_save_leaves_the_old_scan(suffix, tmp_path, monkeypatch):
    dataset = to_dataset(make_record())
    path = io.save(dataset, tmp_path / f"scan{suffix}")

    def fail(self, *target, **_):
        place = self
        if suffix == ".zarr":
            target[0].mkdir()
            place = target[0] / "part"
        place.write_text("half")
        raise OSError(28, "No space left on device")

    if suffix == ".nc":
        monkeypatch.setattr(Path, "write_bytes", fail)
    else:
        monkeypatch.setattr(xr.Dataset, "to_zarr", fail)
    with pytest.raises(FileError, match=r"cannot write .*scan.*: no space left on device"):
        io.save(to_dataset(make_record(layers=2)), path)
    assert os.listdir(tmp_path) == [path.name]
    assert same(io.load(path), dataset)


def test_data_that_breaks_the_schema_is_not_saved(tmp_path):
    with pytest.raises(InputError, match="lacks the variable 'rows'"):
        io.save(to_dataset(make_record()).drop_vars("rows"), tmp_path / "scan.nc")
    assert os.listdir(tmp_path) == []


def test_where_a_scan_cannot_go(tmp_path):
    for name in ("scan.txt", "scan"):
        with pytest.raises(FileError, match=rf"cannot save a scan as {name}; allowed: .nc"):
            io.save_path(tmp_path / name)
    (tmp_path / "mine.zarr").mkdir()
    (tmp_path / "mine.zarr" / "letter").write_text("dear")
    with pytest.raises(FileError, match="something that is not a scan has that name"):
        io.save_path(tmp_path / "mine.zarr")
    assert (tmp_path / "mine.zarr" / "letter").read_text() == "dear"


def test_writable(tmp_path):
    assert writable(tmp_path / "a.html") == tmp_path / "a.html"
    with pytest.raises(FileError, match=r"there is no folder .*nowhere; make it or name another"):
        writable(tmp_path / "nowhere" / "a.html")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(FileError, match="a folder has that name; name another file"):
        writable(tmp_path / "folder.html")
    with pytest.raises(FileError, match=r"cannot write .*: file name too long"):
        writable(tmp_path / ("x" * 300))
    assert os.listdir(tmp_path) == ["folder.html"]


def test_a_device_or_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe.html")
    for path in (tmp_path / "pipe.html", Path("/dev/null")):
        with pytest.raises(FileError, match=rf"{path}: it is a device or a pipe; name a file"):
            writable(path)
    assert (tmp_path / "pipe.html").is_fifo()


def test_a_link_is_followed(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link.html").symlink_to(tmp_path / "there" / "page.html")
    for text in ("one", "two"):
        with whole(tmp_path / "link.html") as temporary:
            temporary.write_text(text)
        assert (tmp_path / "there" / "page.html").read_text() == text
    assert (tmp_path / "link.html").is_symlink()
    assert os.listdir(tmp_path / "there") == ["page.html"]


def test_whole_removes_what_was_half_written(tmp_path):
    def stop():
        with whole(tmp_path / "a.html") as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert os.listdir(tmp_path) == []


def test_loading_what_is_not_there(tmp_path):
    with pytest.raises(FileError, match=r"^there is no file .*scan\.nc$"):
        io.load(tmp_path / "scan.nc")


@pytest.mark.parametrize("content", [b"", b"hello, world", b"{}"])
def test_loading_what_is_not_a_scan(content, tmp_path):
    path = tmp_path / "scan.nc"
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"scan\.nc is not a Headwise scan; allowed: what --save"):
        io.load(path)


def test_loading_other_peoples_files(tmp_path):
    other = xr.Dataset({"x": ("t", np.arange(3.0))})
    other.to_netcdf(tmp_path / "other.nc", engine="h5netcdf")
    other.to_zarr(tmp_path / "other.zarr", zarr_format=3, consolidated=False)
    (tmp_path / "folder.zarr").mkdir()
    with h5py.File(tmp_path / "plain.nc", "w") as file:
        file["numbers"] = np.arange(3.0)
    for name in ("other.nc", "plain.nc", "other.zarr", "folder.zarr"):
        with pytest.raises(FileError, match=rf"{name} is not a Headwise scan"):
            io.load(tmp_path / name)


def test_loading_a_scan_of_a_later_version(tmp_path):
    later = to_dataset(make_record()).assign_attrs(schema_version=2)
    later.to_netcdf(tmp_path / "scan.nc", engine="h5netcdf")
    with pytest.raises(FileError) as caught:
        io.load(tmp_path / "scan.nc")
    assert str(caught.value) == (
        f"{tmp_path / 'scan.nc'} cannot be read: the scan has schema version 2; allowed: version 1;"
        " open it with the version of Headwise that wrote it"
    )


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_said_to_be(share, tmp_path):
    path = io.save(to_dataset(make_record()), tmp_path / "scan.nc")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(FileError, match=r"scan\.nc is damaged or cut short; save the scan again"):
        io.load(path)


@pytest.mark.parametrize("how", ["chunk", "metadata", "cut", "root"])
def test_a_zarr_folder_that_lost_something_is_damaged(how, tmp_path):
    path = io.save(to_dataset(make_record()), tmp_path / "scan.zarr")
    if how == "chunk":
        next(
            f for f in (path / "entropy").rglob("*") if f.is_file() and f.parent.name == "0"
        ).unlink()
    elif how == "metadata":
        (path / "entropy" / "zarr.json").unlink()
    elif how == "cut":
        chunk = next(f for f in (path / "received" / "c").rglob("*") if f.is_file())
        chunk.write_bytes(chunk.read_bytes()[:-1])
    else:
        (path / "zarr.json").write_text((path / "zarr.json").read_text()[:-20])
    with pytest.raises(FileError, match=r"scan\.zarr is damaged or cut short; save the scan again"):
        io.load(path)
