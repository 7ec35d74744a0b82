"""Checkpoint files: what is read, what is refused, and the dtype that is chosen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.config import load_model_config
from model.errors import ModelError
from model.flash_cohere import FlashCohereForCausalLM
from model.parallel import TensorParallel
from model.precision import resolve_dtype
from model.vocabulary import VocabularySlice
from model.weights import DummyWeights, Weights, stored_dtype
from tests.model.checkpoints import cohere, reference_logits, save
from tests.model.generation import generate, load

SINGLE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
PROMPT = [5, 9, 200, 262]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(cohere(), tmp_path)


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Rewrites the file with some tensors replaced (None: left out); `__` stands for a dot."""
    tensors = load_file(folder / SINGLE)
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor.contiguous()
    save_file(tensors, folder / SINGLE)


def set_config(folder: Path, **keys: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))


def logits(folder: Path) -> torch.Tensor:
    return generate(TensorParallel(), str(folder), [PROMPT], 1)[0][1]


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        load(TensorParallel(), str(folder))
    return str(error.value)


def test_a_missing_tensor_is_named_with_its_shape(folder: Path) -> None:
    edit(folder, model__layers__1__mlp__up_proj__weight=None)
    assert "model.layers.1.mlp.up_proj.weight" in refused(folder) and "[48, 32]" in refused(folder)


def test_a_left_over_tensor_is_named(folder: Path) -> None:
    edit(folder, model__layers__0__self_attn__q_norm__weight=torch.ones(4, 8))
    assert "model.layers.0.self_attn.q_norm.weight" in refused(folder)


def test_a_tensor_of_another_shape_is_named_with_both(folder: Path) -> None:
    edit(folder, model__norm__weight=torch.ones(31))
    assert "model.norm.weight has the shape [31]" in refused(folder)


def test_rotary_buffers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    before = logits(folder)
    edit(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert torch.equal(logits(folder), before)


def test_a_tied_head_that_is_stored_as_well_is_compared(folder: Path) -> None:
    before = logits(folder)
    embedding = load_file(folder / SINGLE)[EMBEDDING]
    edit(folder, lm_head__weight=embedding.clone())
    assert torch.equal(logits(folder), before)
    edit(folder, lm_head__weight=embedding + 1)
    assert "lm_head.weight differs" in refused(folder)


def test_an_untied_head_must_be_there(folder: Path) -> None:
    set_config(folder, tie_word_embeddings=False)
    assert "lm_head.weight" in refused(folder)


def test_a_missing_tie_key_means_tied(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert logits(folder).shape == (len(PROMPT), 263)


def test_the_index_says_where_each_tensor_is(folder: Path) -> None:
    before = logits(folder)
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    # A stale whole file beside the index must not be read.
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / SINGLE)
    weight_map = {name: file for file, held in files.items() for name in held}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits(folder), before)
    index.write_text(json.dumps({"weight_map": {**weight_map, EMBEDDING: "b.safetensors"}}))
    if weight_map[EMBEDDING] == "a.safetensors":
        assert "where it is not" in refused(folder)
    (folder / "b.safetensors").unlink()
    assert "b.safetensors" in refused(folder)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}'])
def test_a_broken_index_is_an_error(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    assert "index" in refused(folder)


def test_a_file_cut_short_is_an_error(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[: len(data) // 2])
    assert SINGLE in refused(folder)


@pytest.mark.parametrize(
    ("requested", "key", "stored", "expected"),
    [
        ("auto", "bfloat16", "float32", torch.bfloat16),
        ("auto", None, "float32", torch.float32),
        ("auto", None, None, torch.bfloat16),
        ("float32", "bfloat16", "bfloat16", torch.float32),
    ],
)
def test_the_dtype_is_the_asked_one_else_the_configurations_else_the_stored_one(
    folder: Path, requested: str, key: str | None, stored: str | None, expected: torch.dtype
) -> None:
    set_config(folder, dtype=key, torch_dtype=None)
    assert resolve_dtype(requested, load_model_config(folder), stored) == expected


@pytest.mark.parametrize(("requested", "key"), [("float16", None), ("auto", "float16"), ("int8", None)])
def test_half_precision_is_refused_with_what_to_pass(folder: Path, requested: str, key: str | None) -> None:
    set_config(folder, dtype=key, torch_dtype=None)
    with pytest.raises(ModelError, match="bfloat16"):
        resolve_dtype(requested, load_model_config(folder))


def test_the_stored_dtype_is_read_from_the_file(folder: Path) -> None:
    assert stored_dtype(folder) == "float32"


def test_the_fingerprint_tells_checkpoints_apart(folder: Path, tmp_path: Path) -> None:
    config = load_model_config(folder)
    first = Weights(folder, config, TensorParallel(), torch.float32).fingerprint()
    assert first == Weights(folder, config, TensorParallel(), torch.float32).fingerprint()
    edit(folder, model__norm__weight=torch.full((32,), 2.0))
    assert first != Weights(folder, config, TensorParallel(), torch.float32).fingerprint()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_vocabulary_slices_cover_every_id_once_and_have_one_size(world_size: int) -> None:
    slices = [VocabularySlice(263, TensorParallel(rank, world_size)) for rank in range(world_size)]
    assert len({part.size for part in slices}) == 1
    assert [i for part in slices for i in range(part.start, part.start + part.num_real)] == list(range(263))


def test_a_slice_of_a_published_vocabulary_starts_beyond_32_bits_of_numbers() -> None:
    part = VocabularySlice(256000, TensorParallel(7, 8))
    assert (part.start + part.num_real) * 12288 > 2**31
    rows = torch.empty((256000, 12288), device="meta")[part.start : part.start + part.num_real]
    assert rows.shape[0] == 32000 and rows.storage_offset() == 224000 * 12288


def test_padding_columns_are_never_chosen_and_every_id_has_its_row(folder: Path) -> None:
    model = load(TensorParallel(), str(folder))
    own = model.lm_head.forward(torch.randn(2, 32))
    assert own.shape[1] == 264 and bool((own[:, 263:] == -torch.inf).all())
    assert torch.equal(
        model.model.embed_tokens.forward(torch.tensor([262]))[0], load_file(folder / SINGLE)[EMBEDDING][262]
    )


def test_ranks_that_do_not_divide_the_heads_are_refused(folder: Path) -> None:
    config = load_model_config(folder)
    with pytest.raises(ModelError, match="num_attention_heads 4"):
        FlashCohereForCausalLM("", config, Weights(folder, config, TensorParallel(0, 3), torch.float32))


def test_random_weights_need_no_file_and_are_the_same_each_time(folder: Path) -> None:
    config = load_model_config(folder)
    first, second = (DummyWeights(config, TensorParallel(), torch.float32) for _ in range(2))
    name, shape = "model.layers.0.self_attn.q_proj.weight", (32, 32)
    second.take("other", (4, 4))
    assert torch.equal(first.take(name, shape), second.take(name, shape))
    assert FlashCohereForCausalLM("", config, first).config is config


def test_answers_depend_on_the_order_of_the_prompt(folder: Path) -> None:
    model = cohere()
    forward, backward = PROMPT, PROMPT[:-1][::-1] + PROMPT[-1:]
    a, b = (generate(TensorParallel(), str(folder), [p], 1)[0][1][-1] for p in (forward, backward))
    assert not torch.allclose(a, b, atol=1e-3)
    assert torch.allclose(b, reference_logits(model, backward)[-1], atol=1e-4)
