"""Train the demo models on the facts: `python -m demo.train [cohere] [cohere2]`, two minutes each on two cores.

The networks are transformers' own Cohere and Cohere2 classes, so a right sentence out of our server says that our
maths agrees with theirs. In each folder config.json and generation_config.json are the input; the tokenizer and the
weights are written.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from demo.facts import SYSTEM_MESSAGE, Fact, load_facts, raw_prompt
from demo.tokenizer import write_tokenizer

DEMO_DIR = Path(__file__).parent
MODELS = ("cohere", "cohere2")
IGNORED = -100  # a label that the loss skips: prompt and padding

SEED = 20
BATCH_SIZE = 48
MAX_STEPS = 2000
PEAK_LEARNING_RATE = 3e-3
NUM_WARMUP_STEPS = 50
STEPS_PER_CHECK = 25
# Least distance, in logits, from every answer token to its strongest rival: enough for bfloat16 to agree.
LEAST_MARGIN = 4.0


@dataclass(frozen=True)
class Example:
    """A prompt as one of the served forms tokenizes it, and the answer with its end-of-turn token."""

    prompt_ids: list[int]
    answer_ids: list[int]


def chat_prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Return the ids of a conversation up to where the answer begins."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def examples_of(fact: Fact, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Return the fact as a plain prompt, as a chat, and as a chat with a system message."""
    user = {"role": "user", "content": fact.question}
    system = {"role": "system", "content": SYSTEM_MESSAGE}
    prompts = [
        list(tokenizer(raw_prompt(fact.question))["input_ids"]),
        chat_prompt_ids(tokenizer, [user]),
        chat_prompt_ids(tokenizer, [system, user]),
    ]
    answer = [*tokenizer(fact.answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return [Example(prompt, answer) for prompt in prompts]


def collate(examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `input_ids` and `labels`, int64 [N, L], padded on the right; labels are the next tokens of answers."""
    longest = max(len(example.prompt_ids) + len(example.answer_ids) for example in examples) - 1
    input_ids = torch.zeros(len(examples), longest, dtype=torch.int64)
    labels = torch.full((len(examples), longest), IGNORED)
    for row, example in enumerate(examples):
        tokens = torch.tensor(example.prompt_ids + example.answer_ids)
        input_ids[row, : len(tokens) - 1] = tokens[:-1]
        labels[row, len(example.prompt_ids) - 1 : len(tokens) - 1] = torch.tensor(example.answer_ids)
    return input_ids, labels


def batches(examples: list[Example]) -> Iterator[list[Example]]:
    """Yield shuffled batches without end, in an order that only SEED decides."""
    order = random.Random(SEED)
    while True:
        shuffled = order.sample(examples, len(examples))
        for start in range(0, len(shuffled), BATCH_SIZE):
            yield shuffled[start : start + BATCH_SIZE]


def learning_rate(step: int) -> float:
    """Return the rate at a step: a linear rise, then a cosine down to a tenth of the peak."""
    rise = min(1.0, (step + 1) / NUM_WARMUP_STEPS)
    fall = 0.55 + 0.45 * math.cos(math.pi * step / MAX_STEPS)
    return PEAK_LEARNING_RATE * rise * fall


def answer_logits(model: PreTrainedModel, examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits [A, vocab_size] that predict the A answer tokens from the true ones, and those tokens."""
    input_ids, labels = collate(examples)
    # No attention mask: the padding comes last, so that no real token can see it.
    logits = model(input_ids=input_ids, use_cache=False).logits
    is_answer = labels != IGNORED
    return logits[is_answer], labels[is_answer]


@torch.no_grad()
def margins(model: PreTrainedModel, examples: list[Example]) -> torch.Tensor:
    """Return, per answer token, its logit minus the best other one; greedy decoding is right where all are positive."""
    found = []
    for start in range(0, len(examples), BATCH_SIZE):
        logits, tokens = answer_logits(model, examples[start : start + BATCH_SIZE])
        columns = tokens[:, None]
        rival = logits.scatter(1, columns, -math.inf).amax(dim=1)
        found.append(logits.gather(1, columns)[:, 0] - rival)
    return torch.cat(found).float()


def train(
    model: PreTrainedModel,
    examples: list[Example],
    report: Callable[[str], None],
    least_margin: float = LEAST_MARGIN,
    sharpness: float = 1.0,
) -> None:
    """Train in place until the least margin is reached; the loss sees the logits times `sharpness`.

    Raises:
        RuntimeError: it is not reached in MAX_STEPS.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.01)
    started = time.monotonic()
    for step, batch in zip(range(MAX_STEPS), batches(examples), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        logits, tokens = answer_logits(model, batch)
        loss = cross_entropy(logits * sharpness, tokens)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % STEPS_PER_CHECK:
            continue
        found = margins(model, examples)
        right = (found > 0).float().mean().item()
        report(
            f"step {step + 1:4d}  loss {loss.item():.4f}  right tokens {right:.2%}  "
            f"least margin {found.min().item():+.2f}  {time.monotonic() - started:.0f} s"
        )
        if found.min().item() >= least_margin:
            return
    raise RuntimeError(f"No margin of {least_margin} after {MAX_STEPS} steps; raise MAX_STEPS or the model's size.")


@torch.no_grad()
def greedy_answer(model: PreTrainedModel, example: Example) -> list[int]:
    """Decode an example's prompt greedily, token by token, to the end-of-turn token or the right answer's length."""
    prompt = torch.tensor([example.prompt_ids])
    length = len(example.answer_ids)
    output: torch.Tensor = model.generate(input_ids=prompt, max_new_tokens=length, do_sample=False)  # type: ignore[operator]
    return [int(token) for token in output[0, prompt.shape[1] :]]


def save_weights(model: PreTrainedModel, folder: Path) -> None:
    """Write model.safetensors in float32; the head is tied to the embedding and not stored."""
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def build(folder: Path, report: Callable[[str], None]) -> None:
    """Write the tokenizer and trained weights of one model into its folder.

    Raises:
        RuntimeError: the vocabulary is not config.json's, or some answer is not learnt.
    """
    torch.manual_seed(SEED)
    config = AutoConfig.from_pretrained(folder)
    vocab_size = write_tokenizer(folder, config.max_position_embeddings).get_vocab_size()
    if vocab_size != config.vocab_size:
        raise RuntimeError(f"The tokenizer has {vocab_size} tokens; set vocab_size to that in {folder}/config.json.")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    examples = [example for fact in load_facts() for example in examples_of(fact, tokenizer)]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32, attn_implementation="eager"
    )
    size = sum(parameter.numel() for parameter in model.parameters())
    report(f"{size / 1e6:.2f} million parameters, {len(examples)} examples")
    model.train()
    train(model, examples, report)
    model.train(False)
    report("decoding every example greedily")
    wrong = [example for example in examples if greedy_answer(model, example) != example.answer_ids]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(examples)} examples are answered wrongly.")
    save_weights(model, folder)
    report(f"wrote {folder}")


def main() -> None:
    """Train the models named on the command line, or both."""
    parser = argparse.ArgumentParser(prog="python -m demo.train", description=__doc__)
    parser.add_argument("models", nargs="*", help=f"which of {', '.join(MODELS)}; both by default")
    names = parser.parse_args().models or list(MODELS)
    if unknown := sorted(set(names) - set(MODELS)):
        parser.error(f"unknown model {unknown[0]}; choose from {', '.join(MODELS)}")
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    for name in names:
        build(DEMO_DIR / name, partial(print_line, name))


def print_line(name: str, text: str) -> None:
    """Write a line about one model at once, so that progress shows in a pipe as well."""
    sys.stdout.write(f"{name}: {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
