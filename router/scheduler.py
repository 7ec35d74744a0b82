"""Who computes what in the next step, and what a step's answer means for whom.

Waiting sequences stand in a queue, running ones (those that hold a slot) in a list, both in order of priority, then
arrival. Each step, running rows that generate take one token of the budget each; then running prompts, then waiting
ones, fill the rest in chunks. A sequence gets the blocks of all its known tokens when it starts, and one more whenever
it grows into it; when none is free the last running sequence is preempted: it gives up slot and blocks and waits, with
its tokens, to be computed again. Steps are sent before the answers of earlier ones are here, see `Sequence`; a block or
slot given up is reused at once, because the shards run steps in order. A sequence whose adapter has no place is parked
beside the queue, see `AdapterPlaces`.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable

from router.adapter_places import AdapterPlaces
from router.detokenizer import Detokenizer
from router.errors import Cancelled, DeadlineExceeded, InternalError, RequestError, ResourceExhausted, Unavailable
from router.messages import Event, Load, RequestFailed, SequenceDelta, Submission
from router.places import Places
from router.sequence import Sequence, SequenceGroup
from router.step import FillTokens, RowResult, ScheduledRow, ShardInfo, Step, StepResult
from router.stopping import StopChecker
from router.tally import Tally
from router.waiting import MAX_STALE, WaitingQueue

MakeDetokenizer = Callable[[bool], Detokenizer]


class Scheduler:
    """Synchronous, without I/O; times are time.monotonic() seconds, handed in."""

    def __init__(
        self, info: ShardInfo, make_detokenizer: MakeDetokenizer, adapters: AdapterPlaces | None = None
    ) -> None:
        """`make_detokenizer(skip_special_tokens)` gives each sequence its own; `adapters` None: LoRA is off."""
        self._info = info
        self._make_detokenizer = make_detokenizer
        self._places = Places(info)
        self._adapters = adapters or AdapterPlaces()
        self._groups: dict[int, SequenceGroup] = {}
        self._waiting = WaitingQueue()
        self._deadlines: list[tuple[float, int]] = []
        self._unanswered: collections.deque[tuple[Step, list[Sequence]]] = collections.deque()
        self._last_step_id = 0
        self._tally = Tally()

    @property
    def max_kv_tokens(self) -> int:
        """Most tokens that one sequence can hold in the pool."""
        return self._places.max_kv_tokens

    @property
    def num_unanswered_steps(self) -> int:
        """Steps sent whose results are not here."""
        return len(self._unanswered)

    @property
    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do next, at the earliest."""
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def is_idle(self) -> bool:
        """Whether there is no request and no step under way."""
        return not self._groups and not self._unanswered

    def load(self) -> Load:
        """How busy we are."""
        num_waiting = len(self._waiting) + self._adapters.num_parked
        return Load(len(self._places.running), num_waiting, self._places.usage)

    def take_tally(self) -> Tally:
        """What happened since the last call."""
        tally, self._tally = self._tally, Tally()
        return tally

    def add(self, submission: Submission) -> None:
        """Takes a request that validation found to fit."""
        num_tokens = len(submission.prompt_token_ids) + submission.stopping.max_tokens
        assert submission.prompt_token_ids and submission.stopping.max_tokens >= 1 and submission.n >= 1
        assert num_tokens <= min(self._info.max_model_len, self.max_kv_tokens), "validation lets in what fits"
        group = SequenceGroup(submission)
        self._groups[submission.key] = group
        for index in range(submission.n):
            detokenizer = self._make_detokenizer(submission.output.skip_special_tokens)
            member = Sequence(group, index, StopChecker(submission.stopping, detokenizer))
            group.members.append(member)
            self._adapters.add(member)
            self._waiting.push(member)
        if submission.deadline_s is not None:
            heapq.heappush(self._deadlines, (submission.deadline_s, submission.key))

    def cancel(self, key: int) -> list[Event]:
        """Ends a request whose caller went away; unknown and ended ones are no error."""
        group = self._groups.get(key)
        return self._fail(group, Cancelled("the caller cancelled")) if group else []

    def expire(self, now_s: float) -> list[Event]:
        """Ends the requests whose deadline has passed, waiting or running."""
        events: list[Event] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, key = heapq.heappop(self._deadlines)
            if group := self._groups.get(key):
                events += self._fail(group, DeadlineExceeded("the deadline passed before the answer was complete"))
        return events

    def fail_adapter(self, version: str, error: RequestError) -> list[Event]:
        """Ends the requests that wait for an adapter which could not be loaded."""
        groups = [group for group in self._groups.values() if group.waits_for(version)]
        return [event for group in groups for event in self._fail(group, error)]

    def fail_all(self, message: str) -> list[Event]:
        """Ends every request with UNAVAILABLE: the shards are gone, and with them the steps under way."""
        events = [event for group in list(self._groups.values()) for event in self._fail(group, Unavailable(message))]
        self._unanswered.clear()
        return events

    # Scheduling.

    def schedule(self, now_s: float) -> Step | None:
        """The next step to send, or None when nothing can be computed before an answer or a request comes."""
        step = Step(self._last_step_id + 1)
        rows: list[Sequence] = []
        budget = self._schedule_decodes(step, rows, self._info.max_num_batched_tokens)
        budget = self._schedule_prefills(step, rows, budget)
        self._start_waiting(step, rows, budget, now_s)
        if not rows:
            return None
        step.closed_slots = self._places.take_closed_slots()
        step.bindings = self._adapters.take_bindings(step.step_id)
        self._last_step_id = step.step_id
        self._unanswered.append((step, rows))
        return step

    def _schedule_decodes(self, step: Step, rows: list[Sequence], budget: int) -> int:
        index = 0
        running = self._places.running
        while index < len(running) and budget:
            sequence = running[index]
            index += 1
            if not (sequence.is_decoding and sequence.can_sample):
                continue
            new_blocks = self._grow(sequence, sequence.num_computed_tokens + 1)
            if new_blocks is None:  # It was the last one, and gave up its own place.
                break
            self._compute(step, rows, sequence, 1, new_blocks)
            budget -= 1
        return budget

    def _grow(self, sequence: Sequence, num_tokens: int) -> list[int] | None:
        """New blocks so that `num_tokens` fit, preempting from the end of the order; None if `sequence` had to go.

        Rows are visited in order, so whoever is preempted has not been scheduled in this step.
        """
        while (new_blocks := self._places.grow(sequence, num_tokens)) is None:
            victim = self._places.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return None
        return new_blocks

    def _schedule_prefills(self, step: Step, rows: list[Sequence], budget: int) -> int:
        for sequence in self._places.running:
            if not budget:
                break
            if not sequence.is_decoding:
                chunk = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
                self._compute(step, rows, sequence, chunk, [])
                budget -= chunk
        return budget

    def _start_waiting(self, step: Step, rows: list[Sequence], budget: int, now_s: float) -> None:
        for woken in self._adapters.wake():
            self._waiting.push(woken)
        while budget and self._places.has_slot and (sequence := self._waiting.head()) is not None:
            if sequence.num_unanswered_steps:  # Preempted; a token on its way still counts, so its answer comes first.
                break
            if not self._adapters.place(sequence):  # Parked: those behind it may go on.
                self._waiting.pop()
                continue
            new_blocks = self._places.take(sequence)
            if new_blocks is None:
                break
            self._waiting.pop()
            self._adapters.enter(sequence)
            self._open(step, sequence, now_s)
            chunk = min(sequence.num_tokens, budget)
            self._compute(step, rows, sequence, chunk, new_blocks)
            budget -= chunk

    def _open(self, step: Step, sequence: Sequence, now_s: float) -> None:
        assert sequence.slot is not None
        step.opened.append(sequence.opening(sequence.slot))
        if sequence.group.first_scheduled_s is None:
            sequence.group.first_scheduled_s = now_s
            self._tally.num_prompt_tokens += sequence.num_prompt_tokens

    def _compute(
        self, step: Step, rows: list[Sequence], sequence: Sequence, num_tokens: int, new_blocks: list[int]
    ) -> None:
        """Puts `num_tokens` more of the sequence into the step, with those of them that the shards do not have."""
        assert sequence.slot is not None
        start = sequence.num_computed_tokens
        end = start + num_tokens
        known = sequence.num_tokens
        if sequence.num_shard_tokens < min(end, known):
            step.filled.append(FillTokens(sequence.slot, start, sequence.tokens(start, end)))
        is_sampled = end == known + sequence.num_pending_samples
        step.scheduled.append(ScheduledRow(sequence.slot, start, num_tokens, is_sampled, tuple(new_blocks)))
        rows.append(sequence)
        sequence.num_computed_tokens = end
        sequence.num_shard_tokens = end + is_sampled
        sequence.num_unanswered_steps += 1
        sequence.num_pending_samples += is_sampled

    # Answers.

    def postprocess(self, result: StepResult, now_s: float) -> list[Event]:
        """Takes the oldest unanswered step's result; returns what it means to the callers."""
        step, rows = self._unanswered.popleft()
        assert step.step_id == result.step_id and len(rows) == len(result.rows), "answers come in order"
        self._adapters.answered(step.step_id)
        events: list[Event] = []
        for sequence, row, scheduled in zip(rows, result.rows, step.scheduled, strict=True):
            sequence.num_unanswered_steps -= 1
            sequence.num_pending_samples -= scheduled.is_sampled
            if sequence.is_finished:
                continue  # It ended after this step was sent.
            if error := _row_error(result, row):
                events += self._fail(sequence.group, error)
            elif row.sampled is not None:
                self._accept(sequence, row, events, now_s)
        return events

    def _accept(self, sequence: Sequence, row: RowResult, events: list[Event], now_s: float) -> None:
        assert row.sampled is not None
        group = sequence.group
        sequence.output_token_ids.append(row.sampled.token_id)
        self._tally.count_token(sequence, now_s)
        piece = sequence.checker.accept(row.sampled)
        if piece.text or piece.token_ids or piece.finish:
            key = group.submission.key
            events.append(SequenceDelta(key, sequence.index, piece.text, piece.token_ids, piece.logprobs, piece.finish))
        if piece.finish is None:
            return
        self._release(sequence)
        if group.is_finished:
            self._end(group)
            events.append(group.done(now_s))

    # Ends.

    def _preempt(self, sequence: Sequence) -> None:
        self._places.give_up(sequence)
        self._adapters.leave(sequence)
        sequence.num_computed_tokens = sequence.num_shard_tokens = 0
        self._tally.num_preemptions += 1
        self._waiting.push(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Ends a sequence, wherever it stands."""
        if sequence.is_finished:
            return
        sequence.is_finished = True
        if sequence.slot is not None:
            self._places.give_up(sequence)
            self._adapters.leave(sequence)
        elif not sequence.is_parked:
            self._waiting.leave()
        self._adapters.remove(sequence)

    def _fail(self, group: SequenceGroup, error: RequestError) -> list[Event]:
        for member in group.members:
            self._release(member)
        self._end(group)
        return [RequestFailed(group.submission.key, error)]

    def _end(self, group: SequenceGroup) -> None:
        del self._groups[group.submission.key]
        # Deadlines of ended requests may not pile up until they pass.
        if len(self._deadlines) > 2 * len(self._groups) + MAX_STALE:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._groups]
            heapq.heapify(self._deadlines)

    def check_integrity(self) -> None:
        """Asserts that slots, blocks and counts add up; cheap enough for tests and idle moments, not for each step."""
        members = [member for group in self._groups.values() for member in group.members]
        self._places.check_integrity(members)
        self._adapters.check_integrity([member for member in members if not member.is_finished])
        waiting = [m for m in members if m.slot is None and not m.is_finished and not m.is_parked]
        self._waiting.check_integrity(waiting)
        assert all(member.slot is None for member in members if member.is_finished), "a finished sequence has a slot"
        assert all(not group.is_finished for group in self._groups.values()), "a finished request is kept"


def _row_error(result: StepResult, row: RowResult) -> RequestError | None:
    if result.is_out_of_memory:
        return ResourceExhausted("the device ran out of memory in a step of this request; try a shorter one")
    if not row.is_finite:
        return InternalError("the model gave no finite numbers for this request")
    return None
