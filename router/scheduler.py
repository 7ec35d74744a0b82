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
from collections.abc import Callable

from router.adapter_places import AdapterPlaces
from router.deadlines import Deadlines
from router.detokenizer import Detokenizer
from router.errors import Cancelled, DeadlineExceeded, InternalError, RequestError, ResourceExhausted, Unavailable
from router.messages import Event, Load, RequestFailed, SequenceDelta, Submission
from router.planned_step import PlannedStep
from router.quarantine import MAX_LOST_EPOCHS, MAX_TOKENS
from router.sequence import Sequence, SequenceGroup
from router.standing import Standing
from router.step import RowResult, ShardInfo, Step, StepResult
from router.stopping import StopChecker
from router.tally import Tally

MakeDetokenizer = Callable[[bool], Detokenizer]


class Scheduler:
    """Synchronous, without I/O; times are time.monotonic() seconds, handed in."""

    def __init__(
        self,
        info: ShardInfo,
        make_detokenizer: MakeDetokenizer,
        adapters: AdapterPlaces | None = None,
        enable_prefix_caching: bool = True,
    ) -> None:
        """`make_detokenizer(skip_special_tokens)` gives each sequence its own; `adapters` None: LoRA is off."""
        self._info = info
        self._make_detokenizer = make_detokenizer
        self._is_caching = enable_prefix_caching
        self._standing = standing = Standing(info, enable_prefix_caching, adapters)
        self._places, self._adapters = standing.places, standing.adapters
        self._waiting, self._quarantine = standing.waiting, standing.quarantine
        self._groups: dict[int, SequenceGroup] = {}
        self._deadlines = Deadlines()
        self._unanswered: collections.deque[PlannedStep] = collections.deque()
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
        return self._deadlines.next_s

    @property
    def is_idle(self) -> bool:
        """Whether there is no request and no step under way."""
        return not self._groups and not self._unanswered

    def load(self) -> Load:
        """How busy we are."""
        return self._standing.load()

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
            self._standing.add(member)
        if submission.deadline_s is not None:
            self._deadlines.add(submission.key, submission.deadline_s)

    def cancel(self, key: int) -> list[Event]:
        """Ends a request whose caller went away; unknown and ended ones are no error."""
        group = self._groups.get(key)
        return self._fail(group, Cancelled("the caller cancelled")) if group else []

    def expire(self, now_s: float) -> list[Event]:
        """Ends the requests whose deadline has passed, waiting or running."""
        events: list[Event] = []
        for key in self._deadlines.take_passed(now_s):
            if group := self._groups.get(key):
                events += self._fail(group, DeadlineExceeded("the deadline passed before the answer was complete"))
        return events

    def fail_adapter(self, version: str, error: RequestError) -> list[Event]:
        """Ends the requests that wait for an adapter which could not be loaded."""
        groups = [group for group in self._groups.values() if group.waits_for(version)]
        return [event for group in groups for event in self._fail(group, error)]

    def fail_all(self, message: str) -> list[Event]:
        """Ends every request with UNAVAILABLE: the shards are gone, and with them the steps under way."""
        self._unanswered.clear()
        return [event for group in list(self._groups.values()) for event in self._fail(group, Unavailable(message))]

    def end_epoch(self, blames_rows: bool) -> list[Event]:
        """The shards lost every row and every step under way: all sequences are computed again, from their tokens.

        Those in a step under way become suspects. If it may have been their fault (`blames_rows`), one to which it
        happens twice without a token between ends with INTERNAL.
        """
        under_way = {member: None for plan in self._unanswered for member in plan.rows if not member.is_finished}
        self._standing.end_epoch(under_way.keys())
        self._unanswered.clear()
        self._last_step_id = 0
        events: list[Event] = []
        for sequence in under_way:
            sequence.num_unanswered_steps = sequence.num_pending_samples = 0
            sequence.num_lost_epochs += blames_rows
        for sequence in under_way:
            if sequence.num_lost_epochs >= MAX_LOST_EPOCHS and not sequence.is_finished:
                events += self._fail(sequence.group, InternalError("the shards failed twice while computing this"))
        return events

    # Scheduling.

    def schedule(self, now_s: float) -> Step | None:
        """The next step to send, or None when nothing can be computed before an answer or a request comes."""
        plan = PlannedStep(self._last_step_id + 1, self._info.max_num_batched_tokens)
        if suspect := self._quarantine.head:
            if self._unanswered:
                return None
            self._schedule_suspect(plan, suspect, now_s)
        else:
            self._schedule_decodes(plan)
            self._schedule_prefills(plan)
            self._start_waiting(plan, now_s)
        if not plan.rows:
            return None
        step = plan.step
        step.closed_slots = self._places.take_closed_slots()
        step.bindings = self._adapters.take_bindings(step.step_id)
        self._last_step_id = step.step_id
        self._unanswered.append(plan)
        return step

    def _schedule_suspect(self, plan: PlannedStep, suspect: Sequence, now_s: float) -> None:
        is_new = suspect.slot is None
        if is_new and not self._adapters.place(suspect):  # Parked, and later one of the others.
            self._quarantine.leave(suspect)
            return
        while (new_blocks := self._places.take_or_grow(suspect)) is None:
            self._preempt(next(other for other in reversed(self._places.running) if other is not suspect))
        if is_new:
            self._open(plan, suspect, now_s)
        chunk = min(suspect.num_tokens - suspect.num_computed_tokens, MAX_TOKENS, plan.budget)
        plan.compute(suspect, chunk, new_blocks)

    def _schedule_decodes(self, plan: PlannedStep) -> None:
        index = 0
        running = self._places.running
        while index < len(running) and plan.budget:
            sequence = running[index]
            index += 1
            if not (sequence.is_decoding and sequence.can_sample):
                continue
            new_blocks = self._grow(sequence, sequence.num_computed_tokens + 1)
            if new_blocks is None:  # It was the last one, and gave up its own place.
                break
            plan.compute(sequence, 1, new_blocks)

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

    def _schedule_prefills(self, plan: PlannedStep) -> None:
        for sequence in self._places.running:
            if not plan.budget:
                break
            if not sequence.is_decoding:
                plan.compute(sequence, min(sequence.num_tokens - sequence.num_computed_tokens, plan.budget), [])

    def _start_waiting(self, plan: PlannedStep, now_s: float) -> None:
        for woken in self._adapters.wake():
            self._waiting.push(woken)
        held: list[Sequence] = []
        while plan.budget and self._places.has_slot and (sequence := self._waiting.head()) is not None:
            if sequence.num_unanswered_steps:  # Preempted; a token on its way still counts, so its answer comes first.
                break
            if self._places.waits_for_sibling(sequence):  # It can share blocks soon; those behind it may go on.
                self._waiting.pop()
                held.append(sequence)
                continue
            if not self._adapters.place(sequence):  # Parked: those behind it may go on.
                self._waiting.pop()
                continue
            new_blocks = self._places.take(sequence)
            if new_blocks is None:
                break
            self._waiting.pop()
            self._open(plan, sequence, now_s)
            plan.compute(sequence, min(sequence.num_tokens - sequence.num_computed_tokens, plan.budget), new_blocks)
        for sequence in held:
            self._waiting.push(sequence)

    def _open(self, plan: PlannedStep, sequence: Sequence, now_s: float) -> None:
        self._adapters.enter(sequence)
        plan.open(sequence)
        self._tally.count_start(sequence, self._is_caching)
        group = sequence.group
        if group.first_scheduled_s is None:
            group.first_scheduled_s, group.num_cached_tokens = now_s, sequence.num_computed_tokens

    # Answers.

    def postprocess(self, result: StepResult, now_s: float) -> list[Event]:
        """Takes the oldest unanswered step's result; returns what it means to the callers."""
        plan = self._unanswered.popleft()
        step = plan.step
        assert step.step_id == result.step_id and len(plan.rows) == len(result.rows), "answers come in order"
        self._adapters.answered(step.step_id)
        events: list[Event] = []
        for sequence, row, scheduled in zip(plan.rows, result.rows, step.scheduled, strict=True):
            sequence.num_unanswered_steps -= 1
            sequence.num_pending_samples -= scheduled.is_sampled
            if sequence.is_finished:
                continue  # It ended after this step was sent.
            if result.is_out_of_memory:
                events += self._try_apart(sequence)
            elif not row.is_finite:
                events += self._fail(sequence.group, InternalError("the model gave no finite numbers for this request"))
            else:
                if sequence.slot is not None:  # Else its blocks are somebody else's already.
                    self._places.offer(sequence, scheduled.start + scheduled.num_tokens)
                if row.sampled is not None:
                    self._accept(sequence, row, events, now_s)
        return events

    def _try_apart(self, sequence: Sequence) -> list[Event]:
        """Its step ran out of memory: alone it may fit. A step sent ahead of that answer fails with it."""
        if sequence.is_suspect and sequence.slot is not None:
            text = "the device ran out of memory in a step of this request alone; try a shorter one"
            return self._fail(sequence.group, ResourceExhausted(text))
        if sequence.slot is not None:
            self._standing.suspect(sequence)
        return []

    def _accept(self, sequence: Sequence, row: RowResult, events: list[Event], now_s: float) -> None:
        assert row.sampled is not None
        group = sequence.group
        sequence.output_token_ids.append(row.sampled.token_id)
        self._tally.count_token(sequence, now_s)
        if sequence.is_suspect or sequence.num_lost_epochs:
            self._quarantine.prove(sequence)
        piece = sequence.checker.accept(row.sampled)
        if piece.text or piece.token_ids or piece.finish:
            key = group.submission.key
            events.append(SequenceDelta(key, sequence.index, piece.text, piece.token_ids, piece.logprobs, piece.finish))
        if piece.finish is None:
            return
        self._standing.release(sequence)
        if group.is_finished:
            self._end(group)
            events.append(group.done(now_s))

    # Ends.

    def _preempt(self, sequence: Sequence) -> None:
        self._tally.num_preemptions += 1
        self._standing.preempt(sequence)

    def _fail(self, group: SequenceGroup, error: RequestError) -> list[Event]:
        for member in group.members:
            self._standing.release(member)
        self._end(group)
        return [RequestFailed(group.submission.key, error)]

    def _end(self, group: SequenceGroup) -> None:
        del self._groups[group.submission.key]
        self._deadlines.tidy(self._groups, len(self._groups))

    def check_integrity(self) -> None:
        """Asserts that slots, blocks and counts add up; cheap enough for tests and idle moments, not for each step."""
        members = [member for group in self._groups.values() for member in group.members]
        self._standing.check_integrity(members)
        assert all(not group.is_finished for group in self._groups.values()), "a finished request is kept"
