"""Folders written whole or not at all, whatever happens on the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import headwise.files as files
from headwise.errors import FileError
from headwise.files import whole_folder, writable_folder

NAMES = ("model.safetensors", "config.json")


def write(target: Path, text: str) -> None:
    with whole_folder(target, replaces=NAMES) as temporary:
        for name in NAMES:
            (temporary / name).write_text(text)


def content(target: Path) -> set[str]:
    return {(target / name).read_text() for name in NAMES}


@pytest.mark.parametrize("swaps", [True, False])
def test_a_folder_takes_the_place_of_an_older_one(
    tmp_path: Path, swaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not swaps:
        monkeypatch.setattr(files, "_swapped", lambda one, other: False)
    for text in ("one", "two", "three"):
        write(tmp_path / "m", text)
        assert content(tmp_path / "m") == {text}
    assert os.listdir(tmp_path) == ["m"]


def test_two_names_are_exchanged_in_one_step(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not files._swapped(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange names")
    assert os.listdir(tmp_path / "a") == ["b"]
    assert os.listdir(tmp_path / "b") == ["a"]


def test_an_error_on_the_way_leaves_the_old_folder(tmp_path: Path) -> None:
    write(tmp_path / "m", "old")

    def stop(error: BaseException) -> None:
        with whole_folder(tmp_path / "m", replaces=NAMES) as temporary:
            (temporary / NAMES[0]).write_text("half")
            raise error

    with pytest.raises(KeyboardInterrupt):
        stop(KeyboardInterrupt())
    with pytest.raises(FileError, match=r"^cannot write .*/m: no space left on device$"):
        stop(OSError(28, "No space left on device"))
    assert content(tmp_path / "m") == {"old"}
    assert os.listdir(tmp_path) == ["m"]


def test_a_crash_on_the_way_leaves_the_old_folder(tmp_path: Path) -> None:
    write(tmp_path / "m", "old")
    code = f"""
import os
from headwise.files import whole_folder
with whole_folder({str(tmp_path / "m")!r}, replaces={NAMES!r}) as temporary:
    (temporary / "config.json").write_text("half")
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert content(tmp_path / "m") == {"old"}
    write(tmp_path / "m", "new")
    assert content(tmp_path / "m") == {"new"}


def test_what_would_be_lost_is_named(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.tex").touch()
    with pytest.raises(FileError, match=r"/m: the folder holds thesis\.tex, which would be lost"):
        write(tmp_path / "m", "new")
    assert os.listdir(tmp_path / "m") == ["thesis.tex"]


def test_where_no_folder_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=r"a file has that name; name another folder$"):
        writable_folder(tmp_path / "file", replaces=NAMES)
    with pytest.raises(FileError, match=r"there is no folder .*nowhere; make it or name another$"):
        writable_folder(tmp_path / "nowhere" / "m", replaces=NAMES)
    with pytest.raises(FileError, match=r"/file/m: there is no folder .*/file; make it"):
        writable_folder(tmp_path / "file" / "m", replaces=NAMES)


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "m").symlink_to(tmp_path / "there")
    write(tmp_path / "m", "new")
    assert (tmp_path / "m").is_symlink()
    assert content(tmp_path / "there") == {"new"}
