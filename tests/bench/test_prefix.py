"""The figures and the page of the prefix benchmark."""

from __future__ import annotations

from bench.prefix import PrefixResult, render_page


def test_the_page_has_medians_the_median_of_the_rounds_ratios_and_the_hit_rate() -> None:
    result = PrefixResult(320, cold_s=[0.1, 0.3, 0.2], cached_s=[0.05, 0.03, 0.1], num_queries=960, num_hits=864)
    page = render_page([result], {"cpu": "a chip"})
    row = next(line for line in page.splitlines() if line.startswith("| 320 tokens"))
    # Ratios of the rounds: 2, 10 and 2.
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["320 tokens", "200.0", "50.0", "2.0", "90.0%"]
    assert "medians of 3 rounds" in page and "cpu a chip" in page
