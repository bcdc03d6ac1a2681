"""Following a run: whole lines, once each, also when the run begins anew."""

from __future__ import annotations

import pytest

from headwise.errors import FileError
from headwise.monitoring.tail import Tail
from tests.report.health_runs import record


def steps(tail):
    return [each.step for each in tail.new()]


def test_lines_are_read_once_and_when_they_are_whole(tmp_path):
    tail, file = Tail(tmp_path), tmp_path / "health.jsonl"
    assert steps(tail) == []
    first, second = record(1).to_json(), record(2).to_json()
    file.write_text(first + "\n" + second[:50])
    assert steps(tail) == [1]
    assert steps(tail) == []
    with file.open("a") as opened:
        opened.write(second[50:] + "\n")
    assert steps(tail) == [2]


def test_lines_that_are_no_records_are_passed_over(tmp_path):
    tail = Tail(tmp_path)
    lines = ["[1]", "5", '"a"', "null", "{}", '{"step"', "", "\xff", record(3).to_json()]
    (tmp_path / "health.jsonl").write_bytes("".join(x + "\n" for x in lines).encode("latin-1"))
    assert steps(tail) == [3]


def test_a_file_that_became_shorter_is_read_from_its_beginning(tmp_path):
    tail, file = Tail(tmp_path), tmp_path / "health.jsonl"
    file.write_text("".join(record(i).to_json() + "\n" for i in (1, 2, 3)))
    assert steps(tail) == [1, 2, 3]
    file.write_text(record(1).to_json() + "\n")
    assert steps(tail) == [1]
    assert tail.started == 1


def test_no_folder(tmp_path):
    with pytest.raises(FileError, match="is no folder"):
        Tail(tmp_path / "missing")
