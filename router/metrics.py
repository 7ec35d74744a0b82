"""What the router measures, in a registry of its own; see docs/metrics.md. Fed on the event loop, read by scrapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.adapter_places import AdapterLoad
from router.messages import FinishReason, RequestDone
from router.series import Counter, Gauge, Histogram

TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40, 80),
)  # fmt: skip
REQUEST_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 320, 640, 1280, 2560),
)  # fmt: skip
STEP_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
LOAD_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
FINISH_REASONS = ("stop", "length")
MAX_ADAPTER_LABELS = 1000
OTHER_ADAPTERS = "other"


@dataclasses.dataclass(slots=True)
class LoraInfo:
    """`vllm:lora_requests_info`: names in labels and a wall-clock time as the value, as endpoint pickers read it."""

    max_loras: int = 0
    load: AdapterLoad = dataclasses.field(default_factory=AdapterLoad)
    changed_s: float = 0.0

    def family(self) -> Metric:
        """Its one series."""
        names = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of running and waiting requests.", labels=names)
        load = self.load
        family.add_metric([str(self.max_loras), ",".join(load.running), ",".join(load.waiting)], self.changed_s)
        return family


class Metrics(Collector):
    """Every series. `model_name` labels the vLLM aliases, which `has_aliases` turns on."""

    def __init__(self, model_name: str = "", has_aliases: bool = False) -> None:
        self.running = Gauge("cohort_requests_running", "Sequences in the running batch.")
        self.waiting = Gauge("cohort_requests_waiting", "Sequences waiting for a place in the running batch.")
        self.kv_usage = Gauge("cohort_kv_cache_usage_ratio", "Share of the KV blocks in use, 0 to 1.")
        self.successes = Counter("cohort_request_success", "Sequences that ended well.", ["finish_reason"])
        self.failures = Counter("cohort_request_failure", "Requests that ended with an error.", ["code"])
        self.prompt = Counter("cohort_prompt_tokens", "Prompt tokens of the requests that began to run.")
        self.generated = Counter("cohort_generation_tokens", "Tokens generated.")
        self.ttft = Histogram(
            "cohort_time_to_first_token_seconds", "From a request's arrival to its first token.", REQUEST_SECONDS
        )
        self.itl = Histogram(
            "cohort_inter_token_latency_seconds", "Between one token of a sequence and the next.", TOKEN_SECONDS
        )
        self.e2e = Histogram("cohort_e2e_request_latency_seconds", "From arrival to the end.", REQUEST_SECONDS)
        self.queue = Histogram("cohort_queue_time_seconds", "From arrival to the first step.", REQUEST_SECONDS)
        self.prefill = Histogram("cohort_prefill_time_seconds", "From the first step to a token.", REQUEST_SECONDS)
        self.decode = Histogram("cohort_decode_time_seconds", "From the first token to the last.", REQUEST_SECONDS)
        self.step_time = Histogram("cohort_step_seconds", "A step on the device.", STEP_SECONDS, ["kind"])
        self.idle = Histogram("cohort_step_gpu_idle_seconds", "The device idle before a step.", STEP_SECONDS)
        self.step_tokens = Histogram("cohort_step_tokens", "Tokens computed in a step.", STEP_TOKENS)
        self.preemptions = Counter("cohort_preemptions", "Sequences put back to wait because blocks ran out.")
        self.shards_up = Gauge("cohort_shard_up", "Whether the shard is connected.", ["rank"])
        self.startup = Gauge("cohort_startup_phase_seconds", "Duration of a start-up phase.", ["phase"])
        self.adapter_requests = Counter("cohort_adapter_requests", "Requests for an adapter.", ["adapter"])
        self.adapter_generated = Counter("cohort_adapter_generation_tokens", "Tokens of an adapter.", ["adapter"])
        self.adapter_load_time = Histogram(
            "cohort_adapter_load_seconds", "An adapter's way to host memory of every shard.", LOAD_SECONDS
        )
        self.adapters = Gauge("cohort_adapters", "Known adapters by the fastest place that they are in.", ["tier"])
        self._adapter_names: set[str] = set()
        self._lora_info = LoraInfo()
        rpc = ["grpc_type", "grpc_service", "grpc_method"]
        self.started = Counter("grpc_server_started", "Calls begun.", rpc)
        self.handled = Counter("grpc_server_handled", "Calls ended, whatever the status.", [*rpc, "grpc_code"])
        for reason in FINISH_REASONS:
            self.successes.add(0, (reason,))
        self._model = (("model_name", model_name),)
        self._has_aliases = has_aliases
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def step(self, kind: str, step_s: float, device_idle_s: float, num_tokens: int) -> None:
        """One step; `kind` is prefill, decode or mixed."""
        self.step_time.observe(step_s, (kind,))
        self.idle.observe(device_idle_s)
        self.step_tokens.observe(num_tokens)

    def preempted(self, n: int = 1) -> None:
        """`n` sequences were put back to wait."""
        self.preemptions.add(n)

    def set_load(self, running: int, waiting: int, kv_usage: float) -> None:
        """The scheduler's state after a step."""
        self.running.set(running)
        self.waiting.set(waiting)
        self.kv_usage.set(kv_usage)

    def first_token(self, seconds: float) -> None:
        """A request's first token, `seconds` after its arrival."""
        self.ttft.observe(seconds)

    def token_latency(self, seconds: float) -> None:
        """A sequence's next token, `seconds` after the one before."""
        self.itl.observe(seconds)

    def request_done(self, finish_reasons: Iterable[FinishReason], done: RequestDone) -> None:
        """A request ended well; one finish reason per sequence."""
        for reason in finish_reasons:
            self.successes.add(1, (reason.value,))
        timing = done.timing
        self.e2e.observe(timing.e2e_s)
        self.queue.observe(timing.queue_s)
        self.prefill.observe(timing.prefill_s)
        self.decode.observe(timing.decode_s)

    def request_failed(self, code: str) -> None:
        """A request ended with this status code, for example UNAVAILABLE."""
        self.failures.add(1, (code,))

    def prompt_tokens(self, n: int) -> None:
        """A request of `n` prompt tokens begins to run."""
        self.prompt.add(n)

    def generation_tokens(self, n: int) -> None:
        """`n` tokens were generated."""
        self.generated.add(n)

    def adapter_request(self, name: str) -> None:
        """A request for an adapter was taken."""
        self.adapter_requests.add(1, (self._adapter_label(name),))

    def adapter_tokens(self, name: str, n: int) -> None:
        """`n` tokens were generated with an adapter."""
        self.adapter_generated.add(n, (self._adapter_label(name),))

    def adapter_gone(self, name: str) -> None:
        """A name was unloaded; its series end."""
        self._adapter_names.discard(name)
        self.adapter_requests.remove((name,))
        self.adapter_generated.remove((name,))

    def adapter_loaded(self, seconds: float) -> None:
        """Every shard has staged an adapter, after `seconds`."""
        self.adapter_load_time.observe(seconds)

    def set_adapter_tiers(self, tiers: Mapping[str, int]) -> None:
        """How many known adapters each tier has."""
        for tier, count in tiers.items():
            self.adapters.set(count, (tier,))

    def set_adapter_load(self, load: AdapterLoad, now_s: float) -> None:
        """Which adapters sequences run with or wait for, at a time of the wall clock."""
        self._lora_info.load, self._lora_info.changed_s = load, now_s

    def set_max_loras(self, max_loras: int) -> None:
        """Adapters that one step may have; 0: LoRA is off."""
        self._lora_info.max_loras = max_loras

    def _adapter_label(self, name: str) -> str:
        """Names are bounded: what comes after the first MAX_ADAPTER_LABELS is counted together."""
        if name not in self._adapter_names:
            if len(self._adapter_names) >= MAX_ADAPTER_LABELS:
                return OTHER_ADAPTERS
            self._adapter_names.add(name)
        return name

    def shard_up(self, rank: int, is_up: bool) -> None:
        """A shard was connected or lost."""
        self.shards_up.set(float(is_up), (str(rank),))

    def startup_phase(self, phase: str, seconds: float) -> None:
        """How long a phase of the start took."""
        self.startup.set(seconds, (phase,))

    def rpc_started(self, method: str, kind: str = "unary") -> None:
        """A call of `package.Service/Method` began; `kind` is unary or server_stream."""
        service, _, name = method.rpartition("/")
        self.started.add(1, (kind, service, name))

    def rpc_handled(self, method: str, code: str, kind: str = "unary") -> None:
        """A call ended with this status code, spelt as grpc-go does: OK, InvalidArgument."""
        service, _, name = method.rpartition("/")
        self.handled.add(1, (kind, service, name, code.title().replace("_", "") if code != "OK" else code))

    def collect(self) -> Iterator[Metric]:
        """Every family of the exposition."""
        for series in self._series():
            yield series.family()
        if self._has_aliases:
            for name, series in self._aliases():
                yield series.family(name, self._model)
            yield self.successes.family("vllm:request_success", self._model, ["finished_reason"])
            if self._lora_info.max_loras:
                yield self._lora_info.family()

    def _series(self) -> Iterator[Counter | Gauge | Histogram]:
        return (value for value in vars(self).values() if isinstance(value, Counter | Gauge | Histogram))

    def _aliases(self) -> list[tuple[str, Counter | Gauge | Histogram]]:
        return [
            ("vllm:num_requests_running", self.running),
            ("vllm:num_requests_waiting", self.waiting),
            ("vllm:kv_cache_usage_perc", self.kv_usage),
            ("vllm:gpu_cache_usage_perc", self.kv_usage),
            ("vllm:num_preemptions", self.preemptions),
            ("vllm:prompt_tokens", self.prompt),
            ("vllm:generation_tokens", self.generated),
            ("vllm:time_to_first_token_seconds", self.ttft),
            ("vllm:inter_token_latency_seconds", self.itl),
            ("vllm:e2e_request_latency_seconds", self.e2e),
            ("vllm:request_queue_time_seconds", self.queue),
            ("vllm:request_prefill_time_seconds", self.prefill),
            ("vllm:request_decode_time_seconds", self.decode),
        ]
