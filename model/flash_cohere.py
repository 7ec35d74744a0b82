"""The Cohere and Cohere2 network: attention and MLP of a layer read one norm and leave in one product."""

from __future__ import annotations

import dataclasses

import torch

from model import layers
from model.attention import AttentionBackend, Seqlen, create_attention
from model.config import ModelConfig
from model.linear import Linear
from model.lora import AdapterBatchData
from model.rotary import CohereRotary
from model.selective import SelectiveCache
from model.vocabulary import VocabularyEmbedding, VocabularyHead
from model.weights import WeightSource

KVCache = list[tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """What every layer of a step reads beside its hidden states; see FlashCohereForCausalLM.forward."""

    positions: torch.Tensor | None
    cos_sin: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    block_tables: torch.Tensor
    slots: torch.Tensor
    seqlen: Seqlen
    selective: SelectiveCache | None
    adapter_data: AdapterBatchData | None


class CohereLayerNorm:
    """Mean-subtracting LayerNorm without bias."""

    def __init__(self, prefix: str, config: ModelConfig, weights: WeightSource) -> None:
        """Takes `prefix`.weight, `[hidden]`."""
        self.weight = weights.take(f"{prefix}.weight", (config.hidden_size,))
        self.eps = config.layer_norm_eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]` to a new `[T, hidden]`."""
        return layers.layer_norm(hidden_states, self.weight, self.eps)


class FlashCohereAttention:
    """The q, k, v columns of the input projection to the attention columns of the output projection."""

    def __init__(
        self,
        prefix: str,
        config: ModelConfig,
        weights: WeightSource,
        layer: int,
        backend: AttentionBackend,
    ) -> None:
        """Takes q_norm and k_norm under `prefix` where the configuration has them; the products are the layer's."""
        heads = weights.parallel.share("num_attention_heads", config.num_attention_heads)
        kv_heads = weights.parallel.kv_share(config.num_key_value_heads)
        self.num_heads = heads.stop - heads.start
        self.query_size = self.num_heads * config.head_dim
        self.key_size = (kv_heads.stop - kv_heads.start) * config.head_dim
        self.window = config.window(layer)
        self.has_rotary = config.has_rotary(layer)
        self.eps = config.layer_norm_eps
        self.backend = backend
        self.q_norm = self.k_norm = None
        if config.use_qk_norm:
            shapes = [(config.num_attention_heads, config.head_dim), (config.num_key_value_heads, config.head_dim)]
            self.q_norm = weights.take(f"{prefix}.q_norm.weight", shapes[0], heads)
            self.k_norm = weights.take(f"{prefix}.k_norm.weight", shapes[1], kv_heads)

    def forward(
        self, qkv: torch.Tensor, kv_cache: tuple[torch.Tensor, torch.Tensor], step: StepInputs, out: torch.Tensor
    ) -> None:
        """`qkv [T, (Hq + 2 Hkv) * D]` columns, overwritten; fills `out [T, Hq*D]` columns and the cache."""
        query = qkv[:, : self.query_size]
        if self.q_norm is not None and self.k_norm is not None:
            layers.head_norm(query, self.q_norm, self.eps)
            layers.head_norm(qkv[:, self.query_size : self.query_size + self.key_size], self.k_norm, self.eps)
        k_cache, v_cache = kv_cache if step.selective is None else step.selective.scratch(kv_cache)
        cos_sin = step.cos_sin if self.has_rotary else None
        layers.rotary_and_cache(qkv, step.positions, cos_sin, step.slots, k_cache, v_cache, self.num_heads)
        if step.selective is not None:
            step.selective.keep(kv_cache)
        self.backend.forward(
            query, k_cache, v_cache, step.block_tables, step.cu_seqlens_q, step.seqlen, self.window, out
        )


class CohereMLP:
    """The gate and up columns of the input projection to the MLP columns of the output projection."""

    def forward(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """`gate_up [T, 2 I]` columns, overwritten; fills `out [T, I]` columns with silu(gate) * up."""
        layers.silu_and_mul(gate_up, out)


class FlashCohereLayer:
    """y = x + Attention(LN(x)) + MLP(LN(x)), in two products: `[q|k|v|gate|up]` and `[o|down]`."""

    def __init__(
        self,
        prefix: str,
        config: ModelConfig,
        weights: WeightSource,
        layer: int,
        backend: AttentionBackend,
    ) -> None:
        """Takes every tensor under `prefix`."""
        self.layer = layer
        self.parallel = weights.parallel
        self.input_layernorm = CohereLayerNorm(f"{prefix}.input_layernorm", config, weights)
        self.self_attn = FlashCohereAttention(f"{prefix}.self_attn", config, weights, layer, backend)
        self.mlp = CohereMLP()
        self.input_projection = _input_projection(prefix, config, weights)
        self.output_projection = _output_projection(prefix, config, weights)
        self.qkv_size = self.self_attn.query_size + 2 * self.self_attn.key_size

    def forward(
        self, hidden_states: torch.Tensor, kv_cache: tuple[torch.Tensor, torch.Tensor], step: StepInputs
    ) -> torch.Tensor:
        """`[T, hidden]` to a new `[T, hidden]`, after the layer's one all-reduce."""
        normed = self.input_layernorm.forward(hidden_states)
        projected = self.input_projection.forward(normed)
        if step.adapter_data is not None:
            layers.add_lora_input(normed, projected, step.adapter_data, self.layer)
        mixed = projected.new_empty((projected.shape[0], self.output_projection.in_features))
        self.self_attn.forward(projected[:, : self.qkv_size], kv_cache, step, mixed[:, : self.self_attn.query_size])
        self.mlp.forward(projected[:, self.qkv_size :], mixed[:, self.self_attn.query_size :])
        residual = hidden_states if self.parallel.rank == 0 else None
        out = self.output_projection.forward(mixed, residual)
        if step.adapter_data is not None:
            layers.add_lora_output(mixed, out, step.adapter_data, self.layer)
        return self.parallel.all_reduce(out)


class FlashCohereModel:
    """Embedding, layers and the final norm."""

    def __init__(self, prefix: str, config: ModelConfig, weights: WeightSource, backend: AttentionBackend) -> None:
        """Takes every tensor under `prefix`."""
        self.embed_tokens = VocabularyEmbedding(f"{prefix}.embed_tokens", config, weights)
        self.rotary = CohereRotary(config.head_dim, config.rope_theta, config.longest_context, weights.device)
        self.layers = [
            FlashCohereLayer(f"{prefix}.layers.{layer}", config, weights, layer, backend)
            for layer in range(config.num_hidden_layers)
        ]
        self.norm = CohereLayerNorm(f"{prefix}.norm", config, weights)

    def forward(self, input_ids: torch.Tensor, kv_cache: KVCache, step: StepInputs) -> torch.Tensor:
        """int64 `[T]` ids to hidden states `[T, hidden]` before the final norm, which only needed rows get."""
        hidden_states = self.embed_tokens.forward(input_ids)
        for layer, layer_cache in zip(self.layers, kv_cache, strict=True):
            hidden_states = layer.forward(hidden_states, layer_cache, step)
        return hidden_states


class FlashCohereForCausalLM:
    """One rank's slice of a Cohere or Cohere2 model. `vocab_start` is the first id of its logits' columns."""

    def __init__(
        self, prefix: str, config: ModelConfig, weights: WeightSource, attention: AttentionBackend | None = None
    ) -> None:
        """Takes all of `weights`, whose names start with `prefix` (empty for a plain checkpoint).

        Raises:
            ModelError: a tensor is missing, left over or misshapen, or the ranks do not divide the heads.
        """
        dot = f"{prefix}." if prefix else ""
        self.config = config
        self.parallel = weights.parallel
        self.attention = attention or create_attention("auto", config, weights.device)
        self.model = FlashCohereModel(f"{dot}model", config, weights, self.attention)
        self.lm_head = VocabularyHead(f"{dot}lm_head.weight", config, weights, self.model.embed_tokens)
        self.vocab_start = self.lm_head.slice.start
        weights.finish()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seqlen_prefill: torch.Tensor | None,
        kv_cache: KVCache,
        block_tables: torch.Tensor,
        slots: torch.Tensor,
        seqlen: Seqlen,
        max_s: int,
        adapter_data: AdapterBatchData | None,
        prefill_cache_indices: torch.Tensor | None = None,
        lm_head_indices: torch.Tensor | None = None,
        skip_lm_head: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the tokens of a step through the model.

        Args:
            input_ids: int64 `[T]`, the sequences of the step one after another.
            position_ids: int64 `[T]`.
            cu_seqlen_prefill: int32 `[S+1]`, where each sequence starts in T; None in a pure decode step.
            kv_cache: per layer k and v, `[num_blocks, block_size, num_kv_heads_local, head_dim]`.
            block_tables: int32 `[S, max_blocks]`.
            slots: int64 `[T]`, the place of each token's K and V.
            seqlen: lengths of the sequences.
            max_s: the longest context, as in seqlen; the reference's contract carries both.
            adapter_data: the adapter slots of the T tokens; None: no token has one.
            prefill_cache_indices: int64, the tokens of T that enter the cache; None: all. Contexts must be new.
            lm_head_indices: int64 `[R]`, the rows of T that need logits; None: all.
            skip_lm_head: return hidden states after the final norm instead of logits.

        Returns:
            Logits, float32 `[R, vocab_local]` of this rank's vocabulary slice, times logit_scale and -inf in padding
            columns (or hidden states `[R, hidden]`), and None, where speculative logits would be.

        Raises:
            ValueError: prefill_cache_indices is given with a sequence that has a cached part.
        """
        assert max_s == seqlen.max_context_len, "max_s and seqlen disagree"
        selective = None
        if prefill_cache_indices is not None:
            selective = SelectiveCache(prefill_cache_indices, slots, seqlen, self.attention.block_size)
            block_tables, slots = selective.block_tables, selective.slots
        cos_sin, positions = self.model.rotary.for_step(position_ids)
        step = StepInputs(positions, cos_sin, cu_seqlen_prefill, block_tables, slots, seqlen, selective, adapter_data)
        hidden_states = self.model.forward(input_ids, kv_cache, step)
        if lm_head_indices is not None:
            hidden_states = hidden_states[lm_head_indices]
        hidden_states = self.model.norm.forward(hidden_states)
        return (hidden_states if skip_lm_head else self.lm_head.forward(hidden_states)), None

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """`[R, vocab_local]` of each rank to `[R, vocab_size]` on all ranks; a collective."""
        return self.parallel.all_gather(logits, dim=-1)[:, : self.config.vocab_size]


def _input_projection(prefix: str, config: ModelConfig, weights: WeightSource) -> Linear:
    """Rows of the stacked weight: this rank's `[q | k | v | gate | up]`."""
    heads = weights.parallel.share("num_attention_heads", config.num_attention_heads)
    kv_heads = weights.parallel.kv_share(config.num_key_value_heads)
    inner = weights.parallel.share("intermediate_size", config.intermediate_size)
    dim = config.head_dim
    queries, keys = slice(heads.start * dim, heads.stop * dim), slice(kv_heads.start * dim, kv_heads.stop * dim)
    query_rows, key_rows = config.num_attention_heads * dim, config.num_key_value_heads * dim
    parts = [
        ("self_attn.q_proj", query_rows, queries),
        ("self_attn.k_proj", key_rows, keys),
        ("self_attn.v_proj", key_rows, keys),
        ("mlp.gate_proj", config.intermediate_size, inner),
        ("mlp.up_proj", config.intermediate_size, inner),
    ]
    weight = torch.cat([weights.take(f"{prefix}.{n}.weight", (r, config.hidden_size), rows) for n, r, rows in parts])
    if not config.attention_bias:
        return Linear(weight)
    biases = [weights.take(f"{prefix}.{name}.bias", (rows,), part) for name, rows, part in parts[:3]]
    return Linear(weight, torch.cat([*biases, weight.new_zeros(2 * (inner.stop - inner.start))]))


def _output_projection(prefix: str, config: ModelConfig, weights: WeightSource) -> Linear:
    """Columns of the stacked weight: this rank's `[o | down]`; the bias is rank 0's, as the ranks' parts are summed."""
    heads = weights.parallel.share("num_attention_heads", config.num_attention_heads)
    inner = weights.parallel.share("intermediate_size", config.intermediate_size)
    o_columns = slice(heads.start * config.head_dim, heads.stop * config.head_dim)
    query_size = config.num_attention_heads * config.head_dim
    o_weight = weights.take(f"{prefix}.self_attn.o_proj.weight", (config.hidden_size, query_size), None, o_columns)
    down_shape = (config.hidden_size, config.intermediate_size)
    weight = torch.cat([o_weight, weights.take(f"{prefix}.mlp.down_proj.weight", down_shape, None, inner)], dim=1)
    if not config.attention_bias:
        return Linear(weight)
    bias = weights.take(f"{prefix}.self_attn.o_proj.bias", (config.hidden_size,))
    return Linear(weight, bias if weights.parallel.rank == 0 else None)
