"""Calling the user's factory and module, with their mistakes answered in one line."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from simpart.capture import _torch
from simpart.capture._exported import tensors_in
from simpart.errors import Interrupted, UnsupportedError, UserError

__all__ = ["build_module", "check_loss", "user_errors", "valid_precision"]

_ADVICE = "factory(micro_batch) must return (nn.Module whose forward returns the scalar loss, tuple of example inputs)"


def valid_precision(precision: str) -> torch.dtype:
    """The dtype of a precision name; parameters and activations are made in it by default."""
    dtype = getattr(torch, precision, None) if precision in ("float64", "float32", "bfloat16", "float16") else None
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"precision must be float64, float32, bfloat16 or float16, got {precision!r}")
    return dtype


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build_module(factory: Any, micro_batch: int, dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...]]:
    """Call the factory and check what it gives; raises UserError."""
    if not callable(factory):
        raise UserError(f"{_ADVICE}, got {type(factory).__name__} instead of a factory")
    with user_errors("the factory"), default_dtype(dtype), _torch.convertible_modules():
        made = factory(micro_batch)
    if not isinstance(made, tuple) or len(made) != 2:
        raise UserError(f"{_ADVICE}, it returned {_kind(made)}")
    module, inputs = made
    if not isinstance(module, nn.Module):
        raise UserError(f"{_ADVICE}, its first part is {_kind(module)}")
    if isinstance(inputs, dict) or (isinstance(inputs, tuple | list) and any(isinstance(i, dict) for i in inputs)):
        raise UserError(
            "inputs are given by position: return a tuple of tensors, got a dict; for keyword arguments wrap the "
            "module in one whose forward takes them in order"
        )
    if isinstance(inputs, torch.Tensor) or not isinstance(inputs, tuple | list) or not list(tensors_in(inputs)):
        raise UserError(f"{_ADVICE}, its second part is {_kind(inputs)}")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        _require_cpu(f"parameter or buffer {name}", tensor)
    for i, tensor in enumerate(tensors_in(inputs)):
        _require_cpu(f"input {i}", tensor)
    if not any(p.requires_grad for p in module.parameters()):
        raise UserError(f"a module must have trainable parameters, {type(module).__name__} has none")
    return module, tuple(inputs)


def _require_cpu(what: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise UserError(
            f"modules are captured on the CPU (no memory is used), {what} is on {tensor.device}; build it with "
            "device 'cpu'"
        )


def check_loss(module: nn.Module, loss: Any) -> None:
    """Raise UserError unless `loss` is a scalar that depends on a trainable parameter."""
    name = type(module).__name__
    if not isinstance(loss, torch.Tensor):
        raise UserError(
            f"forward must return the scalar loss, {name} returned {_kind(loss)}; wrap it and return the loss alone"
        )
    if loss.dim() != 0:
        raise UserError(
            f"forward must return the scalar loss, {name} returned a tensor of shape {list(loss.shape)}; reduce it, "
            "for example with .mean()"
        )
    if not loss.dtype.is_floating_point:
        raise UserError(f"the loss must be a real number, {name} returned {loss.dtype}; return its real part or mean")
    if not loss.requires_grad:
        raise UserError(
            f"the loss must depend on a trainable parameter, that of {name} does not; check for detach, no_grad, "
            "argmax or frozen parameters on the way"
        )


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} part{'s' if len(value) != 1 else ''}"
    if isinstance(value, torch.Tensor):
        return "a Tensor"
    return "None" if value is None else f"a {type(value).__name__}"


@contextlib.contextmanager
def user_errors(where: str) -> Iterator[None]:
    """Turn what goes wrong in the user's code into one line that names the line of code."""
    try:
        yield
    except (UserError, Interrupted):
        raise
    except SystemExit as error:
        raise UserError(f"{where} ended the program ({error}); return a module instead ({_place(error)})") from error
    except Exception as error:
        if (cause := _data_dependent_cause(error)) is not None:
            raise UnsupportedError(
                f"control flow and shapes must not depend on tensor values, {_place(cause)} does; use torch.where or "
                "masks, or a fixed capacity"
            ) from error
        message = " ".join(str(error).split())[:300]
        raise UserError(f"{where} raised {type(error).__name__}: {message} ({_place(error)})") from error


def _data_dependent_cause(error: BaseException) -> BaseException | None:
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, _torch.DATA_DEPENDENT):
        seen = seen.__cause__ or seen.__context__
    return seen


_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def _place(error: BaseException) -> str:
    """`file:line 'code'` of the innermost frame that is the user's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OWN) and f.lineno]
    frames = [f for f in frames if not f.filename.startswith("<")] or frames
    if not frames:
        return "a line that torch does not name"
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno} '{frame.line}'" if frame.line else f"{frame.filename}:{frame.lineno}"
