"""What a recording must refuse in place of answering wrongly, and what it must not say about itself."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

START = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
"""


def test_sparse_tensors_are_refused(bench) -> None:  # type: ignore[no-untyped-def]
    script = bench.script(START + "    dist.all_reduce(torch.eye(3).to_sparse())\n")
    ended = bench.run_shared("record", script, "--nproc-per-node", "2", "--slots", "1", "-q")
    assert ended.code != 0
    assert "not supported: allreduce of sparse tensors" in ended.err


def test_sparse_tensors_pass_when_observed(bench) -> None:  # type: ignore[no-untyped-def]
    script = bench.script(
        START + "    x = torch.eye(3).to_sparse()\n    dist.all_reduce(x)\n    assert x.to_dense().sum().item() == 6\n"
    )
    ended = bench.run_shared("observe", script, "--nproc-per-node", "2", "-q")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_a_group_says_of_itself_what_it_says_without_prism(bench, debug: str) -> None:  # type: ignore[no-untyped-def]
    script = bench.script(
        START
        + """
    group = dist.group.WORLD
    dist.barrier()
    value = torch.ones(2)
    dist.all_reduce(value)
    if rank == 0:
        print(dist.get_backend(), dist.get_backend_config(), group.name(), group.group_desc, type(group).__name__)
        print(sorted(device.type for device in group._device_types), value.tolist())
    """
    )
    options = ("record", script, "--nproc-per-node", "2", "--slots", "1", "-q")
    if debug == "OFF":  # as where nothing is set
        ended = bench.run_shared(*options)
    else:
        ended = bench.run(*options, env={"TORCH_DISTRIBUTED_DEBUG": debug})
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == [
        "gloo cpu:gloo,cuda:gloo gloo default_pg ProcessGroup",
        "['cpu', 'cuda'] [2.0, 2.0]",
    ]


def test_lists_of_the_wrong_length_are_refused(bench) -> None:  # type: ignore[no-untyped-def]
    script = bench.script(
        START
        + """
    one, two = [torch.zeros(1)], [torch.zeros(1), torch.zeros(1)]
    for call in (lambda: dist.all_to_all(one, one), lambda: dist.reduce_scatter(torch.zeros(1), one),
                 lambda: dist.all_gather(one, torch.zeros(1))):
        try:
            call()
        except RuntimeError as error:
            assert "a list has 1 tensors and must have 2" in str(error), error
        else:
            raise SystemExit("a wrong list was accepted")
    """
    )
    ended = bench.run_shared("record", script, "--nproc-per-node", "2", "--slots", "1", "-q")
    assert ended.code == 0, ended.err


def test_tensors_are_dropped_when_torch_would_drop_them(bench) -> None:  # type: ignore[no-untyped-def]
    script = bench.script(
        START
        + """
    import gc
    from torch.multiprocessing.reductions import StorageWeakRef

    gc.disable()
    def watch(*tensors):
        references = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        return lambda: all(reference.expired() for reference in references)

    value = torch.ones(1000)
    is_gone = watch(value)
    work = dist.all_reduce(value, async_op=True)
    work.wait()
    del value
    assert not is_gone()  # work.result() still has it
    del work
    assert is_gone()

    inputs, outputs = [torch.ones(99) for _ in range(2)], [torch.zeros(99) for _ in range(2)]
    is_gone = watch(*inputs, *outputs)
    dist.all_to_all(outputs, inputs)
    del inputs, outputs
    assert is_gone()

    value = torch.ones(1000)
    is_gone = watch(value)
    work = dist.isend(value, 1) if rank == 0 else dist.irecv(value, 0)
    work.wait()
    del value, work
    assert is_gone()
    """
    )
    ended = bench.run_shared("record", script, "--nproc-per-node", "2", "--slots", "1", "-q")
    assert ended.code == 0, ended.err
