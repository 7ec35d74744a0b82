"""A generation request as the caller wrote it, free of protobuf; None means that the field was not set."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

MAX_MESSAGE_BYTES = 32 * 2**20  # of a public call, either way


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What `validation` judges. Field paths in errors are those of the message, as in `stopping.stop[2]`."""

    request_id: str = ""
    model: str = ""
    temperature: float | None = None
    top_k: int = 0
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False
    num_logprobs: int | None = None
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    n: int | None = None
    priority: int = 0
    adapter: str = ""  # empty: the base model
    # Fields of the API that this version does not serve, by path, as far as they were set; None: a message was set.
    unserved: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The served model's facts that a request is judged against."""

    model_name: str
    vocab_size: int
    max_model_len: int  # tokens of prompt and answer together
    max_kv_tokens: int  # tokens that one sequence can hold in the KV pool
    max_num_seqs: int
    max_message_bytes: int
    longest_token_bytes: int  # of any token's text
    eos_token_ids: frozenset[int]
    default_temperature: float = 1.0
    max_loras: int = 0  # adapters in one step; 0: LoRA is off

    @property
    def max_total_tokens(self) -> int:
        """Most tokens of prompt and answer together that can ever run."""
        return min(self.max_model_len, self.max_kv_tokens)

    @property
    def max_prompt_bytes(self) -> int:
        """A longer text cannot fit: every token stands for at most `longest_token_bytes` bytes of normalized text, and
        composing (NFC) shortens UTF-8 at most to a third."""
        return 3 * self.longest_token_bytes * self.max_total_tokens
