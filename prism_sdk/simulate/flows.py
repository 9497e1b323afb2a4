"""The inner loop for jobs whose transfers share links: a simulation in order of time. Numba compiles it.

It knows nothing of files, clusters or errors: arrays in, arrays filled. The model is written in ``links``.
"""

from __future__ import annotations

from typing import Any

from prism_sdk.simulate.compiling import compiled, helper
from prism_sdk.simulate.kernel import COMPUTE, SEND, WAIT, stretched

__all__ = ["ONE", "run_shared"]

#: The whole of a link. Demands are whole parts of it, so that sums have no rounding.
ONE = 1 << 30
#: Completions that are not known yet are ``OPEN`` plus the transfer.
OPEN = -(1 << 62)
_OPEN_BELOW = -(1 << 61)
# states of an event
_NEW, _HELD, _READY, _ACTIVE, _FINISHED = 0, 1, 2, 3, 4


@helper
def is_before(a: int, b: int, key: Any) -> bool:
    """Whether event ``a`` comes before ``b``: by time, then by number."""
    return key[a] < key[b] or (key[a] == key[b] and a < b)


@helper
def sift(at: int, size: int, heap: Any, place: Any, key: Any) -> None:
    """Move the event at ``at`` of a heap up or down to where it belongs."""
    event = heap[at]
    while at > 0 and is_before(event, heap[(at - 1) // 2], key):
        heap[at] = heap[(at - 1) // 2]
        place[heap[at]] = at
        at = (at - 1) // 2
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and is_before(heap[child + 1], heap[child], key):
            child += 1
        if not is_before(heap[child], event, key):
            break
        heap[at] = heap[child]
        place[heap[at]] = at
        at = child
    heap[at] = event
    place[event] = at


@helper
def put(event: int, time: int, size: int, heap: Any, place: Any, key: Any) -> int:
    """Enter an event, or give one that is in the heap another time; returns the size of the heap."""
    key[event] = time
    if place[event] < 0:
        heap[size] = event
        place[event] = size
        size += 1
    sift(place[event], size, heap, place, key)
    return size


@helper
def best_rate(event: int, lane: int, demand: Any, first_link: Any, first_network: Any, links: Any, load: Any) -> float:
    """What the fullest link of a transfer lets it have, of the rate that it has alone."""
    fullest = ONE
    if demand[2 * event] > 0:
        for a in range(first_link[lane], first_network[lane]):
            if load[links[a]] > fullest:
                fullest = load[links[a]]
    if demand[2 * event + 1] > 0:
        for a in range(first_network[lane], first_link[lane + 1]):
            if load[links[a]] > fullest:
                fullest = load[links[a]]
    return ONE / fullest


@helper
def set_rate(
    event: int, rate: float, now: int, rates: Any, progress: Any, since: Any, front: Any, complete: Any,
    size: int, heap: Any, place: Any, key: Any,
) -> int:  # fmt: skip
    """Go on at another rate from ``now`` on, and say when the next member is complete; returns the size of the heap."""
    progress[event] += (now - since[event]) * rates[event]
    since[event] = now
    rates[event] = rate
    left = (complete[front[event]] - OPEN - progress[event]) / rate
    whole = int(left)
    if left - whole > 1e-6:
        whole += 1
    return put(event, now + max(whole, 0), size, heap, place, key)


@compiled
def run_shared(
    kind: Any, op: Any, num_bytes: Any, lane_of: Any, ordinal: Any, awaited: Any, bound: Any, main: Any, side: Any,
    program_begin: Any, program_end: Any, bound_begin: Any, bound_end: Any, weight_base: Any, lane_begin: Any,
    lane_event: Any, lane_number: Any, unit_begin: Any, step_begin: Any,
    scale: Any, slow_begin: Any, slow_from: Any, slow_factor: Any,
    remaining: Any, arrival: Any, last: Any, chained: Any, clock: Any, cursor: Any, next_bound: Any, step_end: Any,
    stack: Any, waits_for: Any, complete: Any, behind: Any,
    front: Any, state: Any, heap: Any, place: Any, key: Any, lane_at: Any, wire: Any, demand: Any, alone: Any,
    rates: Any, progress: Any, since: Any, finish: Any, next_flow: Any, flows: Any, seen: Any,
    per_byte: Any, lane_kind: Any, num_ops: int, first_link: Any, first_network: Any, links: Any, load: Any,
    first_user: Any, users: Any, num_collectives: int,
) -> int:  # fmt: skip
    """Run all ranks, and the transfers that they post, in order of time. Returns how many ranks came to their end.

    ``complete`` gets the completions of communication units by ``unit_begin`` and row; ``finish`` those of events.
    """
    num_ranks = len(clock)
    finished = 0
    size = 0
    stamp = 0
    top = 0
    for r in range(num_ranks - 1, -1, -1):
        stack[top] = r
        top += 1
    while True:
        while top:
            top -= 1
            r = stack[top]
            base = program_begin[r]
            end = program_end[r]
            shift = weight_base[r] - base
            lanes = lane_begin[r]
            slots = unit_begin[r] - base
            factor = scale[r]
            i = cursor[r]
            now = clock[r]
            nb = next_bound[r]
            waits_for[r] = -1
            while i < end:
                k = kind[i]
                w = i + shift
                if k == COMPUTE:
                    work = main[w]
                    if factor != 1.0:
                        work = int(work * factor + 0.5)
                    if slow_begin[r + 1] > slow_begin[r]:
                        work = stretched(now + side[w], work, slow_begin[r], slow_begin[r + 1], slow_from, slow_factor)
                    now += side[w] + work
                elif k == WAIT:
                    until = now + main[w]
                    if awaited[i] >= 0:
                        slot = slots + base + awaited[i]
                        if complete[slot] < _OPEN_BELOW:
                            waits_for[r] = slot
                            break
                        until = max(until, complete[slot] + side[w])
                    now = until
                else:
                    posted = now + side[w]
                    e = lane_event[lanes + lane_of[i]] + ordinal[i]
                    lane_at[e] = lane_number[lanes + lane_of[i]]
                    if posted > arrival[e]:
                        arrival[e] = posted
                        last[e] = r
                    slot = slots + i
                    moved = main[w]
                    if moved < 0:
                        complete[slot] = posted - moved - 1
                    elif k == SEND:
                        complete[slot] = posted + moved
                    else:
                        complete[slot] = OPEN + moved
                        # members in order of their transfers; mostly all are equal
                        at = front[e]
                        if at < 0 or complete[at] >= complete[slot]:
                            behind[slot] = at
                            front[e] = slot
                        else:
                            while behind[at] >= 0 and complete[behind[at]] < complete[slot]:
                                at = behind[at]
                            behind[slot] = behind[at]
                            behind[at] = slot
                        if moved > alone[e]:
                            alone[e] = moved
                        if num_bytes[i] > 0:
                            which = 2 * (lane_kind[lane_at[e]] * num_ops + min(op[i], num_ops - 1))
                            wire[2 * e] = max(wire[2 * e], per_byte[which] * num_bytes[i])
                            wire[2 * e + 1] = max(wire[2 * e + 1], per_byte[which + 1] * num_bytes[i])
                    remaining[e] -= 1
                    if remaining[e] == 0:
                        state[e] = _READY
                        if e < num_collectives and chained[e] and ordinal[i] > 0:
                            if state[e - 1] != _FINISHED:
                                state[e] = _HELD
                            elif finish[e - 1] > arrival[e]:
                                arrival[e] = finish[e - 1]
                                last[e] = -2
                        if state[e] == _READY:
                            size = put(e, arrival[e], size, heap, place, key)
                i += 1
                if nb < bound_end[r] and i - base == bound[nb]:
                    step_end[step_begin[r] + nb - bound_begin[r]] = now
                    nb += 1
            cursor[r] = i
            clock[r] = now
            next_bound[r] = nb
            if i == end:
                finished += 1
        if size == 0:
            break
        e = heap[0]
        time = key[e]
        lane = lane_at[e]
        if state[e] == _READY:
            state[e] = _ACTIVE
            since[e] = time
            rates[e] = 1.0
            if alone[e] > 0:
                for part in range(2):
                    demand[2 * e + part] = min(ONE, int(ONE * wire[2 * e + part] / alone[e] + 0.5))
                next_flow[e] = flows[lane]
                flows[lane] = e
                for a in range(first_link[lane], first_link[lane + 1]):
                    amount = demand[2 * e] if a < first_network[lane] else demand[2 * e + 1]
                    load[links[a]] += amount
                    if amount == 0 or load[links[a]] <= ONE:
                        continue
                    # a link that has less than all ask for: who is faster than it allows becomes slower
                    allowed = ONE / load[links[a]]
                    for b in range(first_user[links[a]], first_user[links[a] + 1]):
                        other = flows[users[b] // 2]
                        while other >= 0:
                            if other != e and demand[2 * other + users[b] % 2] > 0 and rates[other] > allowed:
                                size = set_rate(other, allowed, time, rates, progress, since, front, complete,
                                                size, heap, place, key)  # fmt: skip
                            other = next_flow[other]
                rates[e] = best_rate(e, lane, demand, first_link, first_network, links, load)
            if front[e] >= 0:
                size = set_rate(e, rates[e], time, rates, progress, since, front, complete, size, heap, place, key)
                continue
        # the next member, and those that are equal to it, are complete
        if front[e] >= 0:
            reached = complete[front[e]] - OPEN
            progress[e] = float(reached)
            since[e] = time
            while front[e] >= 0 and complete[front[e]] - OPEN <= reached:
                slot = front[e]
                complete[slot] = time
                low = 0
                high = num_ranks
                while high - low > 1:
                    middle = (low + high) // 2
                    if unit_begin[middle] <= slot:
                        low = middle
                    else:
                        high = middle
                if waits_for[low] == slot:
                    stack[top] = low
                    top += 1
                front[e] = behind[slot]
        if front[e] >= 0:
            size = set_rate(e, rates[e], time, rates, progress, since, front, complete, size, heap, place, key)
            continue
        # all members are: leave the heap and the links
        size -= 1
        moved_up = heap[size]
        place[e] = -1
        if moved_up != e:
            at = 0
            heap[at] = moved_up
            place[moved_up] = at
            sift(at, size, heap, place, key)
        state[e] = _FINISHED
        finish[e] = time
        if alone[e] > 0:
            if flows[lane] == e:
                flows[lane] = next_flow[e]
            else:
                other = flows[lane]
                while next_flow[other] != e:
                    other = next_flow[other]
                next_flow[other] = next_flow[e]
            for a in range(first_link[lane], first_link[lane + 1]):
                load[links[a]] -= demand[2 * e] if a < first_network[lane] else demand[2 * e + 1]
            stamp += 1
            for a in range(first_link[lane], first_link[lane + 1]):
                for b in range(first_user[links[a]], first_user[links[a] + 1]):
                    other_lane = users[b] // 2
                    if seen[other_lane] == stamp:
                        continue
                    seen[other_lane] = stamp
                    other = flows[other_lane]
                    while other >= 0:
                        if rates[other] < 1.0:
                            rate = best_rate(other, other_lane, demand, first_link, first_network, links, load)
                            if rate != rates[other]:
                                size = set_rate(other, rate, time, rates, progress, since, front, complete,
                                                size, heap, place, key)  # fmt: skip
                        other = next_flow[other]
        if e + 1 < num_collectives and state[e + 1] == _HELD:
            state[e + 1] = _READY
            if time > arrival[e + 1]:
                arrival[e + 1] = time
                last[e + 1] = -2
            size = put(e + 1, arrival[e + 1], size, heap, place, key)
    return finished
