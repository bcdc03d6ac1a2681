"""Files and folders written whole or not at all: to a name beside the target, then renamed.

A folder takes the place of an older one in a single step where the system can swap two names
(Linux), so that at every instant, also after a crash, one whole folder stands at the path.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from headwise.errors import FileError

__all__ = ["whole", "whole_folder", "writable", "writable_folder"]

_HERE = -100  # AT_FDCWD: names are relative to the working folder
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)


def writable(path: str | Path) -> Path:
    """The path, after making sure that a file can be put there: asked before hours of work.

    A trial file is made in the folder and removed again. A link is followed, as a shell does.

    Raises:
        FileError: the folder is missing or does not allow it, or what stands at the path is a
            folder, a device or a pipe: putting a file in its place would destroy it.
    """
    target = Path(path).expanduser()
    try:
        if not target.parent.is_dir():
            raise FileError(
                f"cannot write {target}: there is no folder {target.parent}",
                to_do="make it or name another",
            )
        if target.is_dir() and target.suffix != ".zarr":
            raise FileError(
                f"cannot write {target}: a folder has that name", to_do="name another file"
            )
        if target.exists() and not target.is_file() and not target.is_dir():
            raise FileError(f"cannot write {target}: it is a device or a pipe", to_do="name a file")
        if target.is_file() and not os.access(target, os.W_OK):
            raise FileError(f"cannot write {target}: the file there is read-only")
        trial = _beside(target)
        trial.touch(exist_ok=False)
        trial.unlink()
    except OSError as error:
        raise FileError(f"cannot write {target}: {_reason(error)}") from error
    return target


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """A temporary path (file or folder) that becomes ``path`` when the block ends without error.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with whole(folder / "page.html") as temporary:
        ...     _ = temporary.write_text("all of it")
        >>> [file.name for file in folder.iterdir()]
        ['page.html']
    """
    target = writable(path)
    temporary = _beside(target)
    try:
        yield temporary
        _permit(temporary)
        _replace(temporary, Path(os.path.realpath(target)))
    except OSError as error:
        raise FileError(f"cannot write {target}: {_reason(error)}") from error
    finally:
        _remove(temporary)


def writable_folder(path: str | Path, *, replaces: Collection[str]) -> Path:
    """The path, after making sure that a folder can be put there: asked before hours of work.

    A folder that stands there already is replaced, so it may hold nothing but ``replaces``.

    Raises:
        FileError: as ``writable``, or the folder holds something else, which would be lost.
    """
    target = Path(path).expanduser()
    try:
        if target.is_dir():
            other = sorted(each for each in os.listdir(target) if each not in replaces)
            if other:
                raise FileError(
                    f"cannot write {target}: the folder holds {other[0]}, which would be lost",
                    to_do="name a new folder",
                )
        elif target.exists():
            raise FileError(
                f"cannot write {target}: a file has that name", to_do="name another folder"
            )
        parent = Path(os.path.realpath(target)).parent
        if not parent.is_dir():
            raise FileError(
                f"cannot write {target}: there is no folder {parent}",
                to_do="make it or name another",
            )
        trial = _beside(target)
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        raise FileError(f"cannot write {target}: {_reason(error)}") from error
    return target


@contextmanager
def whole_folder(path: str | Path, *, replaces: Collection[str]) -> Iterator[Path]:
    """A temporary folder that becomes ``path`` when the block ends without error.

    Its files are on the disk before the names change. ``replaces``: the names that an older folder
    at the path may hold and that go with it.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "checkpoint"
        >>> for text in ("one", "two"):
        ...     with whole_folder(target, replaces=["a.txt"]) as temporary:
        ...         _ = (temporary / "a.txt").write_text(text)
        >>> (target / "a.txt").read_text()
        'two'
    """
    target = writable_folder(path, replaces=replaces)
    temporary = _beside(target)
    try:
        temporary.mkdir()
        yield temporary
        _permit(temporary)
        _to_disk(temporary)
        _replace(temporary, Path(os.path.realpath(target)))
    except OSError as error:
        raise FileError(f"cannot write {target}: {_reason(error)}") from error
    finally:
        _remove(temporary)


def _permit(path: Path) -> None:
    """Give files the permissions of any new file here: some writers make theirs private."""
    trial = _beside(path)
    trial.touch(exist_ok=False)
    usual = trial.stat().st_mode & 0o777
    trial.unlink()
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            file.chmod(file.stat().st_mode | usual)


def _to_disk(folder: Path) -> None:
    """Wait until the contents have reached the disk: a rename may overtake them otherwise."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())


def _beside(target: Path) -> Path:
    # The suffix stays last, since libraries choose their format by it.
    target = Path(os.path.realpath(target))
    return target.with_name(f".{target.stem}.{secrets.token_hex(4)}.part{target.suffix}")


def _replace(temporary: Path, target: Path) -> None:
    if not target.is_dir():
        os.replace(temporary, target)
        return
    if _swapped(temporary, target):
        return  # the old folder now has the temporary name, and is removed under it
    # Two steps where the system cannot swap: the old one moves aside until the new one stands.
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    os.replace(target, aside)
    try:
        os.replace(temporary, target)
    except OSError:
        os.replace(aside, target)
        raise
    _remove(aside)


def _swapped(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    if rename is None:
        return False
    done: int = rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)
    return done == 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
