"""Where an operator's argument does not say which reduction it is, who asked for it does (torch 2.9)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._C import _distributed_c10d as c10d  # noqa: E402
from torch.distributed import ReduceOp  # noqa: E402

from prism_sdk.runtime.reductions import _following, code_of  # noqa: E402


class Mute:
    """A boxed reduction of torch 2.9."""


class Telling:
    def op(self) -> int:
        return 4


def asked(*_: Any, **__: Any) -> int:
    return code_of(Mute())


CODES = {"SUM": 0, "AVG": 1, "PRODUCT": 2, "MIN": 3, "MAX": 4, "BAND": 5, "BOR": 6, "BXOR": 7}


@pytest.mark.parametrize(("name", "code"), CODES.items())
def test_options_and_arguments_say_the_reduction(name: str, code: int) -> None:
    options, method = c10d.AllreduceOptions(), _following(asked)
    options.reduceOp = getattr(ReduceOp, name)
    assert method("group", ["tensors"], options) == code
    assert method("group", ["tensors"], opts=options) == code
    assert method("group", "tensor", getattr(ReduceOp, name)) == code
    assert method("group", "tensor", op=getattr(ReduceOp, name)) == code
    assert method("group", "tensor") == asked() == 0  # nothing said, and nothing left over
    assert code_of(Telling()) == 4


def test_what_one_thread_asks_for_another_does_not_see() -> None:
    found: list[int] = []

    def beside(*_: Any) -> int:
        thread = threading.Thread(target=lambda: found.append(asked()))
        thread.start()
        thread.join()
        return asked()

    assert _following(beside)("group", "tensor", ReduceOp.MAX) == 4
    assert found == [0]


def test_a_call_that_fails_leaves_nothing() -> None:
    def fail(*_: Any) -> None:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        _following(fail)("group", "tensor", ReduceOp.MIN)
    assert asked() == 0
