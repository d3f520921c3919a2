"""Options that name a file to write: a place that takes none is refused before the work whose result it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from simpart.errors import UserError
from simpart.files import check_place

__all__ = ["FOLDER", "PLACE"]


class Place(click.ParamType[Path]):
    """The path of a file that can be written."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if not str(value):
            raise UserError("the file to write has an empty name; give another")
        check_place(value)
        return Path(value)


class Folder(click.ParamType[Path]):
    """The path of a folder that is there or can be made."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not there.is_dir():
            raise UserError(f"cannot make folder {path}: {there} is a file; give another place")
        check_place(there / "any file")
        return path


PLACE, FOLDER = Place(), Folder()
