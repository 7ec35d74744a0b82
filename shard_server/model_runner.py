"""Runs steps: tables, then the model, then the sampler, then the tables again."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from model.attention import Seqlen
from model.flash_cohere import FlashCohereForCausalLM
from shard_server.batch import Batch
from shard_server.errors import ProtocolError
from shard_server.kv_cache import KVCache
from shard_server.link import RowResults, ScheduledRows, StepOutcome, StepWork
from shard_server.sampler import Sampler, Samples
from shard_server.sampling_rows import SamplingRows
from shard_server.staging import Staging, download
from shard_server.tables import RowTables

logger = logging.getLogger(__name__)

# Bytes of staging that a row and a token take at most, rounded up generously; see Batch and SamplingRows.
ROW_BYTES = 256
TOKEN_BYTES = 32
# Room for ids that min_tokens forbids; larger lists would have to be refused when a row is opened.
FORBIDDEN_BYTES = 1 << 20


class ModelRunner:
    """Owns this rank's rows and cache. Every method runs on the one thread that computes."""

    def __init__(
        self,
        model: FlashCohereForCausalLM,
        tables: RowTables,
        kv_cache: KVCache,
        max_num_batched_tokens: int,
        device: torch.device,
    ) -> None:
        """`kv_cache` has as many blocks as `tables` allows ids for, of the model's block size."""
        self._model = model
        self._tables = tables
        self._kv_cache = kv_cache
        self._max_num_batched_tokens = max_num_batched_tokens
        self._sampler = Sampler(model.parallel, model.vocab_start)
        rows_bytes = (tables.max_num_seqs + 1) * ROW_BYTES
        self._staging = Staging(device, rows_bytes + max_num_batched_tokens * TOKEN_BYTES + FORBIDDEN_BYTES)
        self._last_step_id = 0
        self._last_end_s: float | None = None

    def reset(self) -> None:
        """A new epoch: no row is open, the next step is number 1."""
        self._tables.reset()
        self._last_step_id = 0
        self._last_end_s = None

    @torch.inference_mode()
    def step(self, work: StepWork) -> StepOutcome:
        """Runs one step.

        A step that runs out of device memory leaves the tables as they are after its closes, opens and fills; so do
        the steps sent before the router could know, which build on it. With several ranks it is an error like any
        other, since the ranks may have stopped at different collectives.

        Raises:
            ProtocolError: the step contradicts the tables.
        """
        start_s = time.perf_counter()
        idle_s = start_s - self._last_end_s if self._last_end_s is not None else 0.0
        if work.step_id != self._last_step_id + 1:
            raise ProtocolError(f"step_id {work.step_id} does not follow {self._last_step_id}")
        self._last_step_id = work.step_id
        rows = self._apply_and_run(work)
        self._last_end_s = time.perf_counter()
        return StepOutcome(work.step_id, self._last_end_s - start_s, idle_s, rows)

    def _apply_and_run(self, work: StepWork) -> RowResults | None:
        tables, scheduled = self._tables, work.scheduled
        tables.close(work.closed_slots)
        if work.opened is not None:
            tables.open(work.opened)
        if work.filled is not None:
            tables.fill(work.filled)
        num_tokens = int(scheduled.num_tokens.sum())
        if num_tokens > self._max_num_batched_tokens:
            raise ProtocolError(f"{num_tokens} tokens in a step, over {self._max_num_batched_tokens}")
        if not tables.check_scheduled(scheduled):
            tables.lose(scheduled)
            return None
        try:
            rows = self._compute(scheduled)
        except torch.OutOfMemoryError:
            if self._model.parallel.world_size > 1:
                raise
            logger.warning("step %d ran out of device memory", work.step_id, exc_info=True)
            tables.lose(scheduled)
            torch.cuda.empty_cache()
            return None
        tables.commit(scheduled)
        return rows

    def _compute(self, scheduled: ScheduledRows) -> RowResults:
        if not len(scheduled.slots):
            return _no_rows()
        self._tables.append_blocks(scheduled)
        self._staging.begin()
        batch = Batch.build(scheduled, self._tables)
        rows = SamplingRows.build(batch, self._tables)
        samples = self._forward_and_sample(batch, rows)
        return _results(batch, rows, samples)

    def _forward_and_sample(self, batch: Batch, rows: SamplingRows) -> Samples:
        """The part of a step that stays on the device: gather inputs, forward, sample, write the sampled tokens."""
        tables = self._tables
        (
            positions,
            token_places,
            block_places,
            slots,
            sampled_places,
            num_tokens,
            cache_lens,
            context_lens,
            cu_seqlens,
        ) = self._staging.upload(
            batch.positions,
            batch.token_places,
            batch.block_places,
            batch.slots,
            batch.sampled_places,
            batch.num_tokens,
            batch.cache_lens,
            batch.context_lens,
            batch.cu_seqlens,
        )
        is_decode = batch.num_decode_rows == len(batch.slots)
        max_context_len = int(batch.context_lens.max())
        seqlen = Seqlen(
            input_lengths=num_tokens,
            cache_lengths=cache_lens,
            context_lengths=context_lens,
            num_decode_rows=batch.num_decode_rows,
            max_input_len=int(batch.num_tokens.max()),
            max_context_len=max_context_len,
            input_lens_list=batch.num_tokens.tolist(),
            context_lens_list=batch.context_lens.tolist(),
        )
        flat_tokens = tables.tokens.tensor.view(-1)
        blocks = tables.blocks.tensor.view(-1).index_select(0, block_places).long()
        width = -(-max_context_len // tables.block_size)
        # The logits of every row's last token: a row that samples none still has to be seen to be finite.
        logits, _ = self._model.forward(
            input_ids=flat_tokens.index_select(0, token_places).long(),
            position_ids=positions,
            cu_seqlen_prefill=None if is_decode else cu_seqlens,
            kv_cache=self._kv_cache,
            block_tables=tables.blocks.tensor[:, :width].index_select(0, slots),
            slots=blocks * tables.block_size + positions % tables.block_size,
            seqlen=seqlen,
            max_s=max_context_len,
            adapter_data=None,
            lm_head_indices=None if is_decode else cu_seqlens[1:].long() - 1,
        )
        samples = self._sampler.sample(logits, rows, self._staging)
        flat_tokens.index_copy_(0, sampled_places, samples.token_ids)
        return samples

    @torch.inference_mode()
    def warm_up(self) -> None:
        """One token through the model in the spare row and block 0: first use of kernels and of the ranks' links."""
        one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
        spare = np.full(1, self._tables.spare_slot, np.int32)
        row = ScheduledRows(spare, zero, one, np.zeros(1, np.bool_), zero, np.zeros(0, np.int32))
        self._compute(row)


def _no_rows() -> RowResults:
    ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return RowResults(np.zeros(0, np.bool_), ints, floats, ints, floats)


def _results(batch: Batch, rows: SamplingRows, samples: Samples) -> RowResults:
    """Waits for the device and puts the rows back in the router's order."""
    if samples.logprobs is None:
        token_ids, is_finite = download(samples.token_ids, samples.is_finite)
        ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
        logprobs, top_ids, top = floats, ints, floats
    else:
        tensors = samples.logprobs
        token_ids, is_finite, logprobs, top_ids, top = download(
            samples.token_ids, samples.is_finite, tensors.sampled, tensors.top_token_ids, tensors.top
        )
        order = np.arange(len(logprobs)) if batch.order is None else np.argsort(batch.order[rows.logprob_rows])
        is_wanted = np.arange(top_ids.shape[1]) < rows.num_logprobs[order].reshape(-1, 1)
        logprobs, top_ids, top = logprobs[order], top_ids[order][is_wanted], top[order][is_wanted]
    is_sampled = batch.restore(batch.is_sampled)
    return RowResults(batch.restore(is_finite) != 0, batch.restore(token_ids)[is_sampled], logprobs, top_ids, top)
