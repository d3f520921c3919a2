"""Ctrl-C while the command line is still importing: one line and status 130, whatever is half imported."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from simpart.commands._interrupt import interrupt_ends

START = """
import os, signal, sys
from simpart.cli import main

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    "module", ["simpart.commands._main", "click", "simpart.commands.search", "numpy", "simpart.searching.floor"]
)
def test_interrupt_during_an_import_ends_in_one_line(module: str) -> None:
    command = [sys.executable, "-c", START, module, "search", "gpt:layers=1", "--cluster", "local:2"]
    found = subprocess.run([*command, "--global-batch", "4"], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stderr.strip(), found.stdout) == (130, "interrupted", "")


def test_a_handler_of_somebody_else_stays() -> None:
    def mine(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGINT, mine)
    try:
        with interrupt_ends():
            assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
    with interrupt_ends():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
