"""The program keeps large blocks out of the heap: what is freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import ctypes, sys
from headwise.cli.heap import keep_large_blocks_out_of_the_heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc.mallinfo2.restype = Info
if sys.argv[1] == "set":
    assert keep_large_blocks_out_of_the_heap()
size = 20 * 2**20
for _ in range(3):  # glibc learns from the first block that is freed
    libc.free(libc.malloc(size))
held = libc.malloc(size)
print(libc.mallinfo2().hblks)
"""


def blocks_outside_the_heap(setting: str) -> int:
    return int(subprocess.check_output([sys.executable, "-c", CODE, setting], text=True))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
def test_large_blocks_stay_out_of_the_heap() -> None:
    assert blocks_outside_the_heap("set") > blocks_outside_the_heap("left alone")
