"""From a configuration to a model that can take steps, with progress as it loads."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from model.attention import create_attention
from model.config import ModelConfig, load_model_config
from model.errors import ModelError
from model.flash_cohere import FlashCohereForCausalLM
from model.lora_stacks import LoraStacks
from model.precision import resolve_dtype
from model.weights import DummyWeights, Weights, WeightSource, stored_dtype
from shard_server.adapter_reader import AdapterReader
from shard_server.adapter_slots import AdapterSlots
from shard_server.adapters import StagedAdapters
from shard_server.config import ShardConfig
from shard_server.distributed import RankGroup
from shard_server.errors import ShardError
from shard_server.graph_sizes import GraphShape, shapes
from shard_server.kv_cache import allocate, block_bytes, choose_num_blocks
from shard_server.memory import MemoryProbe, MemoryUse, explain_graph_shortage, explain_shortage
from shard_server.model_runner import ModelRunner
from shard_server.tables import RowTables

logger = logging.getLogger(__name__)

# Facts that differ from rank to rank, all others must be equal.
OWN_FACTS = ("rank", "num_blocks", "startup_phase_s")


@dataclasses.dataclass(frozen=True, slots=True)
class ShardFacts:
    """What GetInfo answers, but for the link's version; `startup_phase_s` has seconds by phase."""

    model_fingerprint: str
    rank: int
    world_size: int
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    dtype: str
    device: str
    attention_backend: str
    startup_phase_s: dict[str, float]
    max_loras: int = 0
    max_lora_rank: int = 0


class PhaseClock:
    """Seconds spent since the last lap, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Ends the phase `name`."""
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


def load(config: ShardConfig, join: Callable[[], RankGroup]) -> tuple[ModelRunner, ShardFacts]:
    """Reads the model, meets the other ranks and warms up.

    Args:
        config: what to load.
        join: meets the other ranks.

    Raises:
        ModelError: the checkpoint or an option cannot be served.
        StartError, ShardError: the ranks do not find each other, differ, or one failed.
    """
    clock = PhaseClock()
    torch.set_num_threads(config.threads)
    model_config = load_model_config(Path(config.model))
    max_model_len = _max_model_len(config, model_config)
    group = join()
    clock.lap("rendezvous")
    device = torch.device("cpu") if config.device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    try:
        with torch.inference_mode():
            model, fingerprint = _load_model(config, model_config, group, device)
        clock.lap("load")
        dtype = model.model.embed_tokens.weight.dtype
        block_size = model.attention.block_size
        size = block_bytes(model_config, group.parallel, block_size, dtype)
        facts = ShardFacts(
            model_fingerprint=fingerprint,
            rank=config.rank,
            world_size=config.world_size,
            block_size=block_size,
            num_blocks=2,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            vocab_size=model_config.vocab_size,
            dtype=str(dtype).removeprefix("torch."),
            device=config.device,
            attention_backend=model.attention.name,
            startup_phase_s=clock.laps,
            max_loras=config.max_loras if config.enable_lora else 0,
            max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
        )
        graph_shapes = []
        if model.attention.name != "torch":  # which reads lengths on the host
            graph_shapes = _graph_shapes(config, model_config, group, max_model_len)
        build = functools.partial(
            _make_runner,
            model=model,
            model_config=model_config,
            group=group,
            dtype=dtype,
            device=device,
            # Made before free memory is measured, so that KV blocks get what they leave.
            adapters=_make_adapters(config, model_config, group, dtype, device),
        )
        measured = None
        if device.type == "cuda":
            use = _measure(config, functools.partial(build, facts), device, clock)
            measured = use.left_for_blocks(config.gpu_memory_utilization, len(graph_shapes))
            clock.lap("measure_memory")
        num_blocks = choose_num_blocks(config, size, block_size, max_model_len, measured)
        facts = _agree(dataclasses.replace(facts, num_blocks=num_blocks), group)
        runner = build(facts)
        try:
            runner.warm_up(graph_shapes)
        except torch.OutOfMemoryError as error:
            raise (explain_graph_shortage() if graph_shapes else explain_shortage(config)) from error
        clock.lap("warm_up")
    except Exception as error:
        group.report_failure(str(error))
        raise
    return runner, facts


def _graph_shapes(
    config: ShardConfig, model_config: ModelConfig, group: RankGroup, max_model_len: int
) -> list[GraphShape]:
    kv_heads = group.parallel.kv_share(model_config.num_key_value_heads)
    has_window = any(model_config.window(layer) is not None for layer in range(model_config.num_hidden_layers))
    return shapes(config.graph_sizes, max_model_len, kv_heads.stop - kv_heads.start, has_window)


def _measure(
    config: ShardConfig, build: Callable[[], ModelRunner], device: torch.device, clock: PhaseClock
) -> MemoryUse:
    """Runs the largest steps with a cache of two blocks; raises ModelError where they do not fit.

    Compiles the kernels first: they take memory too.
    """
    probe = MemoryProbe(device)
    try:
        runner = build()
        runner.compile_kernels()
        clock.lap("compile_kernels")
        probe.start()
        runner.run_largest_decode()
        decode = probe.peak()
        runner.run_largest_prefill()
        largest = probe.peak()
    except torch.OutOfMemoryError as error:
        raise explain_shortage(config) from error
    del runner
    return probe.result(largest, decode)


def _make_runner(
    facts: ShardFacts,
    model: FlashCohereForCausalLM,
    model_config: ModelConfig,
    group: RankGroup,
    dtype: torch.dtype,
    device: torch.device,
    adapters: AdapterSlots | None,
) -> ModelRunner:
    with torch.inference_mode():
        cache = allocate(model_config, group.parallel, facts.num_blocks, facts.block_size, dtype, device)
        tables = RowTables(
            max_num_seqs=facts.max_num_seqs,
            max_model_len=facts.max_model_len,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            vocab_size=facts.vocab_size,
            device=device,
        )
        return ModelRunner(model, tables, cache, facts.max_num_batched_tokens, device, adapters)


def _make_adapters(
    config: ShardConfig, model_config: ModelConfig, group: RankGroup, dtype: torch.dtype, device: torch.device
) -> AdapterSlots | None:
    """All adapter slots, empty."""
    if not config.enable_lora:
        return None
    read = AdapterReader(model_config, group.parallel, config.max_lora_rank, dtype, is_pinned=device.type == "cuda")
    with torch.inference_mode():
        stacks = LoraStacks(model_config, group.parallel, config.max_loras, config.max_lora_rank, dtype, device)
    logger.info("%d adapter slots of rank %d: %.1f MB", config.max_loras, config.max_lora_rank, stacks.num_bytes / 1e6)
    return AdapterSlots(stacks, StagedAdapters(read))


def _max_model_len(config: ShardConfig, model_config: ModelConfig) -> int:
    longest = model_config.longest_context
    if config.max_model_len > longest:
        raise ModelError(
            f"--max-model-len {config.max_model_len} is over the {longest} that the checkpoint allows "
            "(the larger of max_position_embeddings and model_max_length)."
        )
    return config.max_model_len or longest


def _load_model(
    config: ShardConfig, model_config: ModelConfig, group: RankGroup, device: torch.device
) -> tuple[FlashCohereForCausalLM, str]:
    """The model and its fingerprint."""
    attention = create_attention(config.attention_backend, model_config, device)
    model_dir = Path(config.model)
    if config.load_format == "dummy":
        dtype = resolve_dtype(config.dtype, model_config)
        source: WeightSource = DummyWeights(model_config, group.parallel, dtype, device)
        return FlashCohereForCausalLM("", model_config, source, attention), source.fingerprint()
    dtype = resolve_dtype(config.dtype, model_config, stored_dtype(model_dir))
    with LoadProgress(config.rank) as progress:
        source = Weights(model_dir, model_config, group.parallel, dtype, device, progress)
        return FlashCohereForCausalLM("", model_config, source, attention), source.fingerprint()


def _agree(mine: ShardFacts, group: RankGroup) -> ShardFacts:
    """Takes the fewest blocks of all ranks; raises ShardError naming the first fact that differs."""
    everyone = group.agree(dataclasses.asdict(mine))
    for rank, facts in enumerate(everyone):
        for name, value in facts.items():
            if name not in OWN_FACTS and value != everyone[0][name]:
                raise ShardError(f"rank {rank} has {name} {value}, but rank 0 has {everyone[0][name]}")
    return dataclasses.replace(mine, num_blocks=min(facts["num_blocks"] for facts in everyone))


class LoadProgress:
    """Shows how many tensors are read: a bar on a terminal, else a line for each tenth."""

    def __init__(self, rank: int) -> None:
        self._bar = tqdm(desc=f"rank {rank}: weights", unit="tensor") if sys.stderr.isatty() and rank == 0 else None
        self._tenths = 0

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` tensors are read."""
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)
        elif done * 10 // total > self._tenths:
            self._tenths = done * 10 // total
            logger.info("weights: %d of %d tensors (%d %%)", done, total, done * 100 // total)
