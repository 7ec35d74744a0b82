"""A sequence's tokens, seeds and opening, and a request's timing."""

from __future__ import annotations

import pytest

from router.messages import OutputParams, SamplingParams, StoppingParams, Submission
from router.sequence import Sequence, SequenceGroup, member_seed
from router.step import OpenRow
from router.stopping import StopChecker
from tests.router.test_scheduler import Words


def group(n: int = 1, **fields: object) -> SequenceGroup:
    values = {"sampling": SamplingParams(0.5, 3, 0.9, 42), "stopping": StoppingParams(max_tokens=3), **fields}
    made = SequenceGroup(Submission(7, "r", (10, 11, 12), n=n, arrival_s=100.0, **values))  # type: ignore[arg-type]
    made.members += [Sequence(made, index, StopChecker(made.submission.stopping, Words())) for index in range(n)]
    return made


@pytest.mark.parametrize(("start", "stop"), [(start, stop) for stop in range(6) for start in range(stop + 1)])
def test_tokens_run_over_the_border_between_prompt_and_answer(start: int, stop: int) -> None:
    sequence = group().members[0]
    sequence.output_token_ids = [20, 21]
    assert sequence.tokens(start, stop) == (10, 11, 12, 20, 21)[start:stop]
    assert (sequence.num_prompt_tokens, sequence.num_tokens) == (3, 5)


def test_tokens_on_their_way_count_against_max_tokens() -> None:
    sequence = group().members[0]
    sequence.output_token_ids, sequence.num_pending_samples = [20], 1
    assert sequence.can_sample
    sequence.num_pending_samples = 2
    assert not sequence.can_sample


def test_the_opening_carries_the_prompts_border_also_when_generated_tokens_are_replayed() -> None:
    sequence = group(output=OutputParams(num_logprobs=4)).members[0]
    sequence.output_token_ids = [20, 21]
    assert sequence.opening(5) == OpenRow(5, 3, 42, 0.5, 3, 0.9, 0, 4, ())


def test_stop_ids_are_sent_only_where_min_tokens_forbids_them() -> None:
    ids = {"stop_token_ids": frozenset({9, 4}), "eos_token_ids": frozenset({2})}
    for min_tokens, sent in [(0, ()), (1, (2, 4, 9))]:
        sequence = group(stopping=StoppingParams(max_tokens=3, min_tokens=min_tokens, **ids)).members[0]
        assert (sequence.opening(0).stop_ids, sequence.opening(0).min_tokens) == (sent, min_tokens)


def test_member_0_has_the_requests_seed_and_the_others_seeds_of_64_bits_of_their_own() -> None:
    for seed in (0, 1, 2**64 - 1):
        seeds = [member_seed(seed, index) for index in range(100)]
        assert seeds[0] == seed and len(set(seeds)) == 100 and all(0 <= other < 2**64 for other in seeds)


def test_member_seeds_are_splitmix64s_outputs() -> None:
    # The generator's published outputs for the state 1234567; https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [member_seed(1234567, index) for index in (1, 2, 3)] == published


def test_timing_splits_the_request_at_its_first_step_and_its_first_token() -> None:
    made = group(n=2)
    made.first_scheduled_s, made.first_token_s = 101.0, 103.0
    made.members[0].output_token_ids, made.members[1].output_token_ids = [1, 2], [3]
    done = made.done(now_s=110.0)
    timing = done.timing
    assert (timing.queue_s, timing.prefill_s, timing.decode_s) == (1.0, 2.0, 7.0)
    assert (timing.time_to_first_token_s, timing.e2e_s) == (3.0, 10.0)
    assert (done.prompt_tokens, done.completion_tokens, done.cached_tokens) == (3, 3, 0)
