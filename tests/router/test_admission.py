"""When one more request may wait."""

from __future__ import annotations

import pytest

from router.admission import Admission
from router.errors import Unavailable
from router.messages import Load


def test_a_full_queue_refuses_and_a_free_batch_does_not() -> None:
    admission = Admission(max_num_seqs=4, max_num_queued_reqs=2, max_num_queued_tokens=0)
    admission.enter(10, Load(0, 4, 0.0))  # They wait for the next step, which has room for all.
    admission.enter(10, Load(1, 4, 0.0))
    admission.enter(10, Load(4, 1, 0.9))
    with pytest.raises(Unavailable, match="2 sequences wait, the limit is 2"):
        admission.enter(10, Load(2, 4, 0.0))
    with pytest.raises(Unavailable, match="2 sequences wait, the limit is 2"):
        admission.enter(10, Load(4, 2, 0.9))


def test_waiting_prompt_tokens_are_bounded_until_the_answers_begin() -> None:
    admission = Admission(max_num_seqs=4, max_num_queued_reqs=0, max_num_queued_tokens=100)
    first = admission.enter(60, Load(0, 0, 0.0))
    with pytest.raises(Unavailable, match="60 prompt tokens wait, the limit is 100"):
        admission.enter(41, Load(0, 1, 0.0))
    admission.enter(40, Load(0, 1, 0.0)).leave()
    first.leave()
    first.leave()
    assert admission.num_queued_tokens == 0


def test_a_prompt_over_the_bound_is_served_when_nothing_else_waits() -> None:
    admission = Admission(max_num_seqs=4, max_num_queued_reqs=0, max_num_queued_tokens=100)
    admission.enter(500, Load(0, 0, 0.0))


def test_zero_is_no_limit() -> None:
    admission = Admission(max_num_seqs=1, max_num_queued_reqs=0, max_num_queued_tokens=0)
    for waiting in range(1000):
        admission.enter(1000, Load(1, waiting, 1.0))
