"""The arithmetic between the products against float64, and what a layer sends between ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model import layers
from model.attention import Seqlen
from model.parallel import TensorParallel
from model.rotary import CohereRotary
from tests.model.checkpoints import cohere, cohere2, save
from tests.model.generation import Row, forward, load, nan_cache


def test_layer_norm_subtracts_a_mean_of_a_hundred_in_bfloat16() -> None:
    x = (100 + 0.1 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0))).bfloat16()
    weight = torch.linspace(0.5, 1.5, 64).bfloat16()
    exact = x.double() - x.double().mean(-1, keepdim=True)
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    normed = layers.layer_norm(x, weight, 1e-5)
    assert normed.dtype == torch.bfloat16
    assert (normed.double() - exact).abs().max() < 0.02 * exact.abs().max()


def test_head_norm_has_a_weight_row_for_each_head() -> None:
    heads = torch.randn(3, 2 * 8)
    weight = torch.randn(2, 8)
    rows = heads.clone().view(3, 2, 8)
    exact = torch.nn.functional.layer_norm(rows, (8,), None, None, 1e-5) * weight
    layers.head_norm(heads, weight, 1e-5)
    assert torch.allclose(heads.view(3, 2, 8), exact, atol=1e-6)


@pytest.mark.parametrize("position", [0, 5, 4000])
def test_rotary_turns_adjacent_pairs(position: int) -> None:
    rotary = CohereRotary(8, 10000.0, 4096, torch.device("cpu"))
    heads = torch.randn(1, 2, 8)
    before = heads.double().clone()
    layers.rotate_pairs(heads, rotary.cos_sin[torch.tensor([position])])
    for pair in range(4):
        angle = torch.tensor(position * 10000.0 ** (-2 * pair / 8), dtype=torch.float64)
        even, odd = before[0, :, 2 * pair], before[0, :, 2 * pair + 1]
        assert torch.allclose(heads[0, :, 2 * pair].double(), even * angle.cos() - odd * angle.sin(), atol=2e-3)
        assert torch.allclose(heads[0, :, 2 * pair + 1].double(), odd * angle.cos() + even * angle.sin(), atol=2e-3)


class CountedParallel(TensorParallel):
    """Two ranks by name, alone in truth: counts collectives and joins nothing."""

    calls: list[tuple[int, ...]] = []  # noqa: RUF012

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls.append(tuple(tensor.shape))
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([tensor, tensor], dim)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_layer_has_exactly_one_all_reduce_and_the_embedding_one(tmp_path: Path, num_layers: int) -> None:
    folder = save(cohere(num_hidden_layers=num_layers, attention_bias=True, use_qk_norm=True), tmp_path)
    CountedParallel.calls.clear()
    model = load(CountedParallel(0, 2), str(folder))
    row = Row([5, 6, 7], 4, [1])
    forward(model, nan_cache(model, 2), [row], [3])
    assert CountedParallel.calls == [(3, 32)] * (num_layers + 1)


def test_only_the_full_layer_of_cohere2_sees_beyond_the_window(tmp_path: Path) -> None:
    """With window 8 and pattern 4 a change of token 0 reaches the end of 40 tokens through the full layer alone."""
    prompt = [5, *range(10, 49)]
    changed = [6, *prompt[1:]]
    kinds = {"mixed": None, "sliding": ["sliding_attention"] * 4}
    for name, layer_types in kinds.items():
        overrides = {"layer_types": layer_types} if layer_types else {}
        folder = save(cohere2(**overrides), tmp_path / name)
        model = load(TensorParallel(), str(folder))
        ends = [forward(model, nan_cache(model, 4), [Row(p, 41, [3, 1, 2])], [40])[0][-1] for p in (prompt, changed)]
        assert torch.equal(*ends) == (name == "sliding")


def test_only_chosen_tokens_enter_the_cache_and_only_chosen_rows_have_logits(tmp_path: Path) -> None:
    model = load(TensorParallel(), str(save(cohere(), tmp_path)))
    tokens = torch.tensor([5, 6, 7, 8, 9])
    ones = torch.tensor([5], dtype=torch.int32)
    seqlen = Seqlen(ones, ones - 5, ones, num_decode_rows=0, max_input_len=5, max_context_len=5)
    borders, tables = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([[1]], dtype=torch.int32)
    slots = torch.arange(16, 21)

    def run(cache: list[tuple[torch.Tensor, torch.Tensor]], **options: torch.Tensor | bool) -> torch.Tensor:
        return model.forward(  # type: ignore[no-any-return]
            tokens,
            torch.arange(5),
            borders,
            cache,
            tables,
            slots,
            seqlen,
            5,
            None,
            **options,  # type: ignore[arg-type]
        )[0]

    with torch.inference_mode():
        whole = run(nan_cache(model, 2))
        cache = nan_cache(model, 2)
        chosen = run(cache, prefill_cache_indices=torch.tensor([3, 4]), lm_head_indices=torch.tensor([4]))
        hidden = run(nan_cache(model, 2), skip_lm_head=True)
    assert torch.equal(chosen[0], whole[4]) and chosen.shape[0] == 1
    for k_cache, v_cache in cache:
        for part in (k_cache, v_cache):
            written = ~part[1].isnan().any(-1).any(-1)
            assert written.nonzero().flatten().tolist() == [3, 4]
    assert hidden.shape == (5, 32)
