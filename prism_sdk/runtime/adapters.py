"""Puts the names that framework adapters give onto the units of a trace.

Responsible for nesting their names and for saying in the trace how complete they are; what a framework's schedule looks
like is the knowledge of its adapter, and activating.py puts adapters to work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prism_sdk.keys import PURPOSE_KEY
from prism_sdk.runtime.names import FIELDS, Names, check_note, checked, checked_index, checked_text
from prism_sdk.runtime.tracer import Tracer
from prismtrace import Phase

_PHASES = {phase.name.lower(): int(phase) for phase in Phase if phase}
_OTHER = int(Phase.OTHER)
_NOTHING = (None,) * 7
_FIELDS = frozenset(FIELDS)
_MOST_OPEN = 1000  # stretches: more are never ended
_MOST_REASONS = 32  # of one adapter
_MOST_REASON = 500  # characters
_MOST_NAMES = 1 << 16  # labels may be endless; beyond it equal names are no longer one object
_DEFAULT = "default_pg"  # torch's description of the group of all ranks
_MESH = "mesh_"  # torch's description of the groups of a DeviceMesh: mesh_ and the name of the dimension


class Naming:
    """The names of one rank, as all its adapters together give them."""

    def __init__(self, tracer: Tracer, options: Mapping[str, str] | None = None) -> None:
        self.tracer = tracer
        self.options = options or {}
        self.taken: set[str] = set()  # options that some adapter heeds
        # token; phase and named phase before it (0: it said none), names and queued names before it
        self.stack: list[tuple[int, int, int, Names | None, Any]] = []
        self.next_token = 0
        self.lowered: dict[str, list[str]] = {}  # adapter -> reasons
        self.used: set[str] = set()
        self.purposes: dict[str, str] = {}
        self.coordinates: dict[str, int] = {}
        self.later: dict[int, TracerNamer] = {}  # tokens that another call leaves, and who entered
        self.namers: list[TracerNamer] = []
        self.is_open = True
        self._ended_step = -1
        if tracer is not None:
            tracer.at_optimizer, tracer.at_group = self._optimizer_begins, self._group_begins

    def _optimizer_begins(self) -> None:
        self.end_late()
        if self.tracer.step != self._ended_step:  # several optimizers may step in a row
            self._ended_step = self.tracer.step
            self._call(0)

    def _group_begins(self) -> None:
        self._call(1)

    def _call(self, which: int) -> None:
        for namer in self.namers if self.is_open else ():
            for calls in namer.watching:
                try:
                    calls[which]()
                except Exception as error:  # a plugin's fault must not reach the training
                    namer.lower(f"watching its hooks: {type(error).__name__}: {error}")

    def end_late(self) -> None:
        """End stretches whose end has not come, although they are over."""
        for token in [token for token, *_ in self.stack if token in self.later][:1]:  # all others are inside
            self.later[token].lower("a pass was never ended, as by an exception: what is behind it may have its names")
            self.later[token].leave(token)
        self.later.clear()

    def close(self) -> None:
        """From now on nothing that adapters say is kept."""
        self.is_open = False

    def facts(self) -> dict[str, str]:
        """What the trace says of the names of this rank, by the last word of the metadata key."""
        for name in self.options.keys() - self.taken:
            self.lowered["prism"] = [f"{name} was asked for, and no adapter that is at work heeds it"]
        if not self.used and not self.lowered:
            return {}
        facts = {"adapters": ",".join(sorted(self.used)), "fidelity": "reduced" if self.lowered else "full"}
        if self.lowered:
            reasons = [f"{name}: {reason}" for name, given in sorted(self.lowered.items()) for reason in given]
            facts["fidelity_reasons"] = "; ".join(reasons)
        return facts

    def write(self) -> None:
        """Put into the shard what is no unit: fidelity, coordinates, purposes of groups."""
        self.end_late()
        self.tracer.settle_notes()
        writer, rank = self.tracer.writer, self.tracer.rank
        for name, value in self.facts().items():
            writer.set_metadata(f"rank.{rank}.{name}", value)
        if self.coordinates:
            writer.set_metadata(
                f"rank.{rank}.coordinates", ",".join(f"{axis}={at}" for axis, at in self.coordinates.items())
            )
        for group in self.tracer.groups.values():
            purpose = self.purposes.get(group.description) or self.purposes.get(group.name)
            if purpose is None and group.description.startswith(_MESH):
                purpose = group.description.removeprefix(_MESH)
            if purpose is None and group.description == _DEFAULT:
                purpose = "world"
            if purpose:
                writer.set_metadata(PURPOSE_KEY.format(group.group_id), purpose)


class TracerNamer:
    """Where one adapter says what the rank is doing (implements prism_sdk.abc.UnitNamer)."""

    __slots__ = ("_adapter", "_known", "_naming", "_stack", "_tracer", "watching")

    def __init__(self, naming: Naming, adapter: str) -> None:
        self._adapter = adapter
        self.watching: list[tuple[Callable[[], None], Callable[[], None]]] = []
        self.bind(naming)

    def bind(self, naming: Naming) -> None:
        """From now on what it is told are the names of this rank."""
        naming.namers.append(self)
        self._naming, self._tracer, self._stack = naming, naming.tracer, naming.stack
        self._known: dict[tuple[Any, ...], tuple[int, Names | None]] = {}  # what was said where -> phase, names

    def enter(
        self, phase: str | None = None, *, microbatch: int | None = None, stage: int | None = None,
        model_chunk: int | None = None, label: str | None = None, part: str | None = None, layer: str | None = None,
        schedule: str | None = None,
    ) -> int:  # fmt: skip
        """Begin a stretch; an unknown phase counts as other."""
        naming = self._naming
        if not naming.is_open:
            return 0
        tracer = self._tracer
        outer = tracer.names
        said = (outer, phase, microbatch, stage, model_chunk, label, part, layer, schedule)
        try:
            number, names = self._known[said]
        except (KeyError, TypeError):
            number, names = self._merge(said)
        naming.next_token = token = naming.next_token + 1
        if not token & 1023 and len(self._stack) > _MOST_OPEN:
            self._forget()
        if number:
            self._stack.append((token, tracer.phase, tracer.named_phase, outer, tracer.queued))
            tracer.switch(number, number, names)
        else:
            self._stack.append((token, 0, 0, outer, tracer.queued))
            if names is not outer:
                tracer.switch(0, 0, names)
        tracer.queued = None
        return token

    def leave(self, token: int | None = None) -> None:
        """End the stretch of this token and all inside it."""
        stack = self._stack
        if not stack or (token is not None and stack[-1][0] < token):
            return
        if token is not None and stack[-1][0] != token and all(one[0] != token for one in stack):
            return  # ended already, and others have begun since
        top, phase, named_phase, names, queued = stack.pop()
        if token is not None and top != token:
            while stack and stack[-1][0] >= token:
                _, outer_phase, outer_named_phase, names, queued = stack.pop()
                if outer_phase:
                    phase, named_phase = outer_phase, outer_named_phase
        tracer = self._tracer
        if not stack:
            names = tracer.assumed
        if phase or names is not tracer.names:
            tracer.switch(phase, named_phase, names)
        tracer.queued = queued

    def ends_later(self, token: int) -> None:
        """Another call will leave this stretch."""
        self._naming.later[token] = self
        if not token & 1023:  # those that have ended are not kept forever
            later, opened = self._naming.later, {one[0] for one in self._stack}
            self._naming.later = {token: later[token] for token in later.keys() & opened}

    def _forget(self) -> None:
        """Stretches that nobody ends would fill the memory of the rank."""
        self.lower(f"more than {_MOST_OPEN} stretches were open at once: they are entered and never left")
        self._stack.clear()

    def _look_up(self, said: tuple[Any, ...]) -> tuple[int, Names | None]:
        try:
            return self._known[said]
        except (KeyError, TypeError):
            return self._merge(said)

    def _merge(self, said: tuple[Any, ...]) -> tuple[int, Names | None]:
        """The phase and the names of a stretch in which that is said; equal names are one object."""
        right, is_kept = checked(said, self.lower)
        merged = self._merged(right)
        if is_kept:
            if len(self._known) >= _MOST_NAMES:
                self._known.clear()
            self._known[said] = merged
        return merged

    def _merged(self, said: tuple[Any, ...]) -> tuple[int, Names | None]:
        outer, given, microbatch, stage, model_chunk, label, part, layer, schedule = said
        phase = 0 if given is None else self._phase(given)
        if not phase and said[2:] == _NOTHING:
            return 0, outer
        if outer is not None:
            if microbatch is None and stage is None and model_chunk is None and schedule is None:
                microbatch, stage, model_chunk = outer.microbatch, outer.stage, outer.model_chunk
                schedule = outer.schedule
            if part is None and not phase:
                part = outer.part
            layer = outer.layer if layer is None else layer
            label = outer.label if label is None else label
        self._naming.used.add(self._adapter)
        return phase, Names(label, microbatch, stage, model_chunk, part, layer, schedule, self._adapter)

    def _phase(self, given: Any) -> int:
        """The number of a phase; a word that is none counts as other."""
        number = _PHASES.get(given) if isinstance(given, str) else None
        if number is None:
            self.lower(f"there is no phase {given!r:.60}: there are {', '.join(_PHASES)}")
        return _OTHER if number is None else number

    def assume(self, *, microbatch: int | None = None, stage: int | None = None, layer: str | None = None) -> None:
        """Names for units outside of any stretch."""
        naming = self._naming
        if not naming.is_open:
            return
        names = None
        if not (microbatch is None and stage is None and layer is None):
            _, names = self._look_up((None, None, microbatch, stage, None, None, None, layer, None))
        self._tracer.assumed = names
        if not naming.stack:
            self._tracer.switch(0, 0, names)

    def next_units(self, names: Sequence[Mapping[str, int | str]]) -> None:
        """Names for the next communication units of the innermost stretch."""
        if not self._naming.is_open:
            return
        outer, queued = self._tracer.names, list[tuple[int, Names | None]]()
        try:
            for one in reversed(names):
                if not _FIELDS.issuperset(one):
                    unknown = ", ".join(sorted(map(str, _FIELDS.symmetric_difference(one) - _FIELDS)))
                    self.lower(f"next_units: there is no name {unknown}: there are {', '.join(FIELDS)}")
                queued.append(self._look_up((outer, *(one.get(field) for field in FIELDS))))
        except (AttributeError, TypeError) as error:
            self.lower(f"next_units: {error}")
            return
        self._tracer.queued = queued

    def note(self, column: str, value: Sequence[int] | Callable[[], Sequence[int]]) -> None:
        """Put a list of integers into a named column of the next unit."""
        if not self._naming.is_open:
            return
        try:
            check_note(column)
        except ValueError as error:
            self.lower(f"note: {error}")
            return
        self._tracer.note(column, value, self.lower)

    @property
    def is_scheduled(self) -> bool:
        """Whether an enclosing stretch says a microbatch or a stage."""
        stack, names = self._naming.stack, self._tracer.names
        return bool(stack) and names is not None and (names.microbatch is not None or names.stage is not None)

    @property
    def num_optimizer_steps(self) -> int:
        """How many steps of optimizers have ended so far."""
        return self._tracer.num_optimizer_steps

    @property
    def num_backward_passes(self) -> int:
        """How many backward passes have begun so far."""
        return self._tracer.num_backward_passes

    def part_of_group(self, group: str, *, part: str, phase: str) -> None:
        """What collectives of a group are in a phase, where nobody named them."""
        if self._is_text("part_of_group", group, part):
            self._tracer.parts_of_groups[(group, self._phase(phase))] = Names(part=part, adapter=self._adapter)

    def purposes(self, purposes: Mapping[str, str]) -> None:
        """What process groups are for, by their description or name."""
        for group, purpose in purposes.items():
            if self._is_text("purposes", group, purpose):
                self._naming.purposes[group] = checked_text(purpose)

    def _is_text(self, what: str, *values: Any) -> bool:
        """Whether these are texts; else the fidelity is lowered."""
        try:
            for value in values:
                checked_text(value)
        except (TypeError, ValueError) as error:
            self.lower(f"{what}: {error}")
            return False
        return True

    def coordinates(self, coordinates: Mapping[str, int]) -> None:
        """Where this rank is in the job."""
        axis: Any  # of a plugin that nobody checks
        for axis, at in coordinates.items():
            try:
                if not isinstance(axis, str) or not axis.isprintable() or not axis or set(axis) & set(",= "):
                    raise ValueError(f"{axis!r:.60} is no name of an axis")
                self._naming.coordinates[axis] = checked_index(at)
            except (TypeError, ValueError) as error:
                self.lower(f"coordinates: {error}")

    def watch(self, *, step_ends: Callable[[], None], group_begins: Callable[[], None]) -> None:
        """Calls at points of a run where time matters little."""
        self.watching.append((step_ends, group_begins))

    def option(self, name: str) -> str | None:
        """What the user asked of adapters."""
        self._naming.taken.add(name)
        return self._naming.options.get(name)

    def is_given(self, option: str) -> bool:
        """Whether the user asked that of adapters."""
        return option in self._naming.options

    def lower(self, reason: str) -> None:
        """Declare that names are not complete."""
        reasons = self._naming.lowered.setdefault(self._adapter, [])
        said = " ".join(str(reason).replace(";", ",").split())  # reasons are joined by semicolons, on one line
        if len(said) > _MOST_REASON:
            said = said[: _MOST_REASON - 3] + "..."
        if said not in reasons and len(reasons) <= _MOST_REASONS:
            reasons.append(said if len(reasons) < _MOST_REASONS else "and more")
