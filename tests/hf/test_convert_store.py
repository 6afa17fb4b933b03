"""Converted models saved and loaded: by every door of Transformers, inside larger models, with Trainer and PEFT."""

import copy
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from small_models import SHAPE, compute_logits, shake, tiny, token_ids
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from qklab.hf import convert, load_adapter, load_converted, revert, save_adapter
from qklab.hf.convert import find_conversion
from qklab.optim import LogitControl, attention_roles

LinAlgError: type[Exception] = vars(torch.linalg)["LinAlgError"]  # which torch does not export by type


@pytest.fixture(scope="module")
def model() -> Any:
    """A Llama with one tensor for keys and values and a coupling that is not the identity; not to be changed."""
    made = tiny("llama")
    convert(made, coupling="leapfrog", share="k=v")
    shake(made)
    return made


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def test_auto_classes_take_every_argument(model: Any, saved: Path) -> None:
    """What the configuration has is set there, what from_pretrained knows is done, an edited configuration counts."""
    labels: Any = AutoModelForSequenceClassification.from_pretrained(
        saved, num_labels=5, attn_implementation="eager", problem_type="regression", output_hidden_states=True,
        use_cache=False, attention_dropout=0.25, pad_token_id=3,
    )  # fmt: skip
    config = labels.config
    assert labels.score.weight.shape[0] == 5
    assert (config._attn_implementation, config.problem_type) == ("eager", "regression")
    assert (config.output_hidden_states, config.use_cache, config.pad_token_id) == (True, False, 3)
    assert labels.model.layers[0].self_attn.attention_dropout == 0.25
    named: Any = AutoModelForSequenceClassification.from_pretrained(saved, id2label={0: "yes"}, label2id={"yes": 0})
    assert named.config.id2label == {0: "yes"}
    edited = AutoConfig.from_pretrained(saved)
    edited.attention_dropout = 0.5
    found: Any = AutoModelForCausalLM.from_pretrained(saved, config=edited, output_loading_info=True, dtype="float64")
    assert found[0].model.layers[0].self_attn.attention_dropout == 0.5
    assert found[0].dtype == torch.float64
    assert not any(found[1].values())
    assert AutoConfig.from_pretrained(saved).initializer_range == SHAPE["initializer_range"]
    fresh: Any = AutoModelForCausalLM.from_config(model.config)
    assert fresh.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(ValueError, match="cannot be loaded quantised"):
        load_converted(saved, quantization_config={"quant_method": "bitsandbytes"})


@pytest.mark.parametrize("task", ["TokenClassification", "QuestionAnswering", "SequenceClassification"])
def test_every_auto_class_loads(task: str, saved: Path, tmp_path: Path) -> None:
    """What it saved itself; and of a language model what fits, the rest drawn anew."""
    torch.manual_seed(0)
    auto, kind = (getattr(transformers, f"{name}For{task}") for name in ("AutoModel", "Llama"))
    model = kind(LlamaConfig(**{**SHAPE, "num_labels": 3})).eval()
    convert(model, coupling="affine", share="k=v", calibration=token_ids())
    shake(model)
    model.save_pretrained(tmp_path)
    for loaded, same in ((auto.from_pretrained(tmp_path), True), (auto.from_pretrained(saved), False)):
        assert type(loaded) is kind
        with torch.no_grad():
            got, wanted = (each(token_ids()).to_tuple()[0] for each in (loaded, model))
        assert bool(got.isfinite().all())
        assert torch.equal(got, wanted) == same


def test_subfolders_and_the_hub(model: Any, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree(saved, tmp_path / "outer/inner")
    snapshot = tmp_path / "hub/models--someone--something/snapshots/abc"
    shutil.copytree(saved, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("abc")
    hub: dict[str, Any] = {"cache_dir": tmp_path / "hub", "local_files_only": True}
    for load in (load_converted, AutoModelForCausalLM.from_pretrained):
        for found in (load(tmp_path / "outer", subfolder="inner"), load("someone/something", **hub)):
            assert torch.equal(compute_logits(found), compute_logits(model))
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_converted(tmp_path)
    tiny("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="holds no converted model"):
        load_converted(tmp_path / "plain")


def test_a_record_of_another_version_is_met_with_one_sentence(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "old")
    config = json.loads((saved / "config.json").read_text())
    for version in (3, None):
        config["qklab"]["version"] = version
        (tmp_path / "old/config.json").write_text(json.dumps(config))
        for load in (load_converted, AutoModelForCausalLM.from_pretrained):
            with pytest.raises(ValueError, match=rf"version 2 was expected, but {version} came; use the qklab"):
                load(tmp_path / "old")
    config["qklab"]["version"], config["architectures"] = 2, ["LlamaForNothing"]
    (tmp_path / "old/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="names the class 'LlamaForNothing', which Llama does not have"):
        load_converted(tmp_path / "old")


def test_loaded_and_saved_again_is_the_same(saved: Path, tmp_path: Path) -> None:
    loaded = load_converted(saved)
    loaded.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == (saved / "config.json").read_text()
    with pytest.raises(ValueError, match="share replaced weights that were not kept"):
        revert(loaded)


def test_copies_and_pickles(model: Any, saved: Path, tmp_path: Path) -> None:
    for which, source in enumerate((model, load_converted(saved))):
        torch.save(source, tmp_path / f"{which}.pt")
        for other in (torch.load(tmp_path / f"{which}.pt", weights_only=False), copy.deepcopy(source)):
            assert torch.equal(compute_logits(other), compute_logits(model))
            assert find_conversion(other) == find_conversion(model)
            assert other.model.layers[0].self_attn.rotary[0] is other.model.rotary_emb


def test_a_converted_inner_model_is_saved_with_the_outer_one(tmp_path: Path) -> None:
    outer = tiny("llama")
    convert(outer.model, coupling="leapfrog", share="k=v")
    shake(outer)
    outer.save_pretrained(tmp_path)
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path), load_converted(tmp_path)):
        assert type(loaded) is LlamaForCausalLM
        assert torch.equal(compute_logits(loaded), compute_logits(outer))


@pytest.mark.parametrize("inside", [True, False])
def test_the_text_part_of_a_larger_model(inside: bool, tmp_path: Path) -> None:
    """Converted through the outer model or by itself; only load_converted reads what the outer one wrote."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    wanted: Any = {"text_config": LlamaConfig(**SHAPE), "vision_config": vision, "image_token_index": 60}
    torch.manual_seed(0)
    model: Any = transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(**wanted)).eval()
    before = compute_logits(model)
    part = model.model.language_model if inside else model
    convert(part, coupling="leapfrog")
    assert torch.equal(compute_logits(model), before)
    revert(part)
    convert(part, coupling="leapfrog", share="k=v", calibration=token_ids())
    shake(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(Exception, match=r"load it by qklab\.hf\.load_converted"):
        transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    loaded: Any = load_converted(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(compute_logits(loaded), compute_logits(model))
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(compute_logits(load_converted(tmp_path / "again")), compute_logits(model))


def test_a_conversion_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise LinAlgError("singular")

    model = tiny("llama", num_key_value_heads=4)
    broken = model.model.layers[1].self_attn.v_proj.weight
    with torch.no_grad():
        broken[0, 0] = torch.nan
    names, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    first = model.model.layers[0].self_attn.k_proj
    for calibration in (None, token_ids()):
        with pytest.raises(ValueError, match=r"keys or values of model\.layers\.1\.self_attn are not finite"):
            convert(model, coupling="leapfrog", kv_heads=2, share="k=v", calibration=calibration)
        assert (list(model.state_dict()), [type(module) for module in model.modules()]) == (names, kinds)
        assert model.model.layers[0].self_attn.k_proj is first
        assert model.model.layers[0].self_attn.num_key_value_groups == 1
        assert find_conversion(model) is None
    with torch.no_grad():
        broken[0, 0] = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[convert.__module__], "measure_change", fail)  # the last thing that is done
        with pytest.raises(LinAlgError):
            convert(model, coupling="leapfrog", share="k=v", calibration=token_ids())
    assert model.name_or_path == ""
    assert find_conversion(model) is None
    assert [type(module) for module in model.modules()] == kinds
    convert(model, share="k=v")


# Adapters of our own


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3"])
def test_adapters(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    convert(model, coupling="leapfrog")
    shake(model)
    save_adapter(model, tmp_path)
    fresh = tiny(family)
    report = load_adapter(fresh, tmp_path, trainable="coupling")
    assert torch.equal(compute_logits(fresh), compute_logits(model))
    assert report is not None
    assert report.trainable == report.inserted
    shake(fresh)
    assert load_adapter(fresh, tmp_path) is None
    assert torch.equal(compute_logits(fresh), compute_logits(model))
    with pytest.raises(ValueError, match="trainable must be one of"):
        load_adapter(model, tmp_path, trainable="all")
    load_adapter(model, tmp_path, trainable="coupling")
    assert all(parameter.requires_grad == (".couple." in name) for name, parameter in model.named_parameters())
    revert(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    size = (tmp_path / "qklab_adapter.safetensors").stat().st_size
    assert size < 4 * report.inserted + 4096


@pytest.mark.parametrize("together", [True, False])
def test_adapters_of_merged_heads(together: bool, tmp_path: Path) -> None:
    """They fit a model whose heads were merged the same way, whether that was one conversion or two."""
    model, other = tiny("llama"), tiny("llama")
    convert(other, kv_heads=1)
    if together:
        convert(model, kv_heads=1, coupling="leapfrog")
    else:
        convert(model, kv_heads=1)
        convert(model, coupling="leapfrog")
    shake(model)
    save_adapter(model, tmp_path)
    load_adapter(other, tmp_path)
    assert torch.equal(compute_logits(other), compute_logits(model))
    for unfit, options in ((tiny("llama"), None), (tiny("llama"), {"kv_heads": 1, "merge": "mean"})):
        if options is not None:
            convert(unfit, **options)
        if options is None or together:
            with pytest.raises(ValueError, match="weights were replaced" if together else "is for kv_heads=1"):
                load_adapter(unfit, tmp_path)


def test_adapters_that_do_not_fit(tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="no inserted coupling or norm"):
        save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match="holds no adapter"):
        load_adapter(model, tmp_path)
    convert(model, coupling="leapfrog", share="k=v")
    save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match="is for Llama, but the model is Qwen2"):
        load_adapter(tiny("qwen2"), tmp_path)
    with pytest.raises(ValueError, match="weights were replaced"):
        load_adapter(tiny("llama"), tmp_path)
    other = tiny("llama")
    convert(other, coupling="affine", share="k=v")
    with pytest.raises(ValueError, match="this adapter is of leapfrog×1 identity"):
        load_adapter(other, tmp_path)


# Trainer and PEFT


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """One line again and again."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = token_ids(1, seed=7)[0]
        return {"input_ids": row, "labels": row}


def train(model: Any, folder: Path, steps: int, save: bool) -> list[float]:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, learning_rate=0.02, report_to=[],
        save_strategy="steps" if save else "no", save_steps=steps, logging_steps=1, use_cpu=True, disable_tqdm=True,
        seed=0, dataloader_pin_memory=False, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Text())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_trainer_trains_the_coupling_and_saves_what_loads(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    convert(model, coupling="leapfrog", trainable="coupling")
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    losses = train(model, tmp_path, 12, save=True)
    assert losses[-1] < losses[0] - 0.05
    assert all(torch.equal(model.get_parameter(name), value) for name, value in frozen.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-12")
    assert torch.equal(compute_logits(loaded), compute_logits(model.eval()))


def test_the_trainer_saves_checkpoints_of_peft_on_a_loaded_model(saved: Path, tmp_path: Path) -> None:
    """The coupling is trained where modules_to_save names it, and frozen where not."""
    for names in (["couple"], None):
        config = LoraConfig(r=2, task_type="CAUSAL_LM", modules_to_save=names)
        wrapped: Any = get_peft_model(load_converted(saved), config)
        before = compute_logits(wrapped)
        train(wrapped, tmp_path, 2, save=True)
        loaded: Any = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
        torch.testing.assert_close(compute_logits(loaded.eval()), compute_logits(wrapped.eval()))
        assert not torch.allclose(compute_logits(wrapped), before, atol=1e-4)
        trained = {name for name, value in wrapped.named_parameters() if value.requires_grad}
        assert any(".couple." in name for name in trained) == (names is not None)


def test_an_adapter_of_a_model_converted_in_memory_names_no_other_model(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "base")
    model: Any = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    convert(model, coupling="leapfrog")
    wrapped: Any = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM"))
    with pytest.warns(UserWarning, match="converted by qklab in memory: save it"):
        wrapped.save_pretrained(tmp_path / "adapter")
    with pytest.raises(OSError, match="converted by qklab in memory: save it, load it by load_converted"):
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    plain = wrapped.unload()
    revert(plain)
    assert plain.name_or_path == str(tmp_path / "base")


def test_logit_control_says_that_low_rank_updates_are_not_its_own() -> None:
    for targets, controlled in ((["q_proj"], False), (["v_proj", "o_proj"], True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped: Any = get_peft_model(tiny("llama"), LoraConfig(r=2, target_modules=targets))
        if controlled:
            for parameter in wrapped.parameters():
                parameter.requires_grad_(True)
            LogitControl(torch.optim.AdamW(wrapped.parameters()), attention_roles(wrapped))
        else:
            with pytest.raises(ValueError, match="low-rank updates are not controlled; merge it first"):
                attention_roles(wrapped)
