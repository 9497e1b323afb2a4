"""How long a work handle keeps tensors: as long as the program holds the handle, no longer."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._C._distributed_c10d import Work  # noqa: E402

from prism_sdk.runtime.futures import collect_all, is_in_background, run_due, wait_all  # noqa: E402
from prism_sdk.runtime.work import PrismWork, outstanding_works  # noqa: E402


def watch(tensor: Any) -> Any:
    """A function that says whether the tensor's storage is gone."""
    return torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()).expired


def handle(tensor: Any, *, error: Exception | None = None) -> PrismWork:
    kept_by_the_operation = [tensor]

    def complete(_timeout: Any) -> None:
        assert kept_by_the_operation
        if error is not None:
            raise error

    return PrismWork(complete, lambda: True, [tensor], late_wait=lambda: None)


@pytest.fixture(autouse=True)
def no_collector() -> Any:
    """Nothing may depend on the cycle collector."""
    gc.disable()
    yield
    gc.enable()


def test_the_tensor_lives_until_the_wait_though_nobody_holds_the_handle() -> None:
    tensor = torch.ones(4)
    is_gone = watch(tensor)
    boxed = handle(tensor).boxed()
    del tensor
    assert not is_gone()
    assert len(outstanding_works()) == 1
    Work.unbox(boxed).wait()
    assert is_gone()
    assert outstanding_works() == []
    Work.unbox(boxed).wait()  # C++ may ask again


def test_result_is_there_as_long_as_the_program_holds_the_handle() -> None:
    work = handle(torch.ones(4))
    work.wait()
    (result,) = work.result()
    assert result.tolist() == [1.0] * 4
    is_gone = watch(result)
    del result
    assert not is_gone()
    del work
    assert is_gone()


def test_a_future_does_not_outlive_the_handle() -> None:
    work = handle(torch.ones(4))
    future = work.get_future()
    is_gone = watch(future.wait()[0])
    del work
    assert not is_gone()
    del future
    assert is_gone()


def test_a_failed_wait_is_over_and_says_so_again() -> None:
    work = handle(torch.ones(4), error=RuntimeError("lost a peer"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost a peer"):
            work.wait()
    assert not work.is_success()
    assert isinstance(work.exception(), RuntimeError)
    assert outstanding_works() == []


def test_futures_complete_when_somebody_asks() -> None:
    works = [handle(torch.full((2,), float(i))) for i in range(4)]
    futures = [work.get_future() for work in works]
    doubled = futures[0].then(lambda future: future.value()[0] * 2).then(lambda future: future.value() + 1)
    assert len(outstanding_works()) == 4, "asking for a future waits for nothing"
    assert doubled.wait().tolist() == [1.0, 1.0]
    assert len(outstanding_works()) == 3
    assert futures[1].done() and futures[1].value()[0].tolist() == [1.0, 1.0]
    seen: list[Any] = []
    futures[2].add_done_callback(lambda future: seen.append(future.value()[0].tolist()))
    run_due()
    assert seen == [[2.0, 2.0]]
    assert [value[0].tolist() for value in wait_all(futures)] == [[float(i)] * 2 for i in range(4)]
    assert outstanding_works() == []


def test_a_failed_operation_fails_its_futures() -> None:
    work = handle(torch.ones(4), error=RuntimeError("lost a peer"))
    future = work.get_future()
    chained = future.then(lambda done: done.value())
    collected = collect_all([future])
    for asked in (chained, future, collected):
        with pytest.raises(RuntimeError, match="lost a peer"):
            [one.wait() for one in asked.wait()]
    assert outstanding_works() == []


def test_an_error_of_a_callback_is_the_error_of_its_future() -> None:
    work = handle(torch.ones(4))
    with pytest.raises(RuntimeError, match="no such thing"):
        work.get_future().then(lambda _: [].index("no such thing")).wait()
    assert outstanding_works() == []


def test_polling_puts_results_in_place_and_a_later_wait_is_noted() -> None:
    tensor, waits = torch.zeros(2), []
    is_there = False

    def complete(_timeout: Any) -> None:
        assert is_in_background()
        tensor.fill_(7)

    work = PrismWork(complete, lambda: is_there, [tensor], late_wait=lambda: waits.append(1))
    future = work.get_future()
    assert not work.is_completed() and not future.done() and tensor.tolist() == [0, 0]
    is_there = True
    assert work.is_completed() and tensor.tolist() == [7, 7] and waits == []
    assert future.done() and future.value()[0] is tensor
    future.wait()
    work.wait()
    assert waits == [1], "the program waited for it, once"
    assert outstanding_works() == []


def test_results_that_nobody_waits_for_are_there_after_a_barrier(bench: Any) -> None:
    """Every time: also when another member is just computing one of them."""
    script = bench.script("""
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    missing = 0
    for _ in range(50):
        total, all_of_them = torch.ones(6000), torch.zeros(4 * 10)
        dist.all_reduce(total, async_op=True)
        dist.all_gather_into_tensor(all_of_them, torch.ones(10), async_op=True)
        message, later = torch.zeros(3000), torch.zeros(1)
        dist.irecv(message, (dist.get_rank() - 1) % 4)
        works = [dist.irecv(later, (dist.get_rank() - 1) % 4)]
        dist.isend(torch.ones(3000), (dist.get_rank() + 1) % 4)
        dist.barrier()
        missing += bool((total != 4).any() or (all_of_them != 1).any() or (message != 1).any())
        missing += bool(later.any())
        works += [dist.isend(torch.ones(1), (dist.get_rank() + 1) % 4)]
        [work.wait() for work in works]
        missing += not later.all()
    assert missing == 0, missing
    """)
    ended = bench.run_shared("record", script, "--nproc-per-node", "4", "--slots", "2")
    assert ended.code == 0, ended.err


def test_a_collective_takes_what_an_earlier_one_of_its_group_brings(bench: Any) -> None:
    """Without a wait between them: a backend goes in order."""
    script = bench.script("""
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        twice, flat, untouched = torch.ones(5000), torch.zeros(2 * size), torch.ones(8)
        dist.all_reduce(twice, async_op=True)
        dist.all_reduce(twice[1000:], async_op=True)
        last = dist.all_reduce(twice[4000:], async_op=True)
        mine = flat[2 * rank : 2 * rank + 2]
        mine += rank + 1.0
        dist.all_gather_into_tensor(flat, mine, async_op=True)
        shared = dist.all_reduce(flat, async_op=True)
        dist.all_reduce(untouched[:4], async_op=True)
        dist.all_reduce(untouched[4:], async_op=True)
        shared.wait(), last.wait()
        assert flat.tolist() == [size * (r + 1.0) for r in range(size) for _ in range(2)], flat
        first, second, third = twice[0].item(), twice[1000].item(), twice[4000].item()
        assert (first, second, third) == (size, size**2, size**3), twice
        dist.barrier()
        assert (untouched == size).all()
        optimizer.step()
    """)
    bare, graph = str(bench.folder / "bare.prism"), str(bench.folder / "graph.prism")
    for mode, *options in (
        ("record", "--nproc-per-node", "3", "--slots", "1", "-o", bare),
        ("calibrate", "--graph", bare, "--slots", "1", "-O", "passes=1", "-o", graph),
        ("emulate", "--graph", graph, "--sandbox", "1"),
    ):
        ended = bench.run_shared(mode, script, *options)
        assert ended.code == 0, (mode, ended.err)


def test_a_backend_without_a_handle_for_what_is_not_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    # as NCCL under torch 2.11: the caller's Python asks for a handle nevertheless
    import torch.distributed as dist
    from torch._C._distributed_c10d import ProcessGroup, ReduceOp

    from prism_sdk.runtime import intercept

    asked = []
    monkeypatch.setitem(intercept.NATIVES, "allreduce_", lambda backend, args: asked.append(args))
    kernel = intercept._make_kernel("allreduce_", 1, 2, is_sparse=False)
    group = ProcessGroup(dist.HashStore(), 0, 1)
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    tensors = [torch.ones(3)]
    result, boxed = kernel(tensors, group.boxed(), ReduceOp.SUM, None, False, -1)
    assert result is tensors and len(asked) == 1
    handle = Work.unbox(boxed)
    assert handle.wait() and handle.is_completed()
