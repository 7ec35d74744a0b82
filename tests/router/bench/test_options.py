"""Flags and their refusals."""

import math

import pytest

from router.bench.options import parse_options


def test_defaults_are_those_of_vllm_bench_serve() -> None:
    options = parse_options([])
    assert (options.num_prompts, options.input_len, options.output_len) == (1000, 1024, 128)
    assert math.isinf(options.request_rate) and options.burstiness == 1.0
    assert options.max_concurrency is None and not options.ignore_eos and options.seed == 0
    assert not options.save_result


def test_flags_reach_their_fields() -> None:
    line = (
        "--host h --port 7 --model m --num-prompts 9 --request-rate 2.5 --burstiness 0.5 --max-concurrency 4 "
        "--random-input-len 11 --random-output-len 12 --random-range-ratio 0.3 --random-prefix-len 5 --seed 6 "
        "--ignore-eos --save-result --result-dir d --percentile-metrics ttft,itl --metric-percentiles 25,99.9 "
        "--goodput ttft:200 e2el:3000 --num-warmups 2 --num-processes 3 --channels per-client --metadata a=b"
    )
    options = parse_options(line.split())
    assert options.address == "h:7" and options.model == "m"
    assert (options.num_prompts, options.request_rate, options.burstiness, options.max_concurrency) == (9, 2.5, 0.5, 4)
    assert (options.input_len, options.output_len, options.range_ratio, options.prefix_len) == (11, 12, 0.3, 5)
    assert options.seed == 6 and options.ignore_eos and options.save_result and options.result_dir == "d"
    assert options.percentile_metrics == ("ttft", "itl") and options.metric_percentiles == (25.0, 99.9)
    assert options.goodput_s == {"ttft": 0.2, "e2el": 3.0}
    assert options.num_warmups == 2 and options.num_processes == 3 and options.has_channel_per_client
    assert options.metadata == {"a": "b"}


def test_no_more_processes_than_requests_under_way() -> None:
    assert parse_options(["--num-processes", "8", "--max-concurrency", "3"]).num_processes == 3
    assert parse_options(["--num-processes", "8", "--num-prompts", "1"]).num_processes == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-prompts", "0"],
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--burstiness", "0"],
        ["--max-concurrency", "0"],
        ["--random-range-ratio", "1.5"],
        ["--percentile-metrics", "ttft,speed"],
        ["--metric-percentiles", "101"],
        ["--goodput", "itl:5"],
        ["--goodput", "ttft"],
        ["--metadata", "novalue"],
        ["--no-such-flag"],
    ],
)
def test_a_bad_flag_ends_with_status_2_and_its_name(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_options(flags)
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err
