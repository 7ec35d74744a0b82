"""transformers' `generate` on a workload, one request after another or as one padded batch."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from bench.workloads import Request, Workload


class Generator(Protocol):
    """The one method of transformers' models that is used here."""

    def generate(self, **arguments: object) -> torch.Tensor:
        """int64 [S, prompt + new tokens]."""
        ...


def load_model(model_dir: Path, dtype: str) -> Generator:
    """The checkpoint as transformers' own class, on the CPU."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Generator = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    return model


class TransformersEngine:
    """`is_padded`: all requests in one batch, padded on the left, which runs to the longest output asked for."""

    def __init__(self, model: Generator, is_padded: bool) -> None:
        self._model = model
        self._is_padded = is_padded

    @property
    def name(self) -> str:
        """Its name in tables."""
        return "transformers, padded batch" if self._is_padded else "transformers, one by one"

    def run(self, workload: Workload) -> list[list[int]]:
        """Generated ids per request, cut to the number asked for."""
        if self._is_padded:
            return self._generate(workload.requests)
        return [ids for request in workload.requests for ids in self._generate([request])]

    def _generate(self, requests: list[Request]) -> list[list[int]]:
        input_ids, attention_mask = pad_left([request.prompt for request in requests])
        num_new = max(request.num_output_tokens for request in requests)
        # With the most new tokens given and no end-of-sequence token, every row gets exactly that many.
        generated = self._model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            do_sample=False,
            min_new_tokens=num_new,
            max_new_tokens=num_new,
            eos_token_id=None,
            pad_token_id=0,
        )
        rows: list[list[int]] = generated[:, input_ids.shape[1] :].tolist()
        return [row[: request.num_output_tokens] for row, request in zip(rows, requests, strict=True)]


def pad_left(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [S, longest] ids with zeros in front of the shorter prompts, and the mask of the real places."""
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows), torch.tensor(mask)
