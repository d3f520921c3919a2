"""What a user gets wrong about a factory or a module is answered in one line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from simpart.capture import capture
from simpart.errors import UnsupportedError, UserError


class Net(nn.Module):
    """A linear layer whose result a function turns into whatever forward returns."""

    def __init__(self, end: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.end = end

    def forward(self, x: torch.Tensor) -> Any:
        return self.end(self.linear(x))


def factory(end: Callable[[torch.Tensor], Any]) -> Callable[[int], tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    return lambda b: (Net(end), (torch.zeros(b, 4),))


def branch(y: torch.Tensor) -> torch.Tensor:
    if y.sum() > 0:
        return y.mean()
    return y.sum()


def item(y: torch.Tensor) -> torch.Tensor:
    return y.mean() * y.max().item()


def select(y: torch.Tensor) -> torch.Tensor:
    return y[y > 0].mean()


def message(make: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        capture(make, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("end", "line"),
    [(branch, "if y.sum() > 0:"), (item, "y.max().item()"), (select, "return y[y > 0].mean()")],
)
def test_data_dependent_code_is_named_with_its_line(end: Callable[[torch.Tensor], Any], line: str) -> None:
    said = message(factory(end))
    assert line in said
    assert "test_capture_errors.py:" in said
    assert "torch.where" in said
    with pytest.raises(UnsupportedError):
        capture(factory(end))


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (lambda y: y, r"scalar loss, Net returned a tensor of shape [2, 4]"),
        (lambda y: {"loss": y.mean()}, "returned a dict"),
        (lambda y: (y.mean(), y), "a tuple of 2 parts"),
        (lambda y: None, "returned None"),
        (lambda y: y.detach().mean(), "must depend on a trainable parameter"),
        (lambda y: y.argmax().float(), "must depend on a trainable parameter"),
        (lambda y: y @ torch.zeros(3, 3), "raised RuntimeError"),
    ],
)
def test_a_loss_is_a_scalar_that_depends_on_parameters(end: Callable[[torch.Tensor], Any], says: str) -> None:
    assert says in message(factory(end))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (3, "int instead of a factory"),
        (lambda b: None, "it returned None"),
        (lambda b: (torch.zeros(1), (torch.zeros(b),)), "its first part is a Tensor"),
        (lambda b: (Net(torch.mean), torch.zeros(b, 4)), "its second part is a Tensor"),
        (lambda b: (Net(torch.mean), ()), "its second part is a tuple of 0 parts"),
        (lambda b: (nn.ReLU(), (torch.zeros(b, 4),)), "trainable parameters, ReLU has none"),
        (lambda b: 1 / 0, "the factory raised ZeroDivisionError"),
        (lambda b: (Net(torch.mean).to("meta"), (torch.zeros(b, 4),)), "is on meta"),
    ],
)
def test_a_factory_returns_a_module_and_its_inputs(make: Any, says: str) -> None:
    assert says in message(make)


def test_structure_that_depends_on_the_micro_batch_names_the_first_op() -> None:
    def end(y: torch.Tensor) -> torch.Tensor:
        return y.relu().mean() if y.shape[0] > 2 else y.tanh().mean()

    said = message(factory(end))
    assert "at 2 and 3" in said
    assert "aten.tanh.default" in said
    assert "aten.relu.default" in said


def test_precision_and_micro_batches_are_checked() -> None:
    assert "float32" in message(factory(torch.mean), precision="int8")
    assert "at least two micro-batches" in message(factory(torch.mean), micro_batches=(4,))
    assert "at least two micro-batches" in message(factory(torch.mean), micro_batches=(0, 2))
