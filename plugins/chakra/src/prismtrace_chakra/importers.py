"""The importers `chakra` and `pytorch_et`: options, one file after the other, notes. It reads no format itself."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prism_sdk.abc import ConversionReport, TraceImporter
from prism_sdk.errors import UsageError
from prism_sdk.interop.sources import ForeignFileError, Part, flag, number, parts, rank_of_name
from prismtrace import GraphKind, TraceDataError, TraceFormatError, TraceUsageError
from prismtrace_chakra.job import Job

_SUFFIXES_ET = (".et", ".et.gz")
_SUFFIXES_JSON = (".json", ".json.gz")


def _check(options: Mapping[str, str], known: tuple[str, ...]) -> None:
    if unknown := sorted(set(options) - set(known)):
        raise UsageError(f"-O {unknown[0]} is not an option here; there are {', '.join(known)}")


def _head_members(head: bytes) -> list[str]:
    """The names of the files that the beginning of a tar archive shows."""
    if head[257:262] != b"ustar":
        return []
    names: list[str] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(head), mode="r:") as archive:
            for member in archive:
                names.append(member.name.lower())
    except (tarfile.TarError, EOFError, OSError, ValueError):
        pass  # the head ends inside a member
    return names


def _folder_has(source: Path, suffixes: tuple[str, ...], look: Callable[[bytes], bool]) -> bool:
    try:
        found = next((path for path in sorted(source.iterdir()) if path.name.lower().endswith(suffixes)), None)
        if found is None or not found.is_file():
            return False
        with open(found, "rb") as file:
            head = file.read(1 << 16)
    except OSError:
        return False
    return head[:2] == b"\x1f\x8b" or look(head)


class _Importer(TraceImporter):
    """What both importers share: the rank of a file, and the loop over files."""

    suffixes: tuple[str, ...]
    known = ("lossless", "rank", "strict", "world_size")

    def import_trace(
        self,
        sources: Sequence[Path],
        *,
        output: Path,
        options: Mapping[str, str],
        report: Callable[[str], None],
    ) -> ConversionReport:
        """See the base class. Options: lossless, rank (of the only file), strict (refuse cut files), world_size."""
        _check(options, self.known)
        only = number(options, "rank")
        strict, lossless = flag(options, "strict"), flag(options, "lossless")
        world_size = number(options, "world_size")
        where = str(sources[0]) if sources else ""
        with Job(output, graph_kind=GraphKind.BARE, world_size=world_size, report=report, where=where) as job:
            first = ""
            for part in parts(sources, lambda name: name.lower().endswith(self.suffixes)):
                if only is not None and first:
                    raise UsageError(f"-O rank={only} says the rank of one file, there are {first} and {part.name}")
                first = part.name
                try:
                    self._part(job, part, only, strict=strict, lossless=lossless)
                except ForeignFileError as error:
                    if part.chosen:
                        raise
                    job.counts["foreign_files"] += 1
                    job.note(f"{part.name}: {error.message}; left out")
                except (TraceUsageError, OverflowError) as error:
                    raise TraceDataError(f"holds what a trace cannot: {error}", path=part.name) from error
            job.describe("import.format", self.name)
            return job.finish()

    def _part(self, job: Job, part: Part, only: int | None, *, strict: bool, lossless: bool) -> None:
        raise NotImplementedError

    def _rank(self, job: Job, part: Part, only: int | None, stated: int | None) -> int:
        """The rank of a file: the user's word, else the file's own, else its name."""
        named = rank_of_name(part.base)
        rank = next((each for each in (only, stated, named) if each is not None), None)
        if rank is None or rank >= 1 << 31:
            raise UsageError(f"{part.name} does not say of which rank it is", hint="say it with -O rank=N")
        if stated is not None and rank != stated:
            job.note(f"{part.name} says that it is of rank {stated}; taken as rank {rank}, as asked")
        elif named is not None and rank != named:
            job.note(f"{part.name} is of rank {rank}, its name says {named}")
        job.claim(rank, part.name)
        return rank


class ChakraImporter(_Importer):
    """Chakra execution traces: one .et file a rank, length-delimited protobuf."""

    name = "chakra"
    description = "Chakra execution traces (.et, folder or tar archive of ranks)"
    suffixes = _SUFFIXES_ET

    def recognises(self, source: Path, head: bytes) -> bool:
        """By the ending .et, or by a first message that describes a Chakra file."""
        if source.name.lower().endswith(_SUFFIXES_ET):
            return True
        if not head:
            return _folder_has(source, _SUFFIXES_ET, lambda head: True)
        if any(name.endswith(_SUFFIXES_ET) for name in _head_members(head)):
            return True
        return len(head) > 8 and head[1:2] in (b"\x0a", b"\x12") and b"\x0a\x06schema" in head[:64]

    def _part(self, job: Job, part: Part, only: int | None, *, strict: bool, lossless: bool) -> None:
        from prismtrace_chakra import chakra_nodes, events, exact

        file = chakra_nodes.read(part.data, path=part.name, strict=strict)
        stated = _stated_rank(file.attributes)
        rank = self._rank(job, part, only, stated)
        job.counts["nodes"] += len(file.nodes)
        if file.truncated is not None:
            job.counts["truncated_files"] += 1
            job.note(f"{part.name} was cut ({file.truncated}): the {len(file.nodes)} nodes before that were read")
        for name, amount in (
            ("duplicate_ids", len(file.facts.duplicates)),
            ("dangling_dependencies", len(file.facts.dangling)),
            ("cycles", len(file.facts.cycles)),
        ):
            job.counts[name] += amount
        job.counts["longest_chain"] = max(job.counts["longest_chain"], file.facts.longest_chain)
        for note in file.facts.notes(part.name):
            job.note(note)
        if file.version:
            job.describe("chakra.version", file.version)
        self._describe(job, file.attributes)
        if exact.MARK in file.attributes and not file.truncated:
            try:
                columns = exact.columns([node.attributes for node in file.nodes])
                groups = exact.groups(file.attributes)
            except ValueError as error:
                raise TraceFormatError(f"the attributes prism.* are damaged: {error}", path=part.name) from error
            if "kind" not in columns:
                raise TraceFormatError("no node has the attribute prism.kind", path=part.name)
            file.unit_of[:] = range(len(file.nodes))
            job.add_exact(rank, columns, groups)
        else:
            if file.has_starts:
                job.use_graph_kind(GraphKind.OBSERVED)
                job.note("Chakra has times in microseconds: nanoseconds were lost before the import")
            else:
                job.note("nodes have durations and no start times: units have chakra.host_ns and device_ns only")
            job.add_units(chakra_nodes.units_of(file, rank, job, path=part.name))
        if lossless:
            events.add_chakra(job, rank, file, path=part.name)

    def _describe(self, job: Job, attributes: Mapping[str, tuple[str, Any]]) -> None:
        kind, size = attributes.get("prism.graph_kind", ("", None))[1], attributes.get("prism.world_size", ("", 0))[1]
        if isinstance(kind, int) and kind in GraphKind._value2member_map_:
            job.use_graph_kind(GraphKind(kind))
        if isinstance(size, int) and 0 <= size < 1 << 31:
            job.hint_world(size)
        for name, (form, value) in attributes.items():
            if name.startswith("prism.metadata.") and form == "string":
                job.describe(name.removeprefix("prism.metadata."), value)
            elif (
                not name.startswith("prism.")
                and name not in ("rank", "global_rank")
                and form != "none"
                and name.replace("_", "").isalnum()
            ):
                job.describe(f"chakra.{name.lower()}", str(value)[: 1 << 16])


def _stated_rank(attributes: Mapping[str, tuple[str, Any]]) -> int | None:
    for name in ("prism.rank", "rank", "global_rank"):
        value = attributes.get(name, ("", None))[1]
        if type(value) is int and 0 <= value < 1 << 31:
            return value
    return None


class PyTorchExecutionTraceImporter(_Importer):
    """PyTorch execution traces: one JSON file a rank, as ExecutionTraceObserver writes them."""

    name = "pytorch_et"
    description = "PyTorch execution traces (JSON of ExecutionTraceObserver, folder or tar archive of ranks)"
    suffixes = _SUFFIXES_JSON

    def recognises(self, source: Path, head: bytes) -> bool:
        """By a schema and nodes in the first bytes."""
        if not head:
            return _folder_has(source, _SUFFIXES_JSON, self._looks_right)
        if any(name.endswith(_SUFFIXES_JSON) for name in _head_members(head)):
            return self._looks_right(head[head.find(b"{") :])
        return self._looks_right(head)

    @staticmethod
    def _looks_right(head: bytes) -> bool:
        inside = b'"schema"' in head and b'"nodes"' in head and b'"traceEvents"' not in head
        return inside and head.lstrip().startswith(b"{")

    def _part(self, job: Job, part: Part, only: int | None, *, strict: bool, lossless: bool) -> None:
        from prismtrace_chakra import events, pytorch_nodes, pytorch_units

        file = pytorch_nodes.read(part.data, path=part.name)
        rank = self._rank(job, part, only, file.stated_rank)
        job.counts["nodes"] += len(file.nodes)
        job.counts["duplicate_ids"] += len(file.facts.duplicates)
        job.counts["dangling_dependencies"] += len(file.facts.dangling)
        job.counts["cycles"] += len(file.facts.cycles)
        job.counts["longest_chain"] = max(job.counts["longest_chain"], file.facts.longest_chain)
        for note in (*file.notes, *file.facts.notes(part.name)):
            job.note(note)
        for key, value in file.metadata.items():
            job.describe(f"pytorch_et.{key}", value)
        if file.has_times:
            job.use_graph_kind(GraphKind.OBSERVED)
        else:
            job.note("the execution traces hold no times: units have none")
        job.add_units(pytorch_units.units_of(file, rank, job, path=part.name))
        if lossless:
            events.add_pytorch(job, rank, file, path=part.name)
