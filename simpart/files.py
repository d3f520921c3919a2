"""Documents on disk: JSON with a kind and a version, written atomically, the same bytes for the same content."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from simpart.errors import FormatError, UserError

__all__ = ["check_place", "dump_json", "read_document", "write_atomically", "write_document"]


def dump_json(content: Any, *, indent: int | None = None) -> str:
    """JSON text with a fixed form: keys in the order given, no NaN or infinity (raises ValueError)."""
    separators = (",", ": ") if indent else (",", ":")
    return json.dumps(content, ensure_ascii=False, allow_nan=False, indent=indent, separators=separators)


def write_atomically(path: Path | str, data: bytes | str) -> None:
    """Write the whole file or nothing: a temporary file beside it, fsync, rename. A device or pipe, such as
    /dev/stdout, is written to and stays; a link stays too, and what it points to is written.

    Raises UserError when the place cannot be written (no folder, no permission, no space); the old file then stands.
    """
    path = Path(path)
    raw = data.encode() if isinstance(data, str) else data
    temporary = None
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(raw)
            return
        if path.is_symlink():
            path = path.resolve()
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; give another place") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def check_place(path: Path | str) -> None:
    """Raise UserError when a file cannot be written there, before the work whose result it takes."""
    path = Path(path)
    folder = path.parent
    reason = ""
    if path.is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"there is no folder {folder}"
    elif not os.access(path if path.exists() and not path.is_file() else folder, os.W_OK):
        reason = "permission denied"
    if reason:
        raise UserError(f"cannot write {path}: {reason}; give another place")


def write_document(
    path: Path | str, kind: str, version: int, content: dict[str, Any], *, compress: bool = False
) -> None:
    """Write `content` as a JSON document that says what it is; gzip with a fixed header when `compress`."""
    text = dump_json({"kind": kind, "version": version, **content}, indent=None if compress else 1)
    write_atomically(path, gzip.compress(text.encode(), mtime=0) if compress else text + "\n")


def read_document(path: Path | str, kind: str, version: int) -> dict[str, Any]:
    """Read a document of this kind and at most this version.

    Raises FormatError in one line when the file is missing, empty, truncated, of another kind or newer.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from error
    if not raw:
        raise FormatError(f"{path} is empty; expected a {kind}")
    try:
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        content = json.loads(raw)
    except (OSError, EOFError, ValueError) as error:
        raise FormatError(f"{path} is not a {kind}: truncated or corrupt ({error}); write it again") from error
    except Exception as error:  # zlib.error is not an OSError and has no public base
        raise FormatError(f"{path} is not a {kind}: corrupt ({error}); write it again") from error
    if not isinstance(content, dict) or content.get("kind") != kind:
        found = content.get("kind") if isinstance(content, dict) else None
        raise FormatError(f"{path} is {f'a {found}' if found else 'something else'}, not a {kind}")
    found_version = content.get("version")
    if type(found_version) is not int or found_version < 1:
        raise FormatError(f"{path} has {kind} version {found_version!r}; a version is a whole number from 1 on")
    if found_version > version:
        raise FormatError(
            f"{path} has {kind} version {found_version}; this simpart reads up to {version}: update simpart"
        )
    return content
