"""Adapter folders: names with any usual prefix, slices, versions, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.config import ModelConfig, load_model_config
from model.errors import AdapterError
from model.lora_adapter import MODULES
from model.lora_weights import CONFIG_FILE, WEIGHTS_FILE, adapter_version, load_adapter, read_adapter
from model.parallel import TensorParallel
from tests.model.adapters import save_adapter
from tests.model.checkpoints import cohere, save

PREFIX = "base_model.model.model."
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
UP_B = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Path]:
    folder = tmp_path_factory.mktemp("adapter")
    base = cohere()
    return load_model_config(save(base, folder / "base")), save_adapter(base, folder / "adapter", r=4)


@pytest.fixture
def config(made: tuple[ModelConfig, Path]) -> ModelConfig:
    return made[0]


@pytest.fixture
def folder(made: tuple[ModelConfig, Path], tmp_path: Path) -> Path:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (tmp_path / name).write_bytes((made[1] / name).read_bytes())
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS_FILE)


def set_config(folder: Path, **keys: object) -> None:
    raw = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**raw, **keys}))


def refused(folder: Path, config: ModelConfig, max_rank: int = 16) -> str:
    with pytest.raises(AdapterError) as error:
        load_adapter(folder, config, TensorParallel(), max_rank, torch.float32)
    assert str(error.value).endswith(".")
    return str(error.value)


@pytest.mark.parametrize("infix", ["", ".default"])
@pytest.mark.parametrize(
    "prefix",
    [
        "base_model.model.model.",
        "base_model.model.",
        "model.",
        "language_model.",
        "language_model.model.",
        "base_model.model.language_model.model.",
        "base_model.model.model.language_model.",
        "",
    ],
)
def test_every_usual_prefix_names_the_same_modules(config: ModelConfig, folder: Path, prefix: str, infix: str) -> None:
    """vllm-project/vllm#34186."""
    expected = read_adapter(folder, config, 16).pairs

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            renamed = prefix + name.removeprefix(PREFIX).removesuffix(".weight") + f"{infix}.weight"
            tensors[renamed] = tensors.pop(name)

    rewrite(folder, rename)
    pairs = read_adapter(folder, config, 16).pairs
    assert pairs.keys() == expected.keys() == {(layer, module) for layer in range(2) for module in MODULES}
    assert all(torch.equal(pairs[place].a, expected[place].a) for place in pairs)
    assert all(torch.equal(pairs[place].b, expected[place].b) for place in pairs)


@pytest.mark.parametrize(
    "name",
    [
        "transformer.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.mlp.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight",
        "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight",
        "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight",
        "base_model.model.model.layers.0.input_layernorm.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.embed_tokens.weight",
        "base_model.model.lm_head.weight",
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.lm_head.modules_to_save.weight",
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(config: ModelConfig, folder: Path, name: str) -> None:
    """vllm-project/vllm#34186 and #9280."""
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(4, 32)}))
    assert name in refused(folder, config)


def test_a_missing_half_is_refused(config: ModelConfig, folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(UP_B))
    assert "layers.1.mlp.up_proj.lora_A.weight has no lora_B" in refused(folder, config)
    rewrite(folder, lambda tensors: tensors.pop(Q_A))
    assert "layers.0.self_attn.q_proj.lora_B.weight has no lora_A" in refused(folder, config)


def test_a_matrix_that_is_there_twice_is_refused(config: ModelConfig, folder: Path) -> None:
    twin = Q_A.removeprefix("base_model.model.")
    rewrite(folder, lambda tensors: tensors.update({twin: tensors[Q_A].clone()}))
    assert Q_A in (message := refused(folder, config)) and twin in message


@pytest.mark.parametrize(("name", "shape"), [(Q_A, (4, 31)), (Q_A, (8, 32)), (Q_A, (4, 32, 1)), (UP_B, (47, 4))])
def test_a_wrong_shape_is_refused_with_both(
    config: ModelConfig, folder: Path, name: str, shape: tuple[int, ...]
) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(shape)}))
    message = refused(folder, config)
    assert name in message and str(list(shape)) in message
    assert ("[4, 32]" if name == Q_A else "[48, 4]") in message


def test_an_adapter_of_another_geometry_is_refused(config: ModelConfig, tmp_path: Path) -> None:
    for keys in ({"hidden_size": 64}, {"intermediate_size": 96}, {"num_key_value_heads": 4}):
        folder = save_adapter(cohere(**keys), tmp_path / next(iter(keys)), r=4)
        assert "has the shape" in refused(folder, config)
    deeper = save_adapter(cohere(num_hidden_layers=3), tmp_path / "deeper", r=4)
    assert "layers.2" in refused(deeper, config)
    shallower = save_adapter(cohere(num_hidden_layers=1), tmp_path / "shallower", r=4)
    assert "model.layers.1.self_attn" in refused(shallower, config) or "model.layers.1.mlp" in refused(
        shallower, config
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [Q_A, UP_B])
def test_numbers_that_are_not_finite_are_refused_on_every_rank(
    config: ModelConfig, folder: Path, name: str, value: float
) -> None:
    rewrite(folder, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    for rank in range(2):
        with pytest.raises(AdapterError, match=name):
            load_adapter(folder, config, TensorParallel(rank, 2), 16, torch.float32)


def test_a_rank_over_the_limit_is_refused_with_the_flag(config: ModelConfig, folder: Path) -> None:
    message = refused(folder, config, max_rank=3)
    assert "rank 4, over --max-lora-rank 3" in message and "model.layers.0" in message


def test_config_and_file_must_have_the_same_modules(config: ModelConfig, folder: Path) -> None:
    whole = json.loads((folder / CONFIG_FILE).read_text())["target_modules"]
    set_config(folder, target_modules=[name for name in whole if name != "up_proj"])
    assert "layers.0.mlp.up_proj.lora_A.weight is of no module" in refused(folder, config)
    set_config(folder, target_modules=whole, layers_to_transform=[0])
    assert "layers.1." in refused(folder, config)
    set_config(folder, layers_to_transform=None)

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "k_proj" in name]:
            del tensors[name]

    rewrite(folder, drop)
    assert "no tensors for model.layers.0.self_attn.k_proj and 1 more" in refused(folder, config)


def test_an_adapter_that_changes_nothing_is_refused(config: ModelConfig, folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.clear())
    set_config(folder, layers_to_transform=[9])
    assert "changes nothing" in refused(folder, config)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_a_pickle_is_refused_with_how_to_convert_it(config: ModelConfig, folder: Path, name: str) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    torch.save(tensors, folder / name)
    assert load_adapter(folder, config, TensorParallel(), 16, torch.float32).rank == 4
    (folder / WEIGHTS_FILE).unlink()
    message = refused(folder, config)
    assert name in message and "save_file" in message
    save_file(torch.load(folder / name, weights_only=True), folder / WEIGHTS_FILE)
    assert load_adapter(folder, config, TensorParallel(), 16, torch.float32).rank == 4


def test_broken_missing_and_integer_weights_are_refused(config: ModelConfig, folder: Path) -> None:
    data = (folder / WEIGHTS_FILE).read_bytes()
    for cut in (b"", data[:100], data[:-1], b"\xff" * 64):
        (folder / WEIGHTS_FILE).write_bytes(cut)
        assert f"{WEIGHTS_FILE} cannot be read" in refused(folder, config)
    (folder / WEIGHTS_FILE).write_bytes(data)
    rewrite(folder, lambda tensors: tensors.update({Q_A: tensors[Q_A].char()}))
    assert f"{Q_A} is stored as I8" in refused(folder, config)
    (folder / WEIGHTS_FILE).unlink()
    assert f"has no {WEIGHTS_FILE}" in refused(folder, config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_read_exactly(config: ModelConfig, folder: Path, dtype: torch.dtype) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}))
    stored, pair = load_file(folder / WEIGHTS_FILE)[Q_A], read_adapter(folder, config, 16).pairs[0, "q_proj"]
    assert pair.a.dtype == torch.float32 and torch.equal(pair.a, stored.float())


def test_slices_of_all_ranks_are_the_whole_and_kv_rows_are_repeated(config: ModelConfig, folder: Path) -> None:
    whole = load_adapter(folder, config, TensorParallel(), 16, torch.float32)
    parts = [load_adapter(folder, config, TensorParallel(rank, 4), 16, torch.float32) for rank in range(4)]
    columns = [part.b_in.split([8, 8, 8, 12, 12], dim=1) for part in parts]
    q, k, v, gate, up = whole.b_in.split([32, 16, 16, 48, 48], dim=1)
    for place, full in ((0, q), (3, gate), (4, up)):
        assert torch.equal(torch.cat([column[place] for column in columns], dim=1), full)
    for place, full in ((1, k), (2, v)):
        heads = full.split(8, dim=1)
        assert all(torch.equal(column[place], heads[rank // 2]) for rank, column in enumerate(columns))
    rows = [part.a_out.split([8, 12], dim=2) for part in parts]
    assert torch.equal(torch.cat([o for o, _ in rows] + [down for _, down in rows], dim=2), whole.a_out)
    assert all(torch.equal(part.a_in, whole.a_in) and torch.equal(part.b_out, whole.b_out) for part in parts)
    assert {part.ranks for part in parts} == {whole.ranks} == {(4,) * 7}


def test_slices_read_from_a_file_equal_those_of_the_adapter_in_memory(config: ModelConfig, folder: Path) -> None:
    for parallel in (TensorParallel(), TensorParallel(1, 2)):
        lazy = load_adapter(folder, config, parallel, 16, torch.bfloat16)
        held = read_adapter(folder, config, 16).slices(config, parallel, torch.bfloat16)
        assert lazy.ranks == held.ranks
        assert all(torch.equal(a, b) for a, b in zip(lazy.tensors, held.tensors, strict=True))
        assert lazy.num_bytes == sum(tensor.numel() * 2 for tensor in lazy.tensors)


def test_the_version_follows_the_content_of_both_files(folder: Path) -> None:
    first = adapter_version(folder)
    (folder / "README.md").write_text("any")
    assert adapter_version(folder) == first and len(first) == 64
    set_config(folder, lora_alpha=9)
    second = adapter_version(folder)
    rewrite(folder, lambda tensors: tensors[UP_B].view(-1)[7].add_(1))
    assert len({first, second, adapter_version(folder)}) == 3
    (folder / CONFIG_FILE).unlink()
    with pytest.raises(AdapterError, match=CONFIG_FILE):
        adapter_version(folder)


def test_whether_an_adapter_is_rslora_is_known_to_a_merge(config: ModelConfig, folder: Path) -> None:
    plain: Any = read_adapter(folder, config, 16)
    set_config(folder, use_rslora=True)
    assert (plain.is_rslora, read_adapter(folder, config, 16).is_rslora) == (False, True)
