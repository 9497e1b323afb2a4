"""Reads the order of named units out of a trace, and keeps it as a golden file. It judges no times.

An order is a list of short texts, one for each stretch of computing and each communication::

    forward mb=0 stage=1 warmup
    send activation mb=0 stage=1 ->2
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism_sdk.keys import PURPOSE_KEY
from prismtrace import ABSENT32, Op, Phase, TraceReader, UnitKind

__all__ = ["NamedUnit", "check_golden", "unit_order", "used_groups"]

_TALKS = frozenset({UnitKind.COLLECTIVE, UnitKind.SEND, UnitKind.RECV})


@dataclass(frozen=True)
class NamedUnit:
    """What adapters said of one unit; absent is None. ``op`` is None for computing, ``purpose`` that of its group."""

    phase: str
    op: str | None = None
    part: str | None = None
    microbatch: int | None = None
    stage: int | None = None
    model_chunk: int | None = None
    layer: str | None = None
    label: str | None = None
    schedule: str | None = None
    peer: int | None = None
    purpose: str | None = None

    def __str__(self) -> str:
        words = [self.part or self.phase] if self.op is None else [self.op]
        if self.op is not None and self.part:
            words.append(self.part)
        words += [word for word in (self.label,) if word and self.op is None]
        for name, value in (
            ("mb", self.microbatch), ("stage", self.stage), ("chunk", self.model_chunk), ("layer", self.layer),
            ("group", self.purpose),
        ):  # fmt: skip
            if value is not None:
                words.append(f"{name}={value}")
        if self.schedule:
            words.append(self.schedule)
        if self.op in ("send", "recv"):
            words.append(f"{'->' if self.op == 'send' else '<-'}{self.peer}")
        return " ".join(words)


def unit_order(
    trace: Path | TraceReader, rank: int, *, step: int | None = None, named_only: bool = True
) -> list[NamedUnit]:
    """The units of ``rank`` in order; neighbouring stretches of computing with equal names are one, waits are left out.

    Args:
        trace: a trace, or a reader of it.
        rank: whose units.
        step: only those of this step; absent: all.
        named_only: leave out units that no adapter named.
    """
    if isinstance(trace, TraceReader):
        return _order(trace, rank, step=step, named_only=named_only)
    with TraceReader(trace) as reader:
        return _order(reader, rank, step=step, named_only=named_only)


def _order(reader: TraceReader, rank: int, *, step: int | None, named_only: bool) -> list[NamedUnit]:
    units = reader.units(rank)
    columns: dict[str, Any] = dict(units.columns())

    def texts(name: str) -> list[str | None]:
        return list(columns[name]) if name in columns else [None] * len(units)

    def numbers(name: str) -> list[int | None]:
        if name not in columns:
            return [None] * len(units)
        return [None if value == ABSENT32 else value for value in columns[name].tolist()]

    purposes = {group: reader.metadata.get(PURPOSE_KEY.format(group)) for group in reader.groups}
    rows = zip(
        units.kind.tolist(), units.phase.tolist(), units.op.tolist(), units.group_id.tolist(), units.step.tolist(),
        numbers("microbatch"), numbers("stage"), numbers("model_chunk"), numbers("peer"),
        texts("prism.part"), texts("prism.layer"), texts("label"), texts("prism.schedule"), texts("prism.adapter"),
        strict=True,
    )  # fmt: skip
    found: list[NamedUnit] = []
    for kind, phase, op, group, at, microbatch, stage, chunk, peer, part, layer, label, schedule, adapter in rows:
        if kind == UnitKind.WAIT or (step is not None and at != step) or (named_only and adapter is None):
            continue
        talks = kind in _TALKS
        one = NamedUnit(
            phase=Phase(phase).name.lower(), op=Op(op).name.lower() if talks else None, part=part,
            microbatch=microbatch, stage=stage, model_chunk=chunk, layer=layer, label=label, schedule=schedule,
            peer=peer if talks else None, purpose=purposes.get(group) if talks else None,
        )  # fmt: skip
        if talks or not found or found[-1] != one:
            found.append(one)
    return found


def used_groups(trace: Path | TraceReader, rank: int, *, step: int) -> set[tuple[str | None, tuple[int, ...]]]:
    """The process groups in which ``rank`` communicates in a step: the purpose of each, and its ranks."""
    if not isinstance(trace, TraceReader):
        with TraceReader(trace) as reader:
            return used_groups(reader, rank, step=step)
    units = trace.units(rank, steps=step, columns=["kind", "group_id"])
    used = {group for kind, group in zip(units.kind.tolist(), units.group_id.tolist(), strict=True) if kind in _TALKS}
    return {(trace.metadata.get(PURPOSE_KEY.format(group)), trace.groups[group].ranks) for group in used}


def check_golden(path: Path, order: list[NamedUnit], *, update: bool = False) -> None:
    """Compare an order with a golden file, one unit a line; with ``update``, or where there is no file, write it.

    Raises:
        AssertionError: they differ; the message shows the first difference and how to accept the new order. Or no
            unit has a name, which is no order to keep.
    """
    assert order, f"{path}: no unit has a name: were hooks of the adapter called in this step, and in this rank?"
    lines = [_printable(str(one)) for one in order]
    if update or not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return
    golden = path.read_text(encoding="utf-8").splitlines()
    for at, (old, new) in enumerate(zip(golden, lines, strict=False)):
        assert old == new, f"{path}:{at + 1}: {old!r} before, now {new!r}; delete the file to accept the new order"
    assert len(golden) == len(lines), f"{path} has {len(golden)} units, now there are {len(lines)}"


def _printable(text: str) -> str:
    """The same in one line, whatever a label holds."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
