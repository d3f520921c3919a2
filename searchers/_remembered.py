"""Methods that answer each question once: the answers are kept in the object and go with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["remembered"]

Owner = TypeVar("Owner")
Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


def remembered(method: Callable[Concatenate[Owner, Asked], Answer]) -> Callable[Concatenate[Owner, Asked], Answer]:
    """Like `functools.cached_property`, for a method of hashable arguments; its object needs a `__dict__`.

    >>> class Squares:
    ...     @remembered
    ...     def of(self, x: int) -> list[int]:
    ...         return [x * x]
    >>> squares = Squares()
    >>> squares.of(3) is squares.of(3), squares.of(3) is Squares().of(3)
    (True, False)
    """
    name = f"_{method.__name__}_answers"

    @functools.wraps(method)
    def answer(owner: Owner, /, *args: Asked.args, **named: Asked.kwargs) -> Answer:
        answers: dict[Hashable, Any] = vars(owner).setdefault(name, {})
        question = (args, *sorted(named.items()))
        if question not in answers:
            answers[question] = method(owner, *args, **named)
        known: Answer = answers[question]
        return known

    return answer
