"""The table, the JSON and the file."""

import json
from pathlib import Path

from router.bench.client import Record
from router.bench.options import parse_options
from router.bench.report import render_table, result_json, save_json
from router.bench.summary import summarise

RECORDS = [Record(10, 5.0, 5.0, 5.4, [5.1, 5.4], 2), Record(10, 5.0, 5.0, 5.0, [], 0, "UNAVAILABLE: draining")]


def test_table_shows_rates_errors_and_the_asked_measures_in_milliseconds() -> None:
    options = parse_options(["--percentile-metrics", "ttft,itl", "--metric-percentiles", "99", "--goodput", "ttft:150"])
    summary = summarise(5.0, RECORDS, options.metric_percentiles, options.goodput_s)
    lines = render_table(options, summary, {"cpu": "a chip"}).splitlines()
    table = {line.split("  ")[0]: line.split()[-4:] for line in lines if line}
    assert "1 x UNAVAILABLE: draining" in next(line for line in lines if line.startswith("failed"))
    assert any(line.startswith("output throughput") and line.endswith("5.0 tok/s") for line in lines)
    assert any(line.startswith("goodput (ttft 150 ms)") and line.endswith("2.50 req/s") for line in lines)
    assert table["time to first token (ttft)"] == ["100.00"] * 4
    assert table["inter-token latency (itl)"] == ["300.00"] * 4
    assert not any("e2el" in line for line in lines)


def test_json_holds_vllms_keys_and_details_only_if_asked() -> None:
    options = parse_options(["--metric-percentiles", "90", "--save-detailed"])
    summary = summarise(5.0, RECORDS, options.metric_percentiles, options.goodput_s)
    result = result_json(options, summary, {"cpu": "a chip"}, 5.0, RECORDS)
    assert result["completed"] == 1 and result["failed"] == 1 and result["request_rate"] == "inf"
    assert abs(result["p90_ttft_ms"] - 100) < 1e-6 and abs(result["median_itl_ms"] - 300) < 1e-6
    assert [round(value, 6) for value in result["requests"][0]["arrivals"]] == [0.1, 0.4]
    brief = parse_options(["--save-result"])
    assert "requests" not in result_json(brief, summary, {}, 5.0, RECORDS)


def test_file_goes_to_the_result_folder_under_the_given_name(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    options = parse_options(["--result-dir", str(folder), "--result-filename", "run.json"])
    assert save_json(options, {"a": 1}) == folder / "run.json"
    assert json.loads((folder / "run.json").read_text()) == {"a": 1}
    named = parse_options(
        ["--result-dir", str(folder), "--request-rate", "4", "--max-concurrency", "8", "--label", "x"]
    )
    assert save_json(named, {}).name.startswith("x-4qps-concurrency8-")
