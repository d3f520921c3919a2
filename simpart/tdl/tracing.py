"""Tracing: a description is called with symbols in place of tensors and coordinates; what it builds is checked and
kept."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

from simpart.tdl.expression import Access, Expression, Opaque, Reduction, Tensor, Whole, as_expression, variables_of
from simpart.tdl.index import DescriptionError, Index, Variable
from simpart.tdl.interval import interval_of

__all__ = ["Call", "Description", "Output", "call_like", "trace"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel on concrete shapes. `arguments` as in `graph.Kernel`, sizes filled in; empty means the inputs in
    order."""

    target: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    arguments: str = ""
    dtypes: tuple[str, ...] = ()

    def decoded(self, tensor: Callable[[int], Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and named arguments with `tensor(i)` for the i-th input."""
        if not self.arguments:
            return [tensor(i) for i in range(len(self.inputs))], {}
        content = json.loads(self.arguments)
        return _decode(content["positional"], tensor), {k: _decode(v, tensor) for k, v in content["named"].items()}


def call_like(kernel: Any) -> Call:
    """The Call of anything with `target`, `inputs` and `outputs` (having shape and dtype) and `arguments`: a
    cost.Signature."""
    return Call(
        kernel.target,
        tuple(tuple(form.shape) for form in kernel.inputs),
        tuple(tuple(form.shape) for form in kernel.outputs),
        kernel.arguments,
        tuple(form.dtype for form in kernel.inputs),
    )


def _decode(item: Any, tensor: Callable[[int], Any]) -> Any:
    if isinstance(item, list):
        return [_decode(part, tensor) for part in item]
    if isinstance(item, dict):
        if "tensor" in item:
            return tensor(item["tensor"])
        if "float" in item:
            return float(item["float"])
        return item
    return item


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One result: a value at each coordinate."""

    coordinates: tuple[Variable, ...]
    body: Expression


@dataclass(frozen=True, slots=True, eq=False)
class Description:
    """A traced description of one call: what each output element is, over concrete sizes."""

    call: Call
    tensors: tuple[Tensor, ...]
    outputs: tuple[Output, ...]
    accesses: tuple[Access, ...] = field(init=False)
    breaks: Mapping[tuple[str, int], tuple[int, ...]] = field(init=False)
    fixed: frozenset[tuple[str, int]] = field(init=False)

    def __post_init__(self) -> None:
        nodes = [node for output in self.outputs for node in output.body.walk()]
        object.__setattr__(self, "accesses", tuple(node for node in nodes if isinstance(node, Access)))
        object.__setattr__(self, "breaks", _breaks(self))
        fixed = (v.key for node in nodes if isinstance(node, Whole) for index in node.indices for v in index.variables)
        object.__setattr__(self, "fixed", frozenset(fixed))

    @property
    def elementwise(self) -> bool:
        """Every output element reads each input at its own coordinates only (broadcast dims aside)."""
        for output in self.outputs:
            rank = len(output.coordinates)
            for node in output.body.walk():
                if isinstance(node, Reduction) or (isinstance(node, Opaque) and node.inner):
                    return False
                if isinstance(node, Access):
                    own = output.coordinates[rank - len(node.indices) :]
                    for index, variable in zip(node.indices, own, strict=True):
                        if index is None or not (index.alone is variable or (not index.terms and index.constant == 0)):
                            return False
        return True


def _indices(description: Description) -> Iterator[Index]:
    from simpart.tdl.expression import Choose, Pick, Position

    for output in description.outputs:
        for node in output.body.walk():
            if isinstance(node, Access):
                yield from (index for index in node.indices if index is not None)
            elif isinstance(node, Position | Pick | Choose):
                yield node.index
            elif isinstance(node, Opaque):
                yield from node.inner
            elif isinstance(node, Whole):
                yield from node.indices


def _breaks(description: Description) -> dict[tuple[str, int], tuple[int, ...]]:
    """Where each variable is divided into digits: 1 … size, each dividing the next; only the chain that all agree
    on."""
    found: dict[tuple[str, int], set[int]] = {}
    for output in description.outputs:
        for variable in output.coordinates:
            found.setdefault(variable.key, set()).update((1, variable.key[1]))
        for node in output.body.walk():
            if isinstance(node, Reduction):
                for variable in node.variables:
                    found.setdefault(variable.key, set()).update((1, variable.key[1]))
    for index in _indices(description):
        for digit, _ in index.terms:
            found.setdefault(digit.variable.key, set()).update((digit.low, digit.top))
    chains = {}
    for key, points in found.items():
        chain = sorted(points)
        if any(b % a for a, b in pairwise(chain)):
            raise DescriptionError(f"{key[0]} is divided at {chain}, which do not divide each other; make them")
        chains[key] = tuple(chain)
    return chains


def trace(function: Callable[..., Any], call: Call) -> Description:
    """Call a description as its operator is called and check what comes back against the call's shapes.

    Raises DescriptionError, one line, when it disagrees with the operator in arity or rank, leaves a tensor's dims, or
    breaks a rule of the language.
    """
    names = _tensor_names(function, call)
    dtypes = call.dtypes or ("float32",) * len(call.inputs)
    tensors = tuple(Tensor(i, names.get(i, f"input {i}"), s, dtypes[i]) for i, s in enumerate(call.inputs))
    try:
        positional, named = call.decoded(lambda i: tensors[i])
        _check_arity(function, positional, named, call)
        made = function(*positional, **named)
        bodies = list(made) if isinstance(made, tuple | list) else [made]
        if len(bodies) != len(call.outputs):
            raise DescriptionError(f"it gives {len(bodies)} outputs, the operator {len(call.outputs)}")
        outputs = [_output(body, shape, k) for k, (body, shape) in enumerate(zip(bodies, call.outputs, strict=True))]
        for output in outputs:
            _infer_sizes(output.body)
        _check_names(outputs)
        for output in outputs:
            _check_body(output)
        return Description(call, tensors, tuple(outputs))
    except DescriptionError as error:
        raise DescriptionError(f"the description of {call.target} is wrong: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DescriptionError(
            f"the description of {call.target} is wrong: it raised {type(error).__name__}: {error}"
        ) from error


def _tensor_names(function: Callable[..., Any], call: Call) -> dict[int, str]:
    """Names of inputs, from the description's parameters."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return {}
    positional, named = call.decoded(lambda i: _Mark(i))
    found = {item.position: key for key, item in named.items() if isinstance(item, _Mark)}
    for k, item in enumerate(positional):
        if k >= len(parameters) or parameters[k].kind is inspect.Parameter.VAR_POSITIONAL:
            break
        if isinstance(item, _Mark):
            found[item.position] = parameters[k].name
        elif isinstance(item, list):
            found.update({m.position: f"{parameters[k].name}[{n}]" for n, m in enumerate(item) if isinstance(m, _Mark)})
    return found


@dataclass(frozen=True, slots=True)
class _Mark:
    position: int


def _check_arity(function: Callable[..., Any], positional: list[Any], named: Mapping[str, Any], call: Call) -> None:
    try:
        inspect.signature(function).bind(*positional, **named)
    except TypeError:
        takes = ", ".join(str(p) for p in inspect.signature(function).parameters.values())
        given = len(positional) + len(named)
        raise DescriptionError(
            f"it takes ({takes}), the operator was called with {given} arguments, {len(call.inputs)} of them tensors"
        ) from None


def _output(body: Any, shape: Shape, number: int) -> Output:
    if not callable(body):
        raise DescriptionError(f"output {number} must be a lambda over coordinates, got {type(body).__name__}")
    variables = variables_of(body, shape, f"output {number}")
    return Output(tuple(variables), as_expression(body(*map(Index.of, variables))))


def _infer_sizes(body: Expression) -> None:
    """Give every reduction variable the size of the dims it indexes alone."""
    waiting = {id(v) for node in body.walk() if isinstance(node, Reduction) for v in node.variables if v.size is None}
    for node in body.walk():
        if not isinstance(node, Access):
            continue
        for dim, index in enumerate(node.indices):
            variable = None if index is None else index.alone
            if variable is None or id(variable) not in waiting:
                continue
            size = node.tensor.shape[dim]
            if variable.size not in (None, size):
                raise DescriptionError(
                    f"{variable.name} runs over {variable.size} elements, dim {dim} of {node.tensor.name} has {size}"
                )
            variable.size = size
    for node in body.walk():
        for variable in node.variables if isinstance(node, Reduction) else ():
            if variable.size is None:
                raise DescriptionError(
                    f"the size of {variable.name} is unknown: it indexes no dim alone; give the reduction extents=(…)"
                )


def _check_names(outputs: list[Output]) -> None:
    """One name is one loop: equal names must have equal sizes unless they come from `*i`."""
    sizes: dict[str, int] = {}
    for output in outputs:
        reductions = [v for n in output.body.walk() if isinstance(n, Reduction) for v in n.variables]
        for variable in (*output.coordinates, *reductions):
            name, size = variable.key
            if not variable.loose and sizes.setdefault(name, size) != size:
                raise DescriptionError(
                    f"{name} runs over {sizes[name]} elements in one place and {size} in another; rename one"
                )


def _check_body(output: Output) -> None:
    """Slices only inside opaque functions; no element outside its tensor; no variable outside its reduction."""
    bound = {id(v) for v in output.coordinates}

    def visit(node: Expression, inside: bool, known: set[int]) -> None:
        if isinstance(node, Access):
            _check_access(node, inside)
            for variable in (v for index in node.indices if index is not None for v in index.variables):
                if id(variable) not in known:
                    raise DescriptionError(f"{variable.name} is used outside the reduction that introduces it")
        if isinstance(node, Reduction):
            known = known | {id(v) for v in node.variables}
        for part in node.parts:
            visit(part, inside or isinstance(node, Opaque), known)

    visit(output.body, False, bound)


def _check_access(node: Access, inside: bool) -> None:
    for dim, index in enumerate(node.indices):
        if index is None:
            if not inside:
                raise DescriptionError(
                    f"{node.tensor.name} is sliced by ':' outside an opaque function; write opaque(…)[…]"
                )
            continue
        low, high = interval_of(index, {})
        size = node.tensor.shape[dim]
        empty = prod(d.extent for d, _ in index.terms) == 0
        if not node.padded and not empty and (low < 0 or high > size - 1):
            raise DescriptionError(
                f"{node.tensor.name} is read at {index} = {low}…{high} in dim {dim}, which has {size} elements; "
                f"use {node.tensor.name}.padded if zeros lie around it"
            )
