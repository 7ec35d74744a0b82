"""The waiting queue: order, and that ended sequences do not pile up."""

from __future__ import annotations

import pytest

from router.sequence import Sequence, SequenceGroup
from router.stopping import StopChecker
from router.waiting import MAX_STALE, WaitingQueue
from tests.router.test_scheduler import Words, submission


def sequence(key: int, priority: int = 0) -> Sequence:
    request = submission(key, priority=priority)
    return Sequence(SequenceGroup(request), 0, StopChecker(request.stopping, Words()))


def test_the_head_is_the_lowest_priority_value_then_the_earliest() -> None:
    queue, order = WaitingQueue(), []
    for key, priority in [(1, 0), (2, 5), (3, 0), (4, -1)]:
        queue.push(sequence(key, priority))
    while (head := queue.head()) is not None:
        order.append(head.group.submission.key)
        queue.pop()
    assert order == [4, 1, 3, 2] and len(queue) == 0


def test_a_sequence_that_ended_while_it_waited_is_passed_over() -> None:
    queue, members = WaitingQueue(), [sequence(key) for key in (1, 2)]
    for member in members:
        queue.push(member)
    members[0].is_finished = True
    queue.leave()
    assert queue.head() is members[1] and len(queue) == 1
    queue.check_integrity([members[1]])


def test_ended_sequences_do_not_pile_up_behind_one_that_stays() -> None:
    queue, first = WaitingQueue(), sequence(0)
    queue.push(first)
    for key in range(1, 20 * MAX_STALE):
        member = sequence(key)
        queue.push(member)
        member.is_finished = True
        queue.leave()
        queue.check_integrity([first])


def test_the_integrity_check_sees_a_lost_sequence() -> None:
    queue, member = WaitingQueue(), sequence(1)
    queue.push(member)
    with pytest.raises(AssertionError, match="lost"):
        queue.check_integrity([])
