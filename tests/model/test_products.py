"""Which algorithm is taken, with algorithms that need no GPU."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from model.kernels.cublas_lt import Problem, Product
from model.linear import Linear
from model.products import MANY_ROWS, MAX_ADAPTED, TunedProducts, choose, row_counts


def test_the_fastest_is_taken_if_it_is_ahead_by_more_than_noise() -> None:
    assert choose([1.0, 0.9, 0.95]) == 1
    assert choose([1.0, 0.995, 1.2]) == 0
    assert choose([1.0]) == 0


class Adaptable:
    """An algorithm for `num_rows`, which applies to even numbers of rows."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def with_algorithm_of(self, product: Product) -> Product | None:
        self.measured = cast(Adaptable, product).num_rows
        return None if self.num_rows % 2 else cast(Product, self)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> TunedProducts:
    found = TunedProducts(Linear(torch.ones(2, 2)), torch.float32, False)
    monkeypatch.setattr(found, "_problem", lambda num_rows: cast(Problem, Adaptable(num_rows)))
    measured = {size: cast(Product, Adaptable(size)) for size in (32, 4 * MANY_ROWS)}
    monkeypatch.setattr(found, "_measured", {16: None} | measured)
    return found


@pytest.mark.parametrize(("num_rows", "measured"), [(18, 32), (32, 32), (MANY_ROWS, 4 * MANY_ROWS)])
def test_a_number_of_rows_takes_what_is_fastest_for_the_next_measured_one(
    tuned: TunedProducts, num_rows: int, measured: int
) -> None:
    found = cast(Adaptable, tuned.find(num_rows))
    assert (found.num_rows, found.measured) == (num_rows, measured)


@pytest.mark.parametrize("num_rows", [8, 16, 31, 600, MANY_ROWS - 2, 4 * MANY_ROWS + 2])
def test_torchs_product_is_kept_where_nothing_is_faster_or_nothing_applies(tuned: TunedProducts, num_rows: int) -> None:
    assert tuned.find(num_rows) is None


def test_what_is_kept_of_found_products_is_bounded(tuned: TunedProducts) -> None:
    for num_rows in range(MANY_ROWS, MANY_ROWS + 3 * MAX_ADAPTED):
        tuned.find(num_rows)
    assert len(tuned._adapted) <= MAX_ADAPTED


def test_what_is_measured_covers_the_rows_that_occur() -> None:
    assert row_counts(max_num_seqs=1, max_num_batched_tokens=512) == []
    assert row_counts(max_num_seqs=40, max_num_batched_tokens=8192) == [16, 32, 64, 8192]
    assert row_counts(max_num_seqs=4096, max_num_batched_tokens=4096) == [16, 32, 64, 128, 256, 512, 4096]


@pytest.mark.gpu
@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("num_rows", [2, 64, 300])
def test_every_algorithm_gives_the_product(num_rows: int, is_added: bool) -> None:
    weight = torch.randn(512, 256, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(num_rows, 256, dtype=torch.bfloat16, device="cuda")
    before = torch.randn(num_rows, 512, dtype=torch.float32, device="cuda")
    expected = x.double() @ weight.double().t() + is_added * before
    products = Problem(num_rows, weight, torch.float32, is_added).candidates()
    assert products
    for product in products:
        out = before.clone()
        product.run(x, weight, out)
        torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)
