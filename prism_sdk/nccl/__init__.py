"""What NCCL really did: reads the record files of the NCCL profiler and joins them to a trace. It needs no torch.

format     the layout of record files;  blocks  checked blocks of one file;  records  its events
tasks      collectives and messages with the kernel that carried them out
clock      the GPU's clock on the host's
members    which communicator is which process group;  join  which unit a task belongs to
attach     writes the joined trace;  report  algbw and busbw
library    where the profiler library is installed
"""

from prism_sdk.nccl.records import Communicator, Events, RecordFile, TaskFields, read_records

__all__ = [
    "Communicator",
    "Events",
    "RecordFile",
    "TaskFields",
    "read_records",
]
