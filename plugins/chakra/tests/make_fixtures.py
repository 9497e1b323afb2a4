"""Cuts the excerpts in data/ out of the published files, and makes the execution traces of gloo. Not a test.

python make_fixtures.py /path/to/data       # chakra/chakra.0.et and param/dlrm_pytorch_et.tar.gz below it
python make_fixtures.py --gloo              # four ranks of PyTorch itself
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


def varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def chakra(source: Path) -> None:
    """The description, the first 40 nodes, all nodes that communicate, and the first nodes that form cycles."""
    data, position, number, out = source.read_bytes(), 0, 0, bytearray()
    while position < len(data):
        start = position
        length, position = varint(data, position)
        message = data[position : position + length]
        position += length
        node, _ = varint(message, 1)
        if number < 41 or b"\x18\x07" in message[:200] or node in (6345, 6347, 5964, 5966):
            out += data[start:position]
        number += 1
    (DATA / "excerpt.0.et").write_bytes(out)


def dlrm(source: Path) -> None:
    """Of ranks 0 and 1: nodes that communicate, their parents, and every 25th node."""
    with tarfile.open(source) as archive:
        for rank in (0, 1):
            file = archive.extractfile(f"dlrm_pytorch_et/dlrm_eg_{rank}.json")
            assert file is not None
            document = json.load(file)
            nodes = {node["id"]: node for node in document["nodes"]}
            keep: set[int] = set()
            for place, node in enumerate(document["nodes"]):
                if place % 25 == 0 or any(text in node["name"] for text in ("comms", "c10d", "nccl:")):
                    number = node["id"]
                    while number in nodes and number not in keep:
                        keep.add(number)
                        number = nodes[number]["parent"]
            document["nodes"] = [node for node in document["nodes"] if node["id"] in keep]
            (DATA / f"dlrm_eg_{rank}.json").write_text(json.dumps(document) + "\n")


def worker(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.profiler import ExecutionTraceObserver

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611")
    path = DATA / f"gloo_et_{rank}.json"
    observer = ExecutionTraceObserver().register_callback(str(path))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    groups = [dist.new_group([0, 1], group_desc="dp"), dist.new_group([2, 3], group_desc="dp")]
    observer.start()
    weight, vector = torch.randn(8, 8, requires_grad=True), torch.ones(8)
    (weight @ vector).sum().backward()
    dist.all_reduce(weight.grad)
    dist.all_gather([torch.empty(8) for _ in range(2)], vector, group=groups[rank // 2])
    handle: Any = dist.all_reduce(vector, async_op=True)
    (weight @ vector).sum().backward()
    handle.wait()
    if rank % 2 == 0:
        dist.send(vector, rank + 1, tag=5)
    else:
        dist.recv(vector, rank - 1, tag=5)
    dist.all_to_all_single(torch.empty(8), vector, output_split_sizes=[2] * 4, input_split_sizes=[2] * 4)
    dist.reduce_scatter_tensor(torch.empty(2), vector)
    dist.barrier()
    observer.stop()
    observer.unregister_callback()
    dist.destroy_process_group()
    path.with_suffix(".json.gz").write_bytes(gzip.compress(path.read_bytes(), 9, mtime=0))
    path.unlink()


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    if sys.argv[1:] == ["--gloo"]:
        import torch.multiprocessing

        torch.multiprocessing.spawn(worker, args=(4,), nprocs=4)
    else:
        chakra(Path(sys.argv[1]) / "chakra" / "chakra.0.et")
        dlrm(Path(sys.argv[1]) / "param" / "dlrm_pytorch_et.tar.gz")
