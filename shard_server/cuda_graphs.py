"""Decode steps as CUDA graphs: from the tables' rows to drawn tokens in the tables, in one launch."""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from typing import Any

import numpy as np
import torch

from model.attention import Seqlen
from model.flash_cohere import FlashCohereForCausalLM
from model.lora import AdapterBatchData
from model.lora_stacks import LoraStacks
from shard_server.adapter_rows import num_adapter_columns, pack_adapters
from shard_server.decode_kernels import ROW_COLUMNS, DecodeInputs, gather_rows, publish_tokens
from shard_server.graph_sizes import GraphShape, ShapeIndex
from shard_server.kv_cache import KVCache
from shard_server.link import Int32
from shard_server.progress import Progress
from shard_server.sampler import Sampler
from shard_server.tables import RowTables

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class CapturedStep:
    """A graph of one shape. `logits` lie in memory that the next replay of any graph may overwrite."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class DecodeGraphs:
    """Captured decode steps of a ladder of shapes, which share inputs, results and scratch memory."""

    def __init__(
        self,
        model: FlashCohereForCausalLM,
        tables: RowTables,
        kv_cache: KVCache,
        sampler: Sampler,
        rows: torch.Tensor,
        stacks: LoraStacks | None = None,
    ) -> None:
        """Captures nothing yet.

        Args:
            model, tables, kv_cache, sampler: what steps run with; their memory must stay where it is.
            rows: int32, the fixed place of the uploaded columns, see `pack_step`.
            stacks: the adapters, where shapes have any; their memory must stay where it is too.
        """
        self._model = model
        self._tables = tables
        self._kv_cache = kv_cache
        self._sampler = sampler
        self._rows = rows
        self._stacks = stacks
        self._captured: dict[GraphShape, CapturedStep] = {}
        self._available = ShapeIndex([])

    def capture(self, shapes: list[GraphShape]) -> None:
        """Captures the shapes in the given order, the largest first."""
        if not shapes:
            return
        start_s = time.perf_counter()
        device = self._rows.device
        most = max(shape.num_rows for shape in shapes)
        self._make_buffers(most)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        gc.collect()
        gc.disable()  # a collection during a capture could free what CUDA must not free then
        try:
            with torch.cuda.stream(stream), Progress("CUDA graphs", len(shapes)) as progress:
                for shape in shapes:
                    self._captured[shape] = self._capture(shape, pool)
                    progress.advance()
        finally:
            gc.enable()
        torch.cuda.synchronize(device)
        self._available = ShapeIndex(shapes)
        logger.info("captured %d decode graphs in %.1f s", len(shapes), time.perf_counter() - start_s)

    def _make_buffers(self, most: int) -> None:
        device = self._rows.device
        self._inputs = DecodeInputs.create(most, self._tables.max_blocks_per_seq, device)
        self._results = torch.zeros(2 * most, dtype=torch.int32, device=device)

    def _capture(self, shape: GraphShape, pool: Any) -> CapturedStep:  # noqa: ANN401 - torch has no name for it
        none = np.zeros(0, np.int32)
        padding = torch.from_numpy(self.pack_step(shape, none, none, none, none))
        self._rows[: len(padding)].copy_(padding)
        # First without a graph: compiles kernels and makes workspaces, which a capture must not do.
        self._run(shape)
        torch.cuda.synchronize(self._rows.device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile, such as NCCL's watchdog.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            logits = self._run(shape)
        finally:
            graph.capture_end()
        return CapturedStep(graph, borrow(logits))

    def choose(self, num_rows: int, max_context_len: int, has_adapters: bool) -> GraphShape | None:
        """The graph for a step of so many rows, or None."""
        return self._available.choose(num_rows, max_context_len, has_adapters)

    def pack_step(
        self, shape: GraphShape, slots: Int32, starts: Int32, is_sampled: Int32, adapter_slots: Int32
    ) -> Int32:
        """What has to be uploaded to the fixed place before the shape is replayed with these rows."""
        packed = pack_rows(self._tables.spare_slot, shape.num_rows, slots, starts, is_sampled)
        if not shape.has_adapters:
            return packed
        assert self._stacks is not None
        return np.concatenate((packed, pack_adapters(adapter_slots, shape.num_rows, self._stacks.max_loras)))

    def replay(self, shape: GraphShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the step whose rows were uploaded.

        Returns:
            The results, int32 `[2 * num_rows]`: tokens, then whether they are finite; and the float32 logits
            `[num_rows, vocab_local]`. Both stay as they are until the next replay.
        """
        captured = self._captured[shape]
        captured.graph.replay()
        return self._results[: 2 * shape.num_rows], captured.logits

    def _run(self, shape: GraphShape) -> torch.Tensor:
        """The step itself; returns its logits."""
        tables = self._tables
        num_rows, context = shape.num_rows, shape.max_context_len
        rows = self._rows[: ROW_COLUMNS * num_rows]
        inputs = self._inputs.first(num_rows, -(-context // tables.block_size))
        seeds, temperature = tables.device_seeds.tensor, tables.device_temperature.tensor
        gather_rows(rows, tables.tokens.tensor, tables.blocks.tensor, seeds, temperature, tables.block_size, inputs)
        logits, _ = self._model.forward(
            input_ids=inputs.input_ids,
            position_ids=inputs.positions,
            cu_seqlen_prefill=None,
            kv_cache=self._kv_cache,
            block_tables=inputs.block_tables,
            slots=inputs.kv_slots,
            seqlen=Seqlen(
                input_lengths=inputs.input_lengths,
                cache_lengths=inputs.cache_lengths,
                context_lengths=inputs.context_lengths,
                num_decode_rows=num_rows,
                max_input_len=1,
                max_context_len=context,
            ),
            max_s=context,
            adapter_data=self._adapter_data(shape),
        )
        token_ids, is_finite = self._sampler.draw_plainly(
            logits, inputs.temperature, inputs.seeds, inputs.next_positions
        )
        publish_tokens(rows, tables.tokens.tensor, token_ids, is_finite, self._results[: 2 * num_rows])
        return logits

    def _adapter_data(self, shape: GraphShape) -> AdapterBatchData | None:
        """Views of the uploaded columns behind the rows': any step may assign its rows to other slots."""
        if not shape.has_adapters:
            return None
        assert self._stacks is not None
        begin = ROW_COLUMNS * shape.num_rows
        columns = self._rows[begin : begin + num_adapter_columns(shape.num_rows, self._stacks.max_loras)]
        return AdapterBatchData.of_columns(columns, shape.num_rows, (), self._stacks)


def pack_rows(
    spare_slot: int,
    num_rows: int,
    slots: Int32 | None = None,
    starts: Int32 | None = None,
    is_sampled: Int32 | None = None,
) -> Int32:
    """int32 `[ROW_COLUMNS * num_rows]` of the given rows; the rest are padding in the spare slot, without a sample."""
    packed = np.zeros((ROW_COLUMNS, num_rows), np.int32)
    packed[0] = spare_slot
    if slots is not None and starts is not None and is_sampled is not None:
        for column, values in zip(packed, (slots, starts, is_sampled), strict=True):
            column[: len(values)] = values
    return packed.reshape(-1)


class _Memory:
    """Memory at an address, as torch.as_tensor reads it (the CUDA array interface, version 3)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def borrow(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that keeps none of it; graphs captured later may use the memory as well."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device)
