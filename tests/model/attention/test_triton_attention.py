import pytest
import torch

from model.attention import Seqlen, create_attention
from tests.model.kernels.interpreter import interpret_triton
from tests.model.kernels.paged import columns, paged_cache, plain_attention

interpret_triton()

from model.attention import triton as backend_module  # noqa: E402
from model.attention.triton import TritonAttention, choose_tilings  # noqa: E402
from model.config import ModelConfig  # noqa: E402

HEAD_DIM = 64


def make_seqlen(cached: list[int], new: list[int]) -> Seqlen:
    context = [old + add for old, add in zip(cached, new, strict=True)]
    return Seqlen(
        input_lengths=torch.tensor(new, dtype=torch.int32),
        cache_lengths=torch.tensor(cached, dtype=torch.int32),
        context_lengths=torch.tensor(context, dtype=torch.int32),
        num_decode_rows=sum(length == 1 for length in new),
        max_input_len=max(new),
        max_context_len=max(context),
    )


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("cached", "new"), [([9, 40, 0], [1, 1, 1]), ([3, 130, 0, 37], [1, 1, 50, 2]), ([0, 20], [33, 5])]
)
@pytest.mark.parametrize("block_size", [16, None])
def test_a_step_of_single_and_longer_rows(
    cached: list[int], new: list[int], window: int | None, block_size: int | None, config: ModelConfig
) -> None:
    backend = TritonAttention(config, block_size)
    seqlen = make_seqlen(cached, new)
    cache = paged_cache(seqlen.context_lengths.tolist(), 2, HEAD_DIM, backend.block_size)
    borders = torch.tensor([0, *new]).cumsum(0)
    query = columns(sum(new), 4 * HEAD_DIM)
    out = columns(sum(new), 4 * HEAD_DIM, fill=float("nan"))
    is_decode = seqlen.num_decode_rows == len(new)
    cu_seqlens_q = None if is_decode else borders.int()
    backend.forward(query, cache.k_cache, cache.v_cache, cache.block_tables, cu_seqlens_q, seqlen, window, out)
    for row, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        part = slice(int(borders[row]), int(borders[row + 1]))
        expected = plain_attention(query[part].reshape(-1, 4, HEAD_DIM), keys, values, window)
        torch.testing.assert_close(out[part].reshape(expected.shape).double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("window", [None, 70])
def test_the_tilings_of_a_hopper_gpu_give_the_same_numbers(
    window: int | None, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_module, "_capability", lambda device: (9, 0))
    backend, cached, new = TritonAttention(config), [140, 3], [1, 130]
    seqlen = make_seqlen(cached, new)
    cache = paged_cache(seqlen.context_lengths.tolist(), 1, 128, backend.block_size, torch.bfloat16)
    prefill, decode = backend_module.tilings_for(cache.k_cache)
    assert prefill.use_descriptors
    assert decode.block_n == 128
    query = columns(131, 2 * 128, torch.bfloat16)
    out = columns(131, 2 * 128, torch.bfloat16, fill=float("nan"))
    borders = torch.tensor([0, 1, 131], dtype=torch.int32)
    backend.forward(query, cache.k_cache, cache.v_cache, cache.block_tables, borders, seqlen, window, out)
    for part, keys, values in zip((slice(0, 1), slice(1, 131)), cache.keys, cache.values, strict=True):
        expected = plain_attention(query[part].reshape(-1, 2, 128), keys, values, window)
        torch.testing.assert_close(out[part].reshape(expected.shape).double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "capability", "has_descriptors", "keys_a_tile"),
    [
        (torch.bfloat16, 128, 256, (9, 0), True, 128),
        (torch.bfloat16, 128, 64, (9, 0), True, 64),  # a decode tile of 128 would span two blocks
        (torch.bfloat16, 128, 32, (9, 0), False, 64),
        (torch.bfloat16, 128, 128, (8, 0), False, 128),  # no copy engine before Hopper
        (torch.bfloat16, 64, 128, (10, 0), True, 64),
        (torch.bfloat16, 96, 128, (9, 0), False, 64),
        (torch.bfloat16, 256, 128, (9, 0), False, 64),  # 128 registers do not hold it
        (torch.bfloat16, 8, 128, (9, 0), False, 64),  # narrower than a tile of the tensor cores
        (torch.float32, 128, 128, (9, 0), False, 64),
    ],
)
def test_fast_tilings_are_chosen_only_where_the_kernels_can_run_them(
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    capability: tuple[int, int],
    has_descriptors: bool,
    keys_a_tile: int,
) -> None:
    prefill, decode = choose_tilings(dtype, head_dim, block_size, capability)
    assert (prefill.use_descriptors, prefill.max_registers == 128) == (has_descriptors, has_descriptors)
    assert decode.block_n == keys_a_tile


def test_auto_is_triton_on_a_gpu(config: ModelConfig) -> None:
    assert create_attention("auto", config, "cuda:0").name == "triton"


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig(
        model_type="cohere",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        vocab_size=64,
        layer_norm_eps=1e-5,
        logit_scale=1.0,
        rope_theta=1e4,
        attention_bias=False,
        use_qk_norm=False,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        model_max_length=None,
        sliding_window=None,
        layer_is_sliding=(False,),
        torch_dtype=None,
    )
