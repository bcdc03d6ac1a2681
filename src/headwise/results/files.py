"""Files written whole or not at all: to a temporary name beside the target, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwise.errors import FileError

__all__ = ["whole", "writable"]


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
        _replace(temporary, Path(os.path.realpath(target)))
    except OSError as error:
        raise FileError(f"cannot write {target}: {_reason(error)}") from error
    finally:
        _remove(temporary)


def _beside(target: Path) -> Path:
    # The suffix stays last, since libraries choose their format by it.
    target = Path(os.path.realpath(target))
    return target.with_name(f".{target.stem}.{os.getpid()}.part{target.suffix}")


def _replace(temporary: Path, target: Path) -> None:
    if not target.is_dir():
        os.replace(temporary, target)
        return
    # A folder cannot be replaced in one step: the old one moves aside until the new one stands.
    aside = target.with_name(f".{target.name}.{os.getpid()}.old")
    os.replace(target, aside)
    try:
        os.replace(temporary, target)
    except OSError:
        os.replace(aside, target)
        raise
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
