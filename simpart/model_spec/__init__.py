"""MODEL texts: `gpt:layers=24,hidden=1024`, `package.module:factory`, `hf:config.json`, or a .graph file. Parsing
imports no torch.

A factory is called with a micro-batch size and returns the module, whose forward returns the scalar loss, and its
example inputs as a tuple. Importing a user's module happens only when its factory is called.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simpart.errors import FormatError, UnknownNameError, UserError
from simpart.zoo import MODELS, Dims, ZooFactory
from simpart.zoo.hf import HFFactory, parse_hf

if TYPE_CHECKING:
    import torch
    from torch import nn

    from simpart.graph import Graph

__all__ = ["ModelFactory", "UserFactory", "canonical", "load_graph_or_model", "parse_model"]

_OWN = os.path.dirname(os.path.dirname(__file__))  # the folder simpart

_FORMS = (
    "a zoo model such as gpt:layers=24,hidden=1024,heads=16 "
    f"(known: {', '.join(sorted(MODELS))}), package.module:factory, hf:config.json or a .graph file"
)


def parse_model(text: str) -> ModelFactory:
    """The factory that a MODEL text names. Raises UserError in one line that says what would be right."""
    text = text.strip()
    name, colon, rest = text.partition(":")
    if name in MODELS:
        return ZooFactory(name, _dims(name, rest) if colon else MODELS[name][0]())
    if name == "hf":
        return parse_hf(rest)
    if re.fullmatch(r"[^\W\d][\w.]*:[^\W\d]\w*", text) and not _like_zoo(name):
        return UserFactory(name, rest)
    if text.endswith(".graph"):
        raise FormatError(f"cannot read {text}: there is no such file; make it with simpart capture MODEL -o {text}")
    if not text:
        raise UserError(f"the model is empty; give {_FORMS}")
    if "=" in rest or not re.search(r"[./\\]", name):
        raise UnknownNameError("model", name, [*MODELS, "hf:config.json", "package.module:factory"])
    raise UserError(f"a model is {_FORMS}; got {text!r}")


def canonical(text: str) -> str:
    """The same model in the one spelling that graphs and caches carry: all dims, in the order of their class.

    >>> canonical("gpt:hidden=64,heads=2,seq=32,layers=1,vocab=100")
    'gpt:layers=1,hidden=64,heads=2,seq=32,vocab=100,tied=false,dropout=0,eager=false'
    """
    return parse_model(text).model


def load_graph_or_model(
    text: str,
    precision: str = "float32",
    *,
    micro_batches: tuple[int, ...] = (),
    full: bool = False,
    cache: bool = True,
) -> Graph:
    """The Graph in a .graph file, or captured from a model (or taken from the cache of captured graphs).

    `micro_batches` are further sizes at which dims that are not affine get known; `full` traces every layer. A file of
    another precision is refused.
    """
    from simpart.graph.format import load_graph
    from simpart.model_spec.cache import captured

    if Path(text).is_file() or (text.endswith(".graph") and Path(text).exists()):
        graph = load_graph(text)
        if graph.precision != precision:
            raise UserError(
                f"{text} was captured in {graph.precision}, asked for is {precision}; "
                f"say --precision {graph.precision} or capture {graph.model} again with --precision {precision}"
            )
        return graph
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is none of a command's answer
        return captured(parse_model(text), precision, micro_batches, full=full, use_cache=cache)


# --- dims ------------------------------------------------------------------------------------------------------------
def _dims(name: str, text: str) -> Dims:
    kind = MODELS[name][0]
    types = {item.name: str(item.type) for item in fields(kind)}
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise UserError(f"dims of {name} are written dim=value with commas between, got {part!r}; {_example(name)}")
        if key not in types:
            raise UnknownNameError(f"dim of {name}", key, types)
        if key in values:
            raise UserError(f"each dim is given once, got {key} twice in {name}:{text}; keep one")
        values[key] = _value(key, value, types[key])
    return kind(**values)


def _value(key: str, text: str, kind: str) -> Any:
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise UserError(f"{key} must be true or false, got {key}={text}; try {key}=true")
        return text.lower() == "true"
    if kind == "int":
        if not re.fullmatch(r"[+]?\d{1,15}", text, re.ASCII) or int(text) < 1:
            near = _nearest(text)
            raise UserError(f"{key} must be a whole number of at least 1, got {key}={text}; try {key}={near}")
        return int(text)
    if kind == "float":
        if not re.fullmatch(r"\d*\.?\d+(e-?\d+)?", text, re.ASCII):
            raise UserError(f"{key} must be a number from 0 to 1, got {key}={text}; try {key}=0.1")
        return float(text)
    if not re.fullmatch(r"\d{1,6}(-\d{1,6})*", text, re.ASCII):
        raise UserError(f"{key} must be counts with dashes between, got {key}={text}; try {key}=3-4-6-3")
    return tuple(int(count) for count in text.split("-"))


def _nearest(text: str) -> int:
    try:
        return min(max(1, round(float(text))), 10**9)
    except (ValueError, OverflowError):
        return 1


def _like_zoo(name: str) -> bool:
    """A mistyped zoo name is more likely than a module of that name, unless the module exists."""
    import difflib

    return bool(difflib.get_close_matches(name, MODELS, cutoff=0.6)) and not _module_exists(name)


def _example(name: str) -> str:
    first = fields(MODELS[name][0])[0]
    return f"try {name}:{first.name}={first.default}"


# --- a user's factory ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class UserFactory:
    """`module:attribute`, imported when first called. The attribute may carry `inputs(micro_batch, generator)` for
    realistic inputs and `tokens_per_sample`."""

    module: str
    attribute: str

    @property
    def model(self) -> str:
        return f"{self.module}:{self.attribute}"

    def __call__(self, micro_batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
        """Raises UserError when the factory fails or returns something else than a module and its inputs."""
        from torch import nn

        function = self._function()
        with _one_line(f"{self.model}({micro_batch})"):
            made = function(micro_batch)
        if not isinstance(made, tuple | list) or len(made) != 2 or not isinstance(made[0], nn.Module):
            raise UserError(
                f"{self.model} must return (module, inputs) with an nn.Module, got {_describe(made)}; "
                "see simpart capture --help"
            )
        module, inputs = made
        return module, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)

    def check(self) -> None:
        """Import the module; raises UserError when it or the function is missing."""
        self._function()

    def build(self) -> nn.Module:
        return self(1)[0]

    def inputs(self, micro_batch: int, generator: torch.Generator | None = None) -> tuple[Any, ...]:
        """The function's own `inputs` if it has one, else the example inputs."""
        own = getattr(self._function(), "inputs", None)
        if own is None:
            return self(micro_batch)[1]
        with _one_line(f"{self.model}.inputs({micro_batch})"):
            return tuple(own(micro_batch, generator))

    @property
    def draws_inputs(self) -> bool:
        """True if the function has an `inputs` of its own."""
        return hasattr(self._function(), "inputs")

    @property
    def tokens_per_sample(self) -> int | None:
        """What the function says of itself; None when it does not."""
        found = getattr(self._function(), "tokens_per_sample", None)
        return None if found is None else int(found)

    def source_file(self) -> Path | None:
        """The file of the module, found without running it (parent packages excepted)."""
        with _importable(), _one_line(f"importing {self.module}"):
            try:
                found = importlib.util.find_spec(self.module)
            except ModuleNotFoundError:
                found = None
        return Path(found.origin) if found and found.origin and found.has_location else None

    def _function(self) -> Callable[..., Any]:
        with _importable():
            try:
                module = importlib.import_module(self.module)
            except ModuleNotFoundError as error:
                if not f"{self.module}.".startswith(f"{error.name}."):
                    raise UserError(f"importing {self.module} failed: {error}; install {error.name}") from error
                raise UserError(
                    f"there is no module {self.module!r} here or on PYTHONPATH (for {self.model}); "
                    f"check the name, or give {_FORMS}"
                ) from error
            except (Exception, SystemExit) as error:
                raise _failure(f"importing {self.module}", error) from error
        if not hasattr(module, self.attribute):
            known = [name for name, value in vars(module).items() if inspect.isfunction(value)]
            raise UnknownNameError(f"factory in {self.module}", self.attribute, known)
        function = getattr(module, self.attribute)
        if not callable(function):
            raise UserError(
                f"{self.model} must be a function of the micro-batch that returns (module, inputs), "
                f"got {_describe(function)}; give its name"
            )
        checked: Callable[..., Any] = function
        return checked


ModelFactory = ZooFactory | UserFactory | HFFactory


@contextmanager
def _importable() -> Iterator[None]:
    """The working folder is where a user's modules are looked up first, as `python -m` does."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    yield


def _module_exists(name: str) -> bool:
    with _importable():
        try:
            return importlib.util.find_spec(name.partition(".")[0]) is not None
        except (ImportError, ValueError):
            return False


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise _failure(what, error) from error


def _failure(what: str, error: BaseException) -> UserError:
    """One line with the place in the user's code where it happened."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith("<") and "site-packages" not in name and _OWN not in name:
            place = f" at {name}:{trace.tb_lineno}"
        trace = trace.tb_next
    if isinstance(error, SyntaxError):
        place = f" at {error.filename}:{error.lineno}"
    reason = " ".join(str(error).split())[:300]
    return UserError(f"{what} failed: {type(error).__name__}: {reason}{place}; correct it and run again")


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(type(item).__name__ for item in value[:4]) or 'nothing'}"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
