"""What tests share: none reads or writes the profiles the user measured; one thread; reproducible properties."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background: children would too
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("simpart", deadline=None, derandomize=True, max_examples=50, print_blob=True)
settings.load_profile("simpart")


@pytest.fixture(autouse=True, scope="session")
def _own_data_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder: Path = tmp_path_factory.mktemp("user-data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder))
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the clone."""
    return Path(__file__).resolve().parent.parent
