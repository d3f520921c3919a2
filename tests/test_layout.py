"""The folders are where design and packaging expect them, and imports run one way."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import simpart

FOLDERS = ("costmodels", "searchers", "hardware_profiles", "validate")

# Lowest first; a module imports its own layer or below. A module inside a package goes with the package unless named.
LAYERS = (
    ("errors", "files", "evaluation", "machine_code", "zoo"),
    ("graph", "training", "hardware"),
    ("placement", "plan", "schedule", "program", "kernels", "capture", "model_spec"),
    ("placement.conversions", "placement.region_conversions", "tdl", "cost", "sharding", "memory", "training_files"),
    ("problem", "registry"),
    ("lowering", "engines", "describe"),
    ("simulation", "configure"),
    ("searching", "trace", "report"),
    ("cli", "commands", "demo", "testing"),
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


def rank_of(module: str) -> int | None:
    """The layer of `simpart.a.b…`: that of the longest part of its name that has one; None outside simpart."""
    parts = module.split(".")[1:] if module.startswith("simpart.") else []
    ranks = [RANK[name] for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in RANK]
    return ranks[0] if ranks else None


def module_name(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


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
        own = rank_of(module_name(root, path))
        for module in imports(path):
            other = rank_of(module)
            if own is not None and other is not None and other > own:
                faults.append(f"{path.relative_to(root)} imports {module}")
    assert faults == []


def test_every_part_of_the_core_has_a_layer(root: Path) -> None:
    parts = {module_name(root, path).split(".")[1] for path in core_files(root) if path.parent != root / "simpart"}
    modules = {path.stem for path in (root / "simpart").glob("*.py")} - {"__init__", "__main__"}
    assert parts | modules == {name for name in RANK if "." not in name}


def test_the_map_names_every_part(root: Path) -> None:
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [name for name in RANK if "." not in name and f"`{name}/`" not in text and f"`{name}.py`" not in text] == []


def test_no_two_packages_of_the_core_import_each_other(root: Path) -> None:
    """Directly or through others, at their heads or inside functions: CycleError names the cycle."""
    uses: dict[str, set[str]] = {}
    for path in core_files(root):
        own = module_name(root, path).split(".")[:2]
        for module in imports(path):
            other = module.split(".")[:2]
            if len(own) == len(other) == 2 and other[0] == "simpart" and own != other:
                uses.setdefault(own[1], set()).add(other[1])
    order = list(TopologicalSorter(uses).static_order())
    assert order.index("graph") < order.index("plan") < order.index("searching")


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
