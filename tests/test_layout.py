"""The folders are where design and packaging expect them, and imports run one way."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import simpart

FOLDERS = ("costmodels", "searchers", "hardware_profiles", "validate")

# Lowest first; a module imports its own layer or below. Modules not named here only keep clear of the folders.
LAYERS = (
    ("errors", "files", "quantity", "sizes"),
    ("graph", "training", "hardware", "hardware_files", "tdl"),
    ("plan", "schedule", "program", "kernels"),
    ("cost", "sharding", "memory"),
    ("problem", "collectives"),
    ("lowering", "engines"),
    ("simulation",),
    ("searching", "trace"),
    ("cli",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# May import torch when imported: everything else must be usable to simulate a saved plan without it.
NEEDS_TORCH = ("simpart.capture", "simpart.zoo", "simpart.validate", "simpart.testing")


def python_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts)


def imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, at its head or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module or ""
            if node.module == "simpart":
                yield from (f"simpart.{alias.name}" for alias in node.names)


def core_files(root: Path) -> list[Path]:
    links = {root / "simpart" / name for name in FOLDERS}
    return [path for path in python_files(root / "simpart") if not links & set(path.parents)]


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_is_reached_through_a_relative_link(root: Path, name: str) -> None:
    link = root / "simpart" / name
    assert os.readlink(link) == f"../{name}"
    assert (link / "__init__.py").is_file()


def test_core_finds_the_four_folders_by_name_only(root: Path) -> None:
    forbidden = {f"simpart.{name}" for name in FOLDERS}
    faults = [
        f"{path.relative_to(root)} imports {module}"
        for path in core_files(root)
        for module in imports(path)
        if ".".join(module.split(".")[:2]) in forbidden
    ]
    assert faults == []


def test_core_imports_run_one_way(root: Path) -> None:
    faults = []
    for path in core_files(root):
        own = RANK.get(path.relative_to(root / "simpart").parts[0].removesuffix(".py"))
        for module in imports(path):
            parts = module.split(".")
            other = RANK.get(parts[1]) if parts[0] == "simpart" and len(parts) > 1 else None
            if own is not None and other is not None and other > own:
                faults.append(f"{path.relative_to(root)} imports {module}")
    assert faults == []


def test_light_modules_import_neither_torch_nor_sklearn_nor_pandas(root: Path) -> None:
    names = []
    for path in python_files(root / "simpart"):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if parts[-1] != "__main__" and not name.startswith(NEEDS_TORCH):
            names.append(name)
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'sklearn', 'pandas', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_found_on_first_use() -> None:
    for name in simpart.__all__:
        assert getattr(simpart, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        simpart.nothing  # noqa: B018  # the access is the test


def test_a_missing_link_is_one_clear_import_error(root: Path, tmp_path: Path) -> None:
    (tmp_path / "simpart").mkdir()
    shutil.copy(root / "simpart" / "__init__.py", tmp_path / "simpart")
    (tmp_path / "simpart" / "costmodels").write_text("../costmodels")  # what git writes where links are off
    done = subprocess.run(
        [sys.executable, "-c", "import simpart"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.stderr.splitlines()[-1] == (
        "ImportError: simpart/costmodels must be a link to the folder ../costmodels and is not; "
        "clone again with symbolic links (git config core.symlinks true) or install simpart with pip"
    )
