"""The inner loops of the simulator, written so that numba can compile them and plain Python can run them.

It knows nothing of files, names or errors: arrays in, arrays filled. What the numbers mean is written in ``job``.
"""

from __future__ import annotations

from typing import Any

from prism_sdk.simulate.compiling import compiled, helper

__all__ = ["chain", "localise", "run", "walk_rank"]

# the kinds of PrismTrace units, as plain numbers for the compiler
COMPUTE, COLLECTIVE, SEND, RECV, WAIT = 1, 2, 3, 4, 5
#: What ``walk_rank`` adds up, by column of ``totals``.
HOST_GAP, IDLE_MESSAGE, IDLE_COLLECTIVE, EXPOSED_MESSAGE, EXPOSED_COLLECTIVE, MOVED_MESSAGE, MOVED_COLLECTIVE, BUSY = (
    0, 1, 2, 3, 4, 5, 6, 7,
)  # fmt: skip
NUM_TOTALS = 16  # BUSY + phase (0 to 7) are the last ones
_CHECK_MASK = 0xFFFFFFFFFFFF


@compiled
def localise(
    kind: Any, group: Any, peer: Any, tag: Any, seq: Any, awaits: Any, first_index: int,
    lane_of: Any, ordinal: Any, awaited: Any, hold: Any, last_wait: Any, free: Any,
    lane_row: Any, lane_count: Any, lane_check: Any, table: Any,
) -> tuple[int, int, int]:  # fmt: skip
    """Turn the columns of one rank into a program: lanes, ordinals in them, awaited rows, places for completions.

    A lane is what counts one sequence: a group's collectives, or messages of one kind to or from one peer with one tag.
    ``table`` is all -1 and at least twice as long as there are lanes. Returns the number of lanes, the number of places
    and -1; or a row that is wrong in place of the last.
    """
    num_lanes = 0
    size = len(table)
    for i in range(len(kind)):
        k = kind[i]
        awaited[i] = -1
        hold[i] = -1
        last_wait[i] = -1
        lane_of[i] = -1
        ordinal[i] = -1
        if k == COMPUTE:
            continue
        if k == WAIT:
            j = awaits[i] - first_index
            if j < 0:
                continue  # waits for nothing known: an absent reference, or a row before the first one read
            if j >= i or kind[j] == COMPUTE or kind[j] == WAIT:
                return 0, 0, i
            awaited[i] = j
            last_wait[j] = i
            continue
        at = (group[i] * 31 + k) % size
        if k != COLLECTIVE:  # the root of a collective does not make a lane of its own
            at = (at + peer[i] * 17 + tag[i] * 7) % size
        while table[at] >= 0:
            other = lane_row[table[at]]
            if kind[other] == k and group[other] == group[i] and (
                k == COLLECTIVE or (peer[other] == peer[i] and tag[other] == tag[i])
            ):  # fmt: skip
                break
            at = (at + 1) % size
        if table[at] < 0:
            if 2 * num_lanes + 2 > size:
                return -1, 0, -1  # more lanes than the table holds
            table[at] = num_lanes
            lane_row[num_lanes] = i
            lane_count[num_lanes] = 0
            lane_check[num_lanes] = 0
            num_lanes += 1
        lane = table[at]
        lane_of[i] = lane
        ordinal[i] = lane_count[lane]
        lane_count[lane] += 1
        lane_check[lane] = (lane_check[lane] * 31 + seq[i]) & _CHECK_MASK
    num_holds = 0
    num_free = 0
    for i in range(len(kind)):
        j = awaited[i]
        if j >= 0:
            if last_wait[j] == i:
                free[num_free] = hold[j]
                num_free += 1
        elif last_wait[i] >= 0:
            if num_free:
                num_free -= 1
                hold[i] = free[num_free]
            else:
                hold[i] = num_holds
                num_holds += 1
    return num_lanes, num_holds, -1


@helper
def stretched(start: int, work: int, begin: int, end: int, from_ns: Any, factor: Any) -> int:
    """How long ``work`` takes that begins at ``start`` where speeds change over time; segments ``begin`` to ``end``."""
    at = start
    left = float(work)
    for s in range(begin, end):
        if s + 1 < end and from_ns[s + 1] <= at:
            continue
        slow = factor[s] if from_ns[s] <= at else 1.0
        until = from_ns[s + 1] if s + 1 < end else -1
        if from_ns[s] > at:  # before the first segment
            span = from_ns[s] - at
            if left <= span:
                return int(at + left + 0.5) - start
            left -= span
            at = from_ns[s]
            slow = factor[s]
        if until < 0 or left * slow <= until - at:
            return int(at + left * slow + 0.5) - start
        left -= (until - at) / slow
        at = until
    return int(at + left + 0.5) - start


@compiled
def run(
    kind: Any, lane_of: Any, ordinal: Any, awaited: Any, hold: Any, bound: Any,
    main: Any, side: Any,
    program_begin: Any, program_end: Any, bound_begin: Any, bound_end: Any, weight_base: Any, lane_begin: Any,
    lane_event: Any,
    hold_begin: Any, step_begin: Any, scale: Any, slow_begin: Any, slow_from: Any, slow_factor: Any,
    remaining: Any, arrival: Any, last: Any, done: Any, chained: Any,
    clock: Any, cursor: Any, held: Any, head: Any, link: Any, stack: Any, next_bound: Any, step_end: Any,
    num_collectives: int,
) -> int:  # fmt: skip
    """Run every rank until it must wait, and take it up again when what it waits for is there. Linear in the units.

    Returns how many ranks came to their end.
    """
    num_ranks = len(clock)
    finished = 0
    top = 0
    for r in range(num_ranks - 1, -1, -1):
        stack[top] = r
        top += 1
    while top:
        top -= 1
        r = stack[top]
        base = program_begin[r]
        end = program_end[r]
        shift = weight_base[r] - base
        lanes = lane_begin[r]
        holds = hold_begin[r]
        bounds = bound_begin[r]
        factor = scale[r]
        slow_a = slow_begin[r]
        slow_b = slow_begin[r + 1]
        i = cursor[r]
        now = clock[r]
        nb = next_bound[r]
        blocked = False
        while i < end:
            k = kind[i]
            w = i + shift
            if k == COMPUTE:
                work = main[w]
                if factor != 1.0:
                    work = int(work * factor + 0.5)
                if slow_b > slow_a:
                    work = stretched(now + side[w], work, slow_a, slow_b, slow_from, slow_factor)
                now += side[w] + work
            elif k == WAIT:
                until = now + main[w]
                j = awaited[i]
                if j >= 0:
                    j += base
                    v = j + shift
                    if kind[j] == SEND or main[v] < 0:
                        complete = held[holds + hold[j]]
                    else:
                        e = lane_event[lanes + lane_of[j]] + ordinal[j]
                        if remaining[e] > 0:
                            link[r] = head[e]
                            head[e] = r
                            blocked = True
                            break
                        complete = arrival[e] + main[v]
                    complete += side[w]
                    if complete > until:
                        until = complete
                now = until
            else:
                posted = now + side[w]
                e = lane_event[lanes + lane_of[i]] + ordinal[i]
                if posted > arrival[e]:
                    arrival[e] = posted
                    last[e] = r
                moved = main[w]
                if moved < 0:
                    if hold[i] >= 0:
                        held[holds + hold[i]] = posted - moved - 1
                elif k == SEND and hold[i] >= 0:
                    held[holds + hold[i]] = posted + moved
                if e < num_collectives and moved > done[e]:
                    done[e] = moved
                remaining[e] -= 1
                if remaining[e] == 0:
                    if e < num_collectives:
                        if chained[e] and ordinal[i] > 0:
                            before = done[e - 1]
                            if before > arrival[e]:
                                arrival[e] = before
                                last[e] = -2
                        done[e] += arrival[e]
                    w2 = head[e]
                    while w2 >= 0:
                        stack[top] = w2
                        top += 1
                        w2 = link[w2]
            i += 1
            if nb < bound_end[r] and i - base == bound[nb]:
                step_end[step_begin[r] + nb - bounds] = now
                nb += 1
        cursor[r] = i
        clock[r] = now
        next_bound[r] = nb
        if not blocked:
            finished += 1
    return finished


@compiled
def walk_rank(
    kind: Any, phase: Any, lane_of: Any, ordinal: Any, awaited: Any, hold: Any,
    main: Any, side: Any, begin: int, end: int, weight: int, lanes: int, lane_event: Any,
    slow_a: int, slow_b: int, slow_from: Any, slow_factor: Any, factor: float, now: int,
    arrival: Any, last: Any, held: Any, complete_ns: Any, is_shared: int,
    start_ns: Any, end_ns: Any, count_from: int, count_to: int, totals: Any, blame: Any, keep: int,
) -> int:  # fmt: skip
    """Go through the rows of one rank once more with the arrivals known; fill its times, or only add up.

    Returns the host clock after the last row. Idle: the host waits for a rank that has not arrived. Exposed: it waits
    while data moves. What it takes to go on when the data is there is a gap of the host. ``blame`` gets the idle time
    by the rank that arrived last. ``complete_ns`` has the completions of the rows where links were shared
    (``is_shared``).
    """
    shift = weight - begin
    for i in range(begin, end):
        k = kind[i]
        w = i + shift
        at = i - begin
        counts = count_from <= at < count_to
        if k == COMPUTE:
            work = main[w]
            if factor != 1.0:
                work = int(work * factor + 0.5)
            if slow_b > slow_a:
                work = stretched(now + side[w], work, slow_a, slow_b, slow_from, slow_factor)
            started = now + side[w]
            now = started + work
            if keep:
                start_ns[at] = started
                end_ns[at] = now
            if counts:
                totals[HOST_GAP] += side[w]
                totals[BUSY + phase[i]] += work
        elif k == WAIT:
            started = now
            now += main[w]
            j = awaited[i]
            if j >= 0:
                j += begin
                v = j + shift
                is_own = kind[j] == SEND or main[v] < 0
                ready = started
                guilty = -1
                e = -1
                if is_own:
                    complete = held[hold[j]]
                else:
                    e = lane_event[lanes + lane_of[j]] + ordinal[j]
                    ready = arrival[e]
                    guilty = last[e]
                    complete = complete_ns[j - begin] if is_shared else ready + main[v]
                if complete + side[w] > now:
                    now = complete + side[w]
                if counts:
                    there = max(min(complete, now), started)
                    until = min(max(ready, started), there)
                    exposed = there - until
                    row = j
                    while guilty == -2 and until > started:
                        # the collective before it in the group was not complete: its transfer here is exposed, too
                        row -= 1
                        while lane_of[row] != lane_of[j]:
                            row -= 1
                        e -= 1
                        ended = complete_ns[row - begin] if is_shared else arrival[e] + main[row + shift]
                        exposed += max(min(ended, until) - max(arrival[e], started), 0)
                        until = min(max(arrival[e], started), until)
                        guilty = last[e]
                    if kind[j] == COLLECTIVE:
                        totals[IDLE_COLLECTIVE] += there - started - exposed
                        totals[EXPOSED_COLLECTIVE] += exposed
                    else:
                        totals[IDLE_MESSAGE] += there - started - exposed
                        totals[EXPOSED_MESSAGE] += exposed
                    totals[HOST_GAP] += now - there
                    if guilty >= 0:
                        blame[guilty] += until - started
            elif counts:
                totals[HOST_GAP] += now - started
            if keep:
                start_ns[at] = started
                end_ns[at] = now
        else:
            posted = now + side[w]
            ready = posted
            if main[w] < 0 or k == SEND:
                complete = posted - main[w] - 1 if main[w] < 0 else posted + main[w]
                if hold[i] >= 0:
                    held[hold[i]] = complete
            else:
                ready = arrival[lane_event[lanes + lane_of[i]] + ordinal[i]]
                complete = complete_ns[at] if is_shared else ready + main[w]
            if counts:
                if k == COLLECTIVE:
                    totals[MOVED_COLLECTIVE] += complete - ready
                else:
                    totals[MOVED_MESSAGE] += complete - ready
            if keep:
                start_ns[at] = posted
                end_ns[at] = complete
    return now


@compiled
def chain(arrival: Any, completed: Any, chained: Any, ready: Any, num_collectives: int) -> int:
    """Note when each collective starts: at its last post, and where it is chained not before the one before it ends.

    ``run`` has the same rule. Returns no news.
    """
    done = 0
    for e in range(num_collectives):
        at = arrival[e]
        if chained[e] and done > at:
            at = done
        ready[e] = at
        done = max(at, completed[e])
    return 0
