"""Between the public messages and the router's plain values."""

from __future__ import annotations

from collections.abc import Iterator

from cohort.v1 import generation_pb2 as pb
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from router.errors import Unimplemented
from router.messages import Finish, FinishReason, RequestDone, SequenceDelta, TokenLogprob
from router.request import GenerationRequest

FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
MAX_DELTA_TOKENS = 1024  # per message of a stream, so that merged deltas stay far below a client's 4 MiB


def to_request(message: pb.GenerateRequest | pb.ChatRequest) -> GenerationRequest:
    """Everything of a request but its prompt. Repeated fields are not copied, so a huge one costs nothing yet."""
    sampling, stopping, output = message.sampling, message.stopping, message.output
    for part, path in ((message, ""), (sampling, "sampling."), (stopping, "stopping."), (output, "output.")):
        refuse_unknown_fields(part, path)
    return GenerationRequest(
        request_id=message.request_id,
        model=message.model,
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        seed=sampling.seed if sampling.HasField("seed") else None,
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        min_tokens=stopping.min_tokens,
        stop=stopping.stop,
        stop_token_ids=stopping.stop_token_ids,
        ignore_eos=stopping.ignore_eos,
        include_stop_in_output=stopping.include_stop_in_output,
        num_logprobs=output.logprobs if output.HasField("logprobs") else None,
        return_token_ids=output.return_token_ids,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        n=message.n if message.HasField("n") else None,
        priority=message.priority,
        adapter=message.adapter,
        unserved=_unserved(message),
    )


def refuse_unknown_fields(message: Message, path: str = "") -> None:
    """Raises Unimplemented for a field that a newer client knows and this server would ignore."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise Unimplemented(f"{path}field {unknown[0].field_number} is not known to this version; leave it unset")


def _unserved(message: pb.GenerateRequest | pb.ChatRequest) -> dict[str, object]:
    sampling = message.sampling
    found: dict[str, object] = {
        "cache_salt": message.cache_salt,
        "sampling.min_p": sampling.min_p,
        "sampling.frequency_penalty": sampling.frequency_penalty,
        "sampling.presence_penalty": sampling.presence_penalty,
    }
    if sampling.HasField("typical_p"):
        found["sampling.typical_p"] = sampling.typical_p
    if sampling.HasField("repetition_penalty"):
        found["sampling.repetition_penalty"] = sampling.repetition_penalty
    if sampling.logit_bias:
        found["sampling.logit_bias"] = None
    if message.output.HasField("prompt_logprobs"):
        found["output.prompt_logprobs"] = None
    if message.HasField("adapter_merge"):
        found["adapter_merge"] = None
    if message.HasField("constraint"):
        found["constraint"] = None
    return found


def deltas(delta: SequenceDelta, has_token_ids: bool) -> Iterator[pb.SequenceDelta]:
    """The messages that carry `delta`: none if the caller asked for nothing that is in it, several if it is long."""
    token_ids = delta.token_ids if has_token_ids else []
    count = max(len(token_ids), len(delta.logprobs))
    if not count:
        if delta.text:
            yield pb.SequenceDelta(index=delta.index, text=delta.text)
        return
    for start in range(0, count, MAX_DELTA_TOKENS):
        end = start + MAX_DELTA_TOKENS
        yield pb.SequenceDelta(
            index=delta.index,
            text="" if start else delta.text,
            token_ids=token_ids[start:end],
            logprobs=[to_logprob(logprob) for logprob in delta.logprobs[start:end]],
        )


def to_logprob(logprob: TokenLogprob) -> pb.TokenLogprob:
    """One token's log-probability."""
    top = [pb.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top]
    return pb.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, top=top)


def to_matched_stop(finish: Finish) -> pb.MatchedStop | None:
    """What a sequence stopped at, None if it did not."""
    if finish.matched_stop is None:
        return None
    if isinstance(finish.matched_stop, str):
        return pb.MatchedStop(text=finish.matched_stop)
    return pb.MatchedStop(token_id=finish.matched_stop)


def to_finished(index: int, finish: Finish) -> pb.SequenceFinished:
    """The end of sequence `index`."""
    reason = FINISH_REASONS[finish.reason]
    return pb.SequenceFinished(index=index, finish_reason=reason, matched_stop=to_matched_stop(finish))


def to_usage(done: RequestDone) -> pb.Usage:
    """Token counts."""
    return pb.Usage(
        prompt_tokens=done.prompt_tokens,
        completion_tokens=done.completion_tokens,
        cached_tokens=done.cached_tokens,
    )


def to_timing(done: RequestDone) -> pb.Timing:
    """Where the time went."""
    timing = done.timing
    return pb.Timing(
        queue_s=timing.queue_s,
        prefill_s=timing.prefill_s,
        decode_s=timing.decode_s,
        time_to_first_token_s=timing.time_to_first_token_s,
        e2e_s=timing.e2e_s,
    )
