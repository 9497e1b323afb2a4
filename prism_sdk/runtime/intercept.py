"""Replaces the kernels of the `c10d::` operators, so that every communication of a rank passes one seam.

Responsible for installing the kernels, for knowing every process group, and for swapping the backend under c10d where a
mode wants that.  What a call does is decided by the installed `Seam`.

Why operators and not functions of torch.distributed: DDP's C++ reducer, functional collectives and DTensor never call
those functions, but all of them dispatch these operators (../../spec/decisions/0101-interception.md).
"""

from __future__ import annotations

import ctypes
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed import distributed_c10d

from prism_sdk.errors import UnsupportedError
from prism_sdk.runtime import direct
from prism_sdk.runtime.calls import GroupState
from prism_sdk.runtime.eager import uncompiled
from prism_sdk.runtime.groupids import stable_group_id
from prism_sdk.runtime.natives import NATIVES, device_of
from prism_sdk.runtime.operators import OPERATORS
from prism_sdk.runtime.reductions import follow_reductions
from prism_sdk.runtime.work import done_work

_CPU = torch.device("cpu")
_NOT_DESCRIBED = "undefined"  # what torch calls a group that the program does not describe
_DISPATCH_KEYS = ("CPU", "CUDA", "SparseCPU", "SparseCUDA")


class Seam(ABC):
    """What a mode does with the communication of its rank."""

    #: a mode that replaces the backend gets process groups over torch's fake backend; others keep the script's own
    replaces_backend: bool = False

    def parse(self, name: str, group: GroupState, native: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """What `issue` gets for the operator `name` with these arguments; `native()` runs it on torch's own backend."""
        return OPERATORS[name](group, native, args)

    def takes_directly(self, device: torch.device) -> bool:
        """Whether calls with tensors on `device` may come to `issue` without passing torch's dispatcher."""
        if not self.replaces_backend:
            return True
        if device.type == "cpu":
            return not _checks_devices
        return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())

    @abstractmethod
    def issue(self, call: Any) -> Work:
        """Start `call` and return its work handle."""

    def install(self) -> None:  # noqa: B027 - optional
        """Replace what else the mode needs replaced (rendezvous, coalescing)."""

    def finish(self, status: str) -> None:  # noqa: B027 - optional
        """The rank's program has ended."""

    def summary(self) -> dict[str, object]:
        """Facts for the launcher's report."""
        return {}

    def group_created(self, group: GroupState) -> None:  # noqa: B027 - optional
        """Told of each new process group of this rank."""

    def keeps_real_backend(self, ranks: tuple[int, ...]) -> bool:
        """For a mode that replaces the backend: True for a group that is to run on the script's own backend."""
        return False


class Interceptor:
    """Installs a `Seam` under torch.distributed in this process."""

    def __init__(self, seam: Seam) -> None:
        self.seam = seam
        self.pid = os.getpid()
        self.groups: dict[str, GroupState] = {}
        self.plain_groups: dict[ProcessGroup, GroupState] = {}  # whose methods are torch's own
        self._generations: dict[tuple[str, tuple[int, ...]], int] = {}

    @property
    def active(self) -> bool:
        """False in processes that the rank forked (data loader workers): they communicate as without Prism."""
        return self.pid == os.getpid()

    def install(self) -> None:
        """Replace the kernels and follow the creation of process groups, for as long as the rank lives."""
        global _current
        replace_kernels()
        _current = self
        self._follow_groups()
        if self.seam.replaces_backend:
            self._answer_for_backend()

    # -- process groups ---------------------------------------------------------------------------------------------

    def group_of(self, group: ProcessGroup) -> GroupState:
        """The state of a group, also of one that was made behind our back (split in C++)."""
        name = group.group_name
        state = self.groups.get(name)
        if state is None or len(state.ranks) != group.size():
            mapping = distributed_c10d._world.pg_group_ranks.get(group)
            ranks = tuple(mapping) if mapping else tuple(range(group.size()))
            state = self._register(group, ranks, str(distributed_c10d._world.pg_map.get(group, ("unknown",))[0]))
        return state

    def _register(self, group: ProcessGroup, ranks: tuple[int, ...], backend: str) -> GroupState:
        _never_destroy(group)
        name = group.group_name
        generation = self._generations.get((name, ranks), 0)
        self._generations[name, ranks] = generation + 1
        told = group.group_desc or ""
        state = GroupState(
            name=name, ranks=ranks, group_rank=group.rank(), backend=backend,
            description="" if told == _NOT_DESCRIBED else told, group_id=stable_group_id(name, ranks, generation),
            generation=generation,
        )  # fmt: skip
        self.groups[name] = state
        self.plain_groups = {one: known for one, known in self.plain_groups.items() if known.name != name}
        if type(group) is ProcessGroup:
            self.plain_groups[group] = state
        self.seam.group_created(state)
        return state

    def _answer_for_backend(self) -> None:
        """What a group says of itself must not depend on the backend that we put under it."""
        own_name = ProcessGroup.name

        def name(group: ProcessGroup) -> str:
            state = self.groups.get(group.group_name)
            is_plain = state is not None and state.backend.isalnum() and state.backend != "undefined"
            return state.backend if state is not None and is_plain else str(own_name(group))

        def sequence_number(group: ProcessGroup) -> int:
            return self.group_of(group).next_seq

        ProcessGroup.name = name  # type: ignore[method-assign,assignment]
        ProcessGroup._get_sequence_number_for_group = sequence_number  # type: ignore[attr-defined]

    def _follow_groups(self) -> None:
        """Wrap the one function through which every process group of torch.distributed is made."""
        original = distributed_c10d._new_process_group_helper
        _skip_checking_wrapper()

        def new_process_group_helper(
            group_size: int, group_rank: int, global_ranks_in_group: list[int], backend: Any, store: Any,
            group_name: Any, *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            if not self.active:
                return original(
                    group_size, group_rank, global_ranks_in_group, backend, store, group_name, *args, **kwargs
                )
            ranks = tuple(global_ranks_in_group) or tuple(range(group_size))
            replaced = self.seam.replaces_backend and not self.seam.keeps_real_backend(ranks)
            requested = dist.Backend(backend) if backend else dist.Backend("undefined")
            options = args[0] if args else kwargs.get("backend_options")
            if replaced:
                backend, kwargs = _fake_backends(requested), {**kwargs, "backend_options": None, "device_id": None}
                args = (None, *args[1:]) if args else args  # backend_options may come by position
            group, prefix_store = original(
                group_size, group_rank, global_ranks_in_group, backend, store, group_name, *args, **kwargs
            )
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                if replaced:
                    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
                    distributed_c10d._world.pg_map[group] = (requested, prefix_store)
                    distributed_c10d._world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(requested))
                state = self._register(group, ranks, str(requested))
                state.is_urgent = bool(getattr(options, "is_high_priority_stream", False))
            return group, prefix_store

        distributed_c10d._new_process_group_helper = new_process_group_helper


_library: torch.library.Library | None = None
_checks_devices = False  # there is a GPU, so a group may have no backend for CPUs
_current: Interceptor | None = None  # whom the kernels ask; none yet: they do what they did without Prism


def replace_kernels() -> None:
    """Replace c10d's kernels in this process, once; a process forked from it has them too, and need not pay for it."""
    global _library
    if _library is not None:
        return
    follow_reductions()
    direct.replace_methods(lambda: _current)
    _library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel" is what we are here for
        for name in OPERATORS:
            _replace(_library, name)


def restore_kernels() -> None:
    """Give torch its own kernels and methods back."""
    global _library
    direct.restore_methods()
    if _library is not None:
        _library._destroy()
        _library = None


def _replace(library: torch.library.Library, name: str) -> None:
    try:
        schema = torch._C._get_schema(f"c10d::{name}", "")
    except RuntimeError:
        return  # an operator of another torch version
    group_index = next(i for i, argument in enumerate(schema.arguments) if argument.name == "process_group")
    num_returns = len(schema.returns)
    for key in _DISPATCH_KEYS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", key):
            continue
        is_sparse = key.startswith("Sparse")
        kernel = _make_kernel(name, group_index, num_returns, is_sparse=is_sparse, is_on_cpu=key == "CPU")
        library.impl(name, kernel, key, allow_override=True)


def _make_kernel(
    name: str, group_index: int, num_returns: int, *, is_sparse: bool, is_on_cpu: bool = False
) -> Callable[..., Any]:
    run_native = NATIVES[name]

    def kernel(*args: Any) -> Any:
        process_group = ProcessGroup.unbox(args[group_index])

        def native() -> Any:
            return run_native(process_group._get_backend(device_of(args)), args)

        interceptor, call = _current, None
        replaced = interceptor is not None and interceptor.seam.replaces_backend
        if is_sparse:  # never traced: what travels is not what the operator says
            if replaced:
                raise UnsupportedError(f"{name.rstrip('_')} of sparse tensors", hint="make them dense first")
        elif interceptor is not None and interceptor.active:
            if _checks_devices and replaced and is_on_cpu:
                process_group._get_backend(_CPU)  # says in torch's words that NCCL has none for the CPU
            if replaced and not is_on_cpu:
                _refuse_capture(name)
            try:
                call = interceptor.seam.parse(name, interceptor.group_of(process_group), native, args)
            except (RuntimeError, IndexError):  # wrong arguments: a real backend says so in its own words
                if replaced:
                    raise
        work = native() if interceptor is None or call is None else interceptor.seam.issue(call)
        if num_returns == 0:
            return None
        if work is None:  # NCCL waits for operations that are not asynchronous itself, and gives no handle for them
            work = done_work()
        boxed = work.boxed()
        return boxed if num_returns == 1 else (args[0], boxed)

    return uncompiled(kernel)


def _refuse_capture(name: str) -> None:
    """A mode that moves the data itself does so once, at the call: a graph would replay none of it."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"{name.strip('_')} while a CUDA graph is captured",
            hint="capture computing only, or run without CUDA graphs; `prism observe` runs captured communication",
        )


def _skip_checking_wrapper() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps a backend in one that compares calls over gloo: not so the fake backend.

    A replacing mode compares the calls itself, and gloo's connections would wait for ranks that hold no slot.
    """
    original = distributed_c10d._create_process_group_wrapper

    def create_process_group_wrapper(wrapped_pg: Any, *args: Any, **kwargs: Any) -> Any:
        if type(wrapped_pg).__name__ == "FakeProcessGroup":
            return wrapped_pg
        return original(wrapped_pg, *args, **kwargs)

    distributed_c10d._create_process_group_wrapper = create_process_group_wrapper


def _never_destroy(group: ProcessGroup) -> None:
    """Keep the C++ object for the life of the process.

    Its destructor joins the backend's threads, which may be waiting for the interpreter lock that we hold: tensors that
    came through a Python kernel have a Python half, and the thread that drops the last reference needs the lock.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _fake_backends(requested: str) -> str:
    """The fake backend for all devices that the requested one serves, and the CPU; the import registers it."""
    global _checks_devices
    import torch.testing._internal.distributed.fake_pg

    devices = list(distributed_c10d.BackendConfig(dist.Backend(requested)).get_device_backend_map())
    _checks_devices = torch.cuda.is_available()
    if not _checks_devices:  # else objects travel, and memory is taken, where the script's backend does it
        devices = list(dict.fromkeys(["cpu", *devices]))
    return ",".join(f"{device}:{dist.Backend.FAKE}" for device in devices)
