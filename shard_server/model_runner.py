"""Runs steps: tables, then the model, then the sampler, then the tables again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from model.attention import Seqlen
from model.flash_cohere import FlashCohereForCausalLM
from model.lora import BASE, AdapterBatchData
from shard_server.adapter_rows import adapters_of
from shard_server.adapter_slots import AdapterSlots
from shard_server.batch import Batch
from shard_server.errors import ProtocolError
from shard_server.graph_sizes import GraphShape
from shard_server.kv_cache import KVCache
from shard_server.link import Int32, RowResults, ScheduledRows, StepOutcome, StepWork
from shard_server.pending_step import PendingRows, PendingStep
from shard_server.progress import Progress
from shard_server.sampler import Sampler, Samples
from shard_server.sampling_rows import SamplingRows
from shard_server.staging import Readback, Staging
from shard_server.step_clock import StepClock
from shard_server.tables import RowTables
from shard_server.warm_up import every_way_to_sample, padded_steps

if TYPE_CHECKING:
    from shard_server.cuda_graphs import DecodeGraphs

logger = logging.getLogger(__name__)

# Bytes of staging that a row and a token take at most, rounded up generously; see Batch, SamplingRows and TableWrite.
ROW_BYTES = 512
TOKEN_BYTES = 64


class ModelRunner:
    """Owns this rank's rows and cache. Every method runs on the one thread that launches."""

    def __init__(
        self,
        model: FlashCohereForCausalLM,
        tables: RowTables,
        kv_cache: KVCache,
        max_num_batched_tokens: int,
        device: torch.device,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """`kv_cache` has as many blocks as `tables` allows ids for, of the model's block size; `adapters` None: LoRA is
        off."""
        self._model = model
        self._tables = tables
        self._kv_cache = kv_cache
        self._max_num_batched_tokens = max_num_batched_tokens
        self._device = device
        self.adapters = adapters
        self._stacks = stacks = None if adapters is None else adapters.stacks
        self._sampler = Sampler(model.parallel, model.vocab_start)
        rows_bytes = (tables.max_num_seqs + 1) * ROW_BYTES + (0 if stacks is None else 4 * (stacks.max_loras + 1))
        self._staging = Staging(device, rows_bytes + max_num_batched_tokens * TOKEN_BYTES)
        self._clock = StepClock(device)
        self._graphs: DecodeGraphs | None = None
        self._last_step_id = 0

    def reset(self) -> None:
        """A new epoch: no row is open, the next step is number 1."""
        self._tables.reset()
        if self.adapters is not None:
            self.adapters.reset()
        self._last_step_id = 0
        self._clock.reset()

    def step(self, work: StepWork) -> StepOutcome:
        """Runs one step and waits for it; see launch."""
        return self.launch(work).finish()

    @torch.inference_mode()
    def launch(self, work: StepWork) -> PendingStep:
        """Gives the device one step to do, without waiting for it or for earlier ones.

        A step that runs out of device memory leaves the tables as they are after its closes, opens and fills; so do
        the steps sent before the router could know, which build on it. With several ranks it is an error like any
        other, since the ranks may have stopped at different collectives.

        Raises:
            ProtocolError: the step contradicts the tables.
        """
        if work.step_id != self._last_step_id + 1:
            raise ProtocolError(f"step_id {work.step_id} does not follow {self._last_step_id}")
        self._last_step_id = work.step_id
        tables, scheduled = self._tables, work.scheduled
        tables.close(work.closed_slots)
        self._apply_adapters(work)
        if work.opened is not None:
            tables.open(work.opened)
        if work.filled is not None:
            tables.fill(work.filled)
        num_tokens = int(scheduled.num_tokens.sum())
        if num_tokens > self._max_num_batched_tokens:
            raise ProtocolError(f"{num_tokens} tokens in a step, over {self._max_num_batched_tokens}")
        can_compute = tables.check_scheduled(scheduled)
        rows = None
        try:
            if can_compute:
                rows = self._launch_rows(scheduled)
            else:
                self._begin()
        except torch.OutOfMemoryError:
            if self._model.parallel.world_size > 1:
                raise
            logger.warning("step %d ran out of device memory", work.step_id, exc_info=True)
            torch.cuda.empty_cache()
        if rows is None:
            tables.lose(scheduled)
        else:
            tables.commit(scheduled)
        timing = self._clock.end()
        self._staging.end(timing.event)
        return PendingStep(work.step_id, timing, rows)

    def _apply_adapters(self, work: StepWork) -> None:
        """Binds slots, and checks those of new rows."""
        if self.adapters is None:
            if work.bindings is not None or (work.opened is not None and (work.opened.adapter_slots >= 0).any()):
                raise ProtocolError("the step uses adapters, but LoRA is off on this shard")
            return
        if work.bindings is not None:
            self.adapters.bind(work.bindings, self._tables)
        if work.opened is not None:
            self.adapters.check_opened(work.opened.adapter_slots)

    def _begin(self, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
        """Starts the clock, uploads, and writes on the device what the tables have waiting."""
        writes = self._tables.take_writes()
        self._staging.begin()
        self._clock.begin()
        columns = [column for write in writes for column in (write.places, write.values)]
        uploaded = self._staging.upload(*arrays, *columns)
        pairs = uploaded[len(arrays) :]
        for write, places, values in zip(writes, pairs[::2], pairs[1::2], strict=True):
            write.target.index_copy_(0, places, values)
        return uploaded[: len(arrays)]

    def _launch_rows(self, scheduled: ScheduledRows) -> PendingRows | RowResults:
        if not len(scheduled.slots):
            self._begin()
            return _no_rows()
        self._tables.append_blocks(scheduled)
        batch = Batch.build(scheduled, self._tables)
        rows = SamplingRows.build(batch, self._tables)
        adapter_slots, shape = self._tables.adapter_slots[batch.slots], None
        if self._graphs is not None and batch.num_decode_rows == len(batch.slots):
            has_adapters = bool((adapter_slots != BASE).any())
            shape = self._graphs.choose(len(batch.slots), int(batch.context_lens.max()), has_adapters)
        if shape is not None:
            return self._replay(shape, batch, rows, adapter_slots)
        adapters = adapters_of(adapter_slots, batch.num_tokens, self._stacks)
        return PendingRows.of(batch, rows, self._forward_and_sample(batch, rows, adapters))

    def _replay(self, shape: GraphShape, batch: Batch, rows: SamplingRows, adapter_slots: Int32) -> PendingRows:
        """A decode step as a graph; rows that want more than a plain draw are drawn again from its logits."""
        assert self._graphs is not None
        slots, sampled = batch.slots.astype(np.int32), batch.is_sampled.astype(np.int32)
        packed = self._graphs.pack_step(shape, slots, batch.cache_lens, sampled, adapter_slots)
        if rows.is_plain:
            self._begin(packed)
            results, _ = self._graphs.replay(shape)
            return PendingRows(batch, rows, Readback(results), is_joined=True)
        _, places = self._begin(packed, batch.sampled_places)
        _, logits = self._graphs.replay(shape)
        samples = self._sampler.sample(logits[: len(slots)], rows, self._staging)
        self._tables.tokens.tensor.view(-1).index_copy_(0, places, samples.token_ids)
        return PendingRows.of(batch, rows, samples)

    def _forward_and_sample(self, batch: Batch, rows: SamplingRows, adapters: AdapterBatchData | None) -> Samples:
        """A step launched kernel by kernel: gather inputs, forward, sample, write the sampled tokens."""
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
        ) = self._begin(
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
            adapter_data=adapters,
            lm_head_indices=None if is_decode else cu_seqlens[1:].long() - 1,
        )
        samples = self._sampler.sample(logits, rows, self._staging)
        flat_tokens.index_copy_(0, sampled_places, samples.token_ids)
        return samples

    @torch.inference_mode()
    def warm_up(self, shapes: list[GraphShape] | None = None) -> None:
        """One token through the model in the spare row and block 0: first use of kernels and of the ranks' links.

        Then captures `shapes`, where there are any.
        """
        self._run_padding(np.ones(1, np.int32))
        if shapes:
            from shard_server.cuda_graphs import DecodeGraphs

            rows = self._staging.device_bytes[: self._staging.device_bytes.numel() // 4 * 4].view(torch.int32)
            graphs = DecodeGraphs(self._model, self._tables, self._kv_cache, self._sampler, rows, self._stacks)
            graphs.capture(shapes)
            self._graphs = graphs
        self.reset()

    @torch.inference_mode()
    def compile_kernels(self) -> None:
        """Every variant of every kernel once, in the spare row and block 0; quick where the compiler has them on disk.

        Kernels are compiled at first use; while serving that would hold up every stream for a second.
        """
        num_kv_heads = self._kv_cache[0][0].shape[2]
        tables = self._tables
        limits = (tables.max_num_seqs, self._max_num_batched_tokens, tables.max_model_len)
        steps = padded_steps(*limits, num_kv_heads, self._stacks is not None)
        with Progress("compiling kernels", len(steps) + 1) as progress:
            for step in steps:
                lengths = np.array([1] * step.num_decode_rows + [*step.prompt_lens], np.int32)
                starts = np.zeros(len(lengths), np.int32)
                starts[: step.num_decode_rows] = step.context_len - 1
                self._run_padding(lengths, starts, has_adapters=step.has_adapters)
                progress.advance()
            self._run_padding(np.ones(1, np.int32), sampling=every_way_to_sample(tables.vocab_size))
            progress.advance()

    @torch.inference_mode()
    def run_largest_decode(self) -> None:
        """The decode step that needs the most memory, in the spare row and block 0; waits for it."""
        num_rows = min(self._tables.max_num_seqs, self._max_num_batched_tokens)
        self._run_padding(np.ones(num_rows, np.int32), has_adapters=self._stacks is not None)

    @torch.inference_mode()
    def run_largest_prefill(self) -> None:
        """As run_largest_decode: as many tokens as a step may have, in as many rows, all of which need logits."""
        num_rows = min(self._tables.max_num_seqs, self._max_num_batched_tokens)
        num_tokens = min(self._max_num_batched_tokens, num_rows * self._tables.max_model_len)
        lengths = np.full(num_rows, num_tokens // num_rows, np.int32)
        lengths[: num_tokens % num_rows] += 1
        self._run_padding(lengths, has_adapters=self._stacks is not None)

    def _run_padding(
        self,
        lengths: Int32,
        starts: Int32 | None = None,
        sampling: SamplingRows | None = None,
        has_adapters: bool = False,
    ) -> None:
        """A step, launched kernel by kernel, of rows of these lengths that all are the spare one; waits for it.

        With `has_adapters` the rows go through adapter slot 0, which may be empty.
        """
        num_rows = len(lengths)
        zeros = np.zeros(num_rows, np.int32)
        slots = np.full(num_rows, self._tables.spare_slot, np.int32)
        starts = zeros if starts is None else starts
        rows = ScheduledRows(slots, starts, lengths, np.zeros(num_rows, np.bool_), zeros, np.zeros(0, np.int32))
        batch = Batch.build(rows, self._tables)
        sampling = sampling or SamplingRows.build(batch, self._tables)
        adapters = adapters_of(zeros, lengths, self._stacks) if has_adapters else None
        pending = PendingRows.of(batch, sampling, self._forward_and_sample(batch, sampling, adapters))
        timing = self._clock.end()
        self._staging.end(timing.event)
        PendingStep(0, timing, pending).finish()


def _no_rows() -> RowResults:
    ints, floats = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return RowResults(np.zeros(0, np.bool_), ints, floats, ints, floats)
