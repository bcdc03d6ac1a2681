"""Scans on disk: NetCDF (``.nc``) or Zarr (``.zarr``), chosen by the name."""

from __future__ import annotations

import json
from pathlib import Path

import xarray as xr

from headwise.errors import FileError, InputError
from headwise.files import whole, writable
from headwise.results.schema import COORDINATES, VARIABLES, Variable
from headwise.results.validate import check, holds_circuits

__all__ = ["load", "load_either", "save", "save_path"]

_HDF5 = b"\x89HDF\r\n\x1a\n"
_SUFFIXES = ".nc (NetCDF, one file) or .zarr (Zarr, a folder)"
# Zarr reads a chunk that is missing as the fill value; this attribute, the size of every file,
# makes a loss visible.
_FILES = "files"


def save_path(path: str | Path) -> Path:
    """The path, after making sure that a scan can be saved there; asked before the work begins.

    Raises:
        FileError: the suffix is neither ``.nc`` nor ``.zarr``, or the place is not writable.
    """
    target = Path(path).expanduser()
    if target.suffix not in (".nc", ".zarr"):
        raise FileError(f"cannot save a scan as {target.name}", allowed=_SUFFIXES)
    writable(target)
    if target.suffix == ".zarr" and target.exists() and not _is_zarr(target):
        raise FileError(
            f"cannot write {target}: something that is not a scan has that name",
            to_do="name another file",
        )
    return target


def save(dataset: xr.Dataset, path: str | Path) -> Path:
    """Save a scan, whole or not at all; ``load`` gives back an identical data set.

    ``.nc`` is NetCDF 4, which xarray, R, Julia and MATLAB read; ``.zarr`` is Zarr format 3.
    """
    check(dataset)
    target = save_path(path)
    plain = dataset.drop_encoding()
    with whole(target) as temporary:
        if target.suffix == ".nc":
            compressed = {
                name: {"zlib": True, "complevel": 1, "shuffle": True}
                for name, array in plain.data_vars.items()
                if array.size > 512
            }
            # Through memory: on a full disk the HDF5 library itself prints and crashes.
            temporary.write_bytes(plain.to_netcdf(engine="h5netcdf", encoding=compressed))
        else:
            plain.to_zarr(temporary, mode="w", zarr_format=3, consolidated=False)
            _note_files(temporary)
    return target


def load(path: str | Path) -> xr.Dataset:
    """Open a saved scan, all of it in memory, checked against the schema.

    Raises:
        FileError: there is no such file, it is not a Headwise scan, or it is damaged.
    """
    dataset = load_either(path)
    if holds_circuits(dataset):
        raise FileError(
            f"{path} holds circuits, without a scan",
            to_do="open it with xarray.open_dataset, or see it with headwise show",
        )
    return dataset


def load_either(path: str | Path) -> xr.Dataset:
    """A saved scan or a saved set of circuits, as ``load``; ``holds_circuits`` says which."""
    source = Path(path).expanduser()
    if not source.exists():
        raise FileError(f"there is no file {source}")
    dataset = _read_zarr(source) if source.is_dir() else _read_netcdf(source)
    try:
        check(dataset)
    except InputError as error:
        if "schema_version" not in dataset.attrs:
            raise _not_a_scan(source) from error
        raise FileError(f"{source} cannot be read: {error}") from error
    return _canonical(dataset)


def _read_netcdf(source: Path) -> xr.Dataset:
    try:
        with source.open("rb") as file:
            magic = file.read(len(_HDF5))
    except OSError as error:
        raise FileError(f"cannot read {source}: {error.strerror}") from error
    if magic != _HDF5:
        raise _not_a_scan(source)
    try:
        # Dimensions without names, as other people's HDF5 files have, are no reason to warn.
        return xr.load_dataset(source, engine="h5netcdf", phony_dims="access")
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _damaged(source) from error


def _read_zarr(source: Path) -> xr.Dataset:
    if not _is_zarr(source):
        raise _not_a_scan(source)
    try:
        attributes = json.loads((source / "zarr.json").read_text())["attributes"]
        sizes = attributes.pop(_FILES, None)
        whole_set = sizes and all((source / f).stat().st_size == size for f, size in sizes.items())
        if whole_set:
            with xr.open_zarr(source, consolidated=False, chunks=None) as opened:
                dataset = opened.load()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _damaged(source) from error
    if sizes is None:
        raise _not_a_scan(source)
    if not whole_set:
        raise _damaged(source)
    dataset.attrs = attributes
    return dataset


def _note_files(folder: Path) -> None:
    root = folder / "zarr.json"
    metadata = json.loads(root.read_text())
    metadata["attributes"][_FILES] = {
        str(file.relative_to(folder)): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file != root
    }
    root.write_text(json.dumps(metadata))


def _canonical(dataset: xr.Dataset) -> xr.Dataset:
    """One in-memory form whatever the file: the schema's order, object strings, plain numbers."""

    def ordered(table: dict[str, Variable]) -> dict[str, xr.DataArray]:
        return {
            name: dataset[name]
            .transpose(*entry.dims)
            .astype(object if entry.kind == "str" else entry.kind)
            .drop_encoding()
            for name, entry in table.items()
            if name in dataset.variables
        }

    arrays, coordinates = ordered(VARIABLES), ordered(COORDINATES)
    version = int(dataset.attrs["schema_version"])
    return xr.Dataset(arrays, coordinates, {**dataset.attrs, "schema_version": version})


def _is_zarr(path: Path) -> bool:
    return path.is_dir() and (path / "zarr.json").is_file()


def _not_a_scan(source: Path) -> FileError:
    return FileError(
        f"{source} is not a Headwise scan", allowed="what --save or scan.save wrote: .nc or .zarr"
    )


def _damaged(source: Path) -> FileError:
    return FileError(f"{source} is damaged or cut short", to_do="save the scan again")
