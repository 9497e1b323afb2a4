"""Where a sandbox rank is in its script: holds each call against the recorded one, and goes round in the last steps.

Responsible for what counts as the same operation and for the words when it is another; emulate.py gives times and
values.
"""

from __future__ import annotations

from prism_sdk.errors import BeyondRecordingError, TraceMismatchError
from prism_sdk.graph.plan import Stream
from prism_sdk.runtime.calls import Call
from prism_sdk.runtime.manifest import Expected, Script

Place = tuple[Stream, int, int]
"""An operation in a plan: its stream, its number there, and by how many rounds it lies beyond the recording."""


class Cursor:
    """Where the rank is in its script; beyond the recorded steps it goes round in the last ones."""

    def __init__(self, script: Script, file: str) -> None:
        """`file` is the graph that the script was read from, for messages."""
        self.script = script
        self._file = file
        self._position = 0
        self.rounds = 0  # how often it went back to the beginning of the round
        self.stand_ins: list[tuple[Place, Place]] = []
        """Of operations that were met, and what they stand for as well; not told to the engine yet."""
        self._left: TraceMismatchError | None = None  # where it was taken to end: what is wrong if it goes on
        self._num_skipped = 0  # recorded operations that it left out there
        self._num_resized = 0  # all-to-alls of other sizes than recorded
        self._first_resized = ""

    def next(self, call: Call, *, step: int) -> tuple[Expected, int]:
        """The expectation that `call` in `step` meets, and by how many payloads its own have moved on."""
        script = self.script
        self._go_round(call)
        if not self._meets(self._position, call):
            self._leave(call, self._mismatch(call, step))
        one = script.expected[self._position]
        self._position += 1
        if call.splits_in is not None and _sizes(call) != (one.num_elements_in, one.num_elements_out):
            self._num_resized += 1
            self._first_resized = self._first_resized or _resized(one, call)
        return one, self.rounds * script.items_per_round

    def _mismatch(self, call: Call, step: int) -> TraceMismatchError:
        script, position = self.script, self._position
        one = script.expected[position] if position < len(script.expected) else None
        wanted = "no further communication" if one is None else one.describe()
        unit_index = None if one is None else one.unit_index
        behind = position - script.round_end
        is_repeating = step > script.last_step and behind >= 0 and script.round_begin < script.round_end
        if not self.rounds and not is_repeating:
            error = TraceMismatchError(
                script.rank, unit_index=unit_index, expected=wanted, found=describe(call), file=self._file
            )
            if one is not None and _is_routed(call) and self._meets(position, call, of_any_size=True):
                error.hint = _OTHER_ROUTING
            return error
        if behind >= 0:
            again = script.round_begin + behind
            if again < script.round_end:
                one = script.expected[again]
                end = f" (or, at the job's end, {wanted})" if position < len(script.expected) else ""
                wanted, unit_index = one.describe() + end, one.unit_index
        return BeyondRecordingError(
            script.rank, step=step, last_step=script.last_step, num_repeated=script.steps_per_round,
            repeated_step=script.last_step if one is None else one.step, unit_index=unit_index, expected=wanted,
            found=describe(call), file=self._file,
        )  # fmt: skip

    @property
    def num_left(self) -> int:
        """Recorded operations that the program did not come to."""
        return 0 if self.rounds else len(self.script.expected) - self._position + self._num_skipped

    def _go_round(self, call: Call) -> None:
        """Behind the last whole step, go back to the round if the program trains on.

        What was recorded behind it is the end of the job, but may be the beginning of a step as well (a loss that is
        logged): as many operations as were met there are skipped in the round.
        """
        script = self.script
        behind = self._position - script.round_end
        if behind < 0 or script.round_begin == script.round_end or self._left is not None:
            return
        if self._meets(self._position, call) and not (self.rounds and behind == 0):
            return
        if self._meets(script.round_begin + behind, call):
            self._position = script.round_begin + behind
            self.rounds += 1
            for ordinal in range(behind):
                met = script.expected[script.round_end + ordinal]
                self._let_stand_in(met, 0, script.expected[script.round_begin + ordinal], self.rounds)

    def _leave(self, call: Call, error: TraceMismatchError) -> None:
        """A program may end after any step; what ends it may look like the beginning of the next one.

        So a call that is not what comes next may be one of those that ended the recorded job: go on there.

        Raises:
            TraceMismatchError: ``error``, if it is none; if the program goes on after all, that of where it did not.
        """
        expected, at, end = self.script.expected, self._position, self.script.round_end
        self._left = self._left or error
        place = next((i for i in range(max(at, end), len(expected)) if self._meets(i, call)), None)
        if not at or place is None:
            raise self._left
        left_out = expected[max(at, end) if self.rounds else at : place]
        last = next((one for one in reversed(expected[:at]) if one.stream is not None), None)
        if last is not None:  # the end waits for what was recorded before it, also for what this rank leaves out
            for one in left_out:
                self._let_stand_in(last, self.shift_of(last), one, 0)
        self._num_skipped += place - at
        self._position = place

    def _let_stand_in(self, met: Expected, met_rounds: int, meant: Expected, rounds: int) -> None:
        if met.stream is not None and meant.stream is not None:
            self.stand_ins.append(((met.stream, met.seq, met_rounds), (meant.stream, meant.seq, rounds)))

    def resized(self) -> dict[str, object]:
        """For the metadata: how many all-to-alls had other sizes than recorded, and the first of them."""
        first = {"first_all_to_all_resized": self._first_resized} if self._num_resized else {}
        return {"all_to_alls_resized": self._num_resized, **first}

    def shift_of(self, one: Expected) -> int:
        """By how many rounds an operation lies beyond the recorded one that stands for it."""
        return self.rounds if self.script.is_of_round(one.step) else 0

    def step_of(self, one: Expected) -> int:
        """The step that an operation is of, whose recorded one may stand for it."""
        return one.step + self.shift_of(one) * self.script.steps_per_round

    def _meets(self, position: int, call: Call, *, of_any_size: bool = False) -> bool:
        if position >= len(self.script.expected):
            return False
        one = self.script.expected[position]
        group = call.group
        peer = call.other_rank
        if one.op is not call.op or one.group_ranks != group.ranks or one.dtype != call.dtype:
            return False
        if one.reduce_op != call.reduce_op or (peer is not None and group.ranks[peer] != one.peer):
            return False
        if call.is_p2p and one.tag != (call.tag or 0):
            return False
        if call.splits_in is not None:  # routed tokens may differ from step to step, and from replica to replica
            if of_any_size or self.rounds > 0 or (self.script.stood_for_by is not None and _is_routed(call)):
                return True
            return one.num_elements_in == call.num_elements_in
        if one.size_may_differ:
            return True
        return one.num_elements_in == call.num_elements_in and one.num_elements_out == call.num_elements_out


_OTHER_ROUTING = (
    "the sizes of an all-to-all with splits follow from data: this rank routed its tokens otherwise than in the "
    "recording, by other data, another seed, other weights or another --moe-skew. Run what was recorded, or record it "
    "again: prism record"
)


def _is_routed(call: Call) -> bool:
    """Whether the program said how many elements each member gets, so that members may send different numbers."""
    return call.splits_in is not None and not call.equal_counts


def _sizes(call: Call) -> tuple[int, int]:
    return call.num_elements_in, call.num_elements_out


def _resized(one: Expected, call: Call) -> str:
    now, then = _sizes(call), (one.num_elements_in, one.num_elements_out)
    return f"unit {one.unit_index} of step {one.step}: {now[0]} to {now[1]} elements, recorded {then[0]} to {then[1]}"


def describe(call: Call) -> str:
    """A call in the words of `Expected.describe`."""
    peer = call.other_rank
    group = call.group
    return Expected(
        0, 0, call.op, call.reduce_op, call.dtype, 0, group.ranks, 0, None if peer is None else group.ranks[peer], 0,
        call.num_elements_in, call.num_elements_out, None,
    ).describe()  # fmt: skip
