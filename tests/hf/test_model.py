"""The models: forward, loss, padding and packing, training, saving and loading, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import CHECKPOINTING, END, KINDS, Small, decoder, enable_checkpointing
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)

from qklab import AttentionSpec, Decoder, DecoderSpec, SpecError
from qklab.hf import QKLabConfig, QKLabForCausalLM, QKLabForSequenceClassification, QKLabModel
from qklab.hf.export import build_with_weights, wrap_decoder
from qklab.testing import contracts_of, grid

every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@torch.no_grad()
def test_logits_are_the_decoders_bit_for_bit(kind: str, ids: Tensor) -> None:
    plain = decoder(kind, tied=False).eval()
    model: Any = wrap_decoder(plain)
    expected = plain(ids)
    for way in ({}, {"use_cache": False}, {"use_cache": True}, {"attention_mask": torch.ones_like(ids)}):
        assert torch.equal(model(ids, **way).logits, expected), way
    assert torch.equal(model(ids, logits_to_keep=2).logits, expected[:, -2:])
    assert torch.equal(model(ids, logits_to_keep=torch.tensor([0, 4])).logits, expected[:, [0, 4]])
    assert torch.equal(model(inputs_embeds=plain.embed(ids)).logits, expected)
    assert torch.equal(model.model(ids).last_hidden_state, plain.features(ids))
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 3
    assert torch.equal(model.lm_head(states[-1]), expected)
    assert torch.equal(model(ids, return_dict=False)[0], expected)


def test_the_loss_is_the_mean_over_shifted_labels(small: Small, ids: Tensor) -> None:
    model, labels = small(), ids.clone()
    labels[0, 3:6] = -100
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(model(ids, labels=labels).loss, expected.sum() / 21)
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=50).loss, expected.sum() / 50)


@every_kind
@torch.no_grad()
def test_padded_and_packed_rows_are_what_they_are_alone(kind: str, small: Small, ids: Tensor, left: Tensor) -> None:
    model = small(kind).double()
    alone = [model(row[mask.bool()][None]).logits[0] for row, mask in zip(ids, left, strict=True)]
    text = [row[mask.bool()] for row, mask in zip(ids, left, strict=True)]
    right = torch.stack([F.pad(t, (0, 9 - len(t)), value=END) for t in text])
    sides = {"left": (ids, left), "right": (right, left.flip(-1))}
    for side, (rows, mask) in sides.items():
        for use_cache in (True, False):
            out = model(rows, attention_mask=mask, use_cache=use_cache).logits
            for row, expected in enumerate(alone):
                torch.testing.assert_close(out[row][mask[row].bool()], expected, msg=side)
    positions = torch.cat([torch.arange(len(t)) for t in text])[None]
    packed = model(torch.cat(text)[None], position_ids=positions)
    torch.testing.assert_close(packed.logits[0], torch.cat(alone))
    assert packed.past_key_values is None


def test_positions_and_masks_that_mean_something_else_are_refused(small: Small, ids: Tensor, left: Tensor) -> None:
    model = small()
    holes = left.clone()
    holes[2, 4] = 0
    ramp = torch.arange(9)[None]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"attention_mask": holes}, "zeros between ones"),
        ({"attention_mask": torch.ones(3, 1, 9, 9)}, r"\[3, 1, 9, 9\] came; a 4-D mask"),
        ({"attention_mask": left[:, 1:]}, r"must be of shape \[3, 9\]"),
        ({"position_ids": ramp + 2}, "must count up from 0 within each text"),
        ({"position_ids": ramp, "attention_mask": left}, "do not continue the text"),
        ({"position_ids": ramp % 5, "use_cache": True}, "packs several texts into it, but nothing can follow"),
        ({"inputs_embeds": torch.zeros(3, 9, 32)}, "one of input_ids and inputs_embeds, but both came"),
        ({"output_attentions": True}, "do not return attention weights"),
    ]
    for given, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            model(ids, **given)
    counted = (left.cumsum(-1) - 1).clamp(min=0)
    assert torch.equal(
        model(ids, attention_mask=left, position_ids=counted).logits, model(ids, attention_mask=left).logits
    )
    cache = model(ids, attention_mask=left).past_key_values
    one, more = ids[:, :1], torch.ones(3, 1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"begins the rows at \[0, 0, 0\], but the cache was filled with \[4, 1, 0\]"):
        model(one, attention_mask=torch.ones(3, 10, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ValueError, match="do not continue the text"):
        model(one, attention_mask=torch.cat([left, more], 1), position_ids=9 * more, past_key_values=cache)


@every_kind
def test_checkpointed_gradients_are_the_plain_ones(kind: str, small: Small, ids: Tensor, left: Tensor) -> None:
    model = small(kind, dropout=0.1).train()
    found = []
    for reentrant in (None, False, True):
        if reentrant is not None:
            enable_checkpointing(model, reentrant)
        torch.manual_seed(0)
        model(ids, attention_mask=left, labels=ids.where(left.bool(), -100)).loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    for gradients in found[1:]:
        assert all(map(torch.equal, gradients, found[0]))
    assert any(gradient.any() for gradient in found[0])
    with pytest.raises(ValueError, match="runs each layer twice and so cannot fill a cache"):
        model(ids, past_key_values=small(kind)(ids).past_key_values)


def rows_of_text(count: int) -> Any:
    rows = (torch.arange(12) * step % 90 for step in range(1, count + 1))
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    plain: dict[str, Any] = {"max_steps": 20, "learning_rate": 0.01, "per_device_train_batch_size": 4}
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    return TrainingArguments(str(folder), use_cpu=True, **plain, **quiet, **changes)


@pytest.mark.parametrize("kind", ["(Q,K=V)", "MLA"])
def test_the_trainer_lowers_the_loss_and_saves_what_loads(kind: str, small: Small, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = QKLabForCausalLM(small(kind).config)
    trainer = Trainer(model, arguments(tmp_path, **{CHECKPOINTING: kind == "MLA"}), train_dataset=rows_of_text(8))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 20
    assert losses[-1] < 0.7 * losses[0]
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = rows_of_text(2)[1]["input_ids"][None]
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)


@every_kind
def test_lora_on_the_named_targets_trains_saves_and_decodes(
    kind: str, small: Small, ids: Tensor, left: Tensor, tmp_path: Path
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    model = small(kind)
    before = model(ids).logits
    targets = model.config.lora_targets
    adapted: Any = get_peft_model(model, LoraConfig(target_modules=targets, r=2, init_lora_weights=False))
    hit = {name.split(".lora_A")[0].split(".")[-1] for name, _ in adapted.named_parameters() if ".lora_A" in name}
    assert hit == set(targets)
    after = adapted(ids, attention_mask=left).logits
    assert not torch.allclose(after[2], before[2])
    way: dict[str, Any] = {"attention_mask": left, "max_new_tokens": 5, "do_sample": False, "suppress_tokens": [END]}
    drawn = adapted.generate(input_ids=ids, **way)
    assert torch.equal(drawn, adapted.generate(input_ids=ids, use_cache=False, **way))
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(small(kind), str(tmp_path))
    assert torch.equal(loaded(ids, attention_mask=left).logits, after)
    torch.testing.assert_close(loaded.merge_and_unload()(ids, attention_mask=left).logits, after, atol=1e-4, rtol=1e-4)


def test_an_adapter_that_decoding_would_leave_out_is_refused(small: Small, ids: Tensor) -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(small("MLA"), LoraConfig(target_modules=["up_key"], r=2))
    adapted(ids, use_cache=False)
    with pytest.raises(ValueError, match="an adapter lies on them; merge it first"):
        adapted(ids)


def test_sharded_weights_come_back_in_the_precision_asked_for(small: Small, ids: Tensor, tmp_path: Path) -> None:
    for tied in (True, False):
        model, folder = small(tied=tied), tmp_path / str(tied)
        model.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
        again = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
        assert isinstance(again, QKLabForCausalLM)
        assert torch.equal(again(ids).logits, model(ids).logits)
        assert (again.lm_head.weight is again.model.embed.weight) == tied
        wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        assert {parameter.dtype for parameter in wide.parameters()} == {torch.float64}
        torch.testing.assert_close(wide(ids).logits.float(), model(ids).logits, atol=1e-4, rtol=1e-4)
        bare = AutoModel.from_pretrained(folder)
        assert isinstance(bare, QKLabModel)
        assert torch.equal(bare(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_a_larger_vocabulary_is_saved_with_the_model(small: Small, ids: Tensor, tmp_path: Path) -> None:
    for tied in (True, False):
        model = small(tied=tied)
        before = model(ids).logits
        model.resize_token_embeddings(104, mean_resizing=False)
        assert model.config.decoder_spec.vocab == model.config.vocab_size == 104
        assert torch.equal(model(ids).logits[..., :97], before)
        assert model(torch.full((1, 2), 103), labels=torch.full((1, 2), 103)).loss.isfinite()
        model.save_pretrained(tmp_path / str(tied))
        again = AutoModelForCausalLM.from_pretrained(tmp_path / str(tied))
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_new_weights_start_as_the_decoders_do(small: Small, tmp_path: Path) -> None:
    """Also those a checkpoint does not bring, and only those."""
    source = small("differential")
    torch.manual_seed(0)
    model = QKLabForCausalLM(source.config)
    spread = {name: float(value.std(correction=0)) for name, value in model.state_dict().items()}
    assert spread["model.embed.weight"] == pytest.approx(0.02, rel=0.1)
    assert spread["model.blocks.1.mlp.down.weight"] == pytest.approx(0.01, rel=0.1)
    assert spread["model.blocks.0.attention.mix.query_lambdas"] == pytest.approx(0.1, rel=0.5)
    assert spread["model.norm.weight"] == 0.0
    source.save_pretrained(tmp_path)
    torch.manual_seed(0)
    found, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    assert info["missing_keys"] == {"score.weight"}
    assert float(found.score.weight.detach().std()) == pytest.approx(0.02, rel=0.3)
    kept = source.model.state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in found.model.state_dict().items())


def classifier(spec: DecoderSpec, labels: int, **config: Any) -> QKLabForSequenceClassification:
    torch.manual_seed(0)
    named: dict[str, Any] = {"num_labels": labels} | config
    return QKLabForSequenceClassification(QKLabConfig(spec=spec, **named)).eval()


@torch.no_grad()
def test_classes_are_read_off_the_last_token_of_text(small: Small, ids: Tensor, left: Tensor) -> None:
    spec = small().config.decoder_spec
    model = classifier(spec, 3, pad_token_id=END)
    alone = torch.cat([model(row[mask.bool()][None]).logits for row, mask in zip(ids, left, strict=True)])
    torch.testing.assert_close(model(ids, attention_mask=left).logits, alone)
    texts = [row[mask.bool()] for row, mask in zip(ids, left, strict=True)]
    right = torch.stack([F.pad(text, (0, 9 - len(text)), value=END) for text in texts])
    torch.testing.assert_close(model(right, attention_mask=left.flip(-1)).logits, alone)
    torch.testing.assert_close(model(right).logits, alone)
    labels = torch.tensor([0, 2, 1])
    torch.testing.assert_close(model(ids, attention_mask=left, labels=labels).loss, F.cross_entropy(alone, labels))
    model.config.problem_type = "multi_label_classification"
    several = F.one_hot(labels, 3).float()
    expected = F.binary_cross_entropy_with_logits(alone, several)
    torch.testing.assert_close(model(ids, attention_mask=left, labels=several).loss, expected)
    single = classifier(spec, 1)
    values = torch.tensor([0.5, -1.0, 2.0])
    logits = single(ids, attention_mask=left).logits
    torch.testing.assert_close(single(ids, attention_mask=left, labels=values).loss, F.mse_loss(logits[:, 0], values))
    with pytest.raises(ValueError, match="3 rows came without an attention_mask"):
        single(ids)


@torch.no_grad()
def test_a_model_that_looks_both_ways_classifies_and_does_not_generate(ids: Tensor, left: Tensor) -> None:
    attention = AttentionSpec(width=32, heads=4, causal=False)
    model = classifier(DecoderSpec(vocab=97, width=32, layers=2, attention=attention), 2)
    rows = [model(row[mask.bool()][None]).logits for row, mask in zip(ids, left, strict=True)]
    torch.testing.assert_close(model(ids, attention_mask=left).logits, torch.cat(rows))
    with pytest.raises(ValueError, match="only a causal model can use a cache"):
        model(ids, attention_mask=left, use_cache=True)
    with pytest.raises(ValueError, match="a language model is causal, but the spec says causal=False"):
        QKLabForCausalLM(model.config)


def test_eager_is_torchs_plain_attention(small: Small, ids: Tensor, tmp_path: Path) -> None:
    model = small()
    model.save_pretrained(tmp_path)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    seen: list[bool] = []
    for each in (model, eager):
        each.model.blocks[0].register_forward_hook(lambda *_: seen.append(torch.backends.cuda.flash_sdp_enabled()))
        each(ids)
    assert seen == [True, False]
    torch.testing.assert_close(eager(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    for quantised in ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, object()):
        with pytest.raises(ValueError, match="a quantised qklab model cannot be loaded"):
            AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantised)


def test_a_configuration_says_what_is_wrong_with_it(small: Small, tmp_path: Path) -> None:
    spec = small().config.decoder_spec
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "QKLabConfig needs spec"),
        ({"spec": 3}, "must be a DecoderSpec or its dict, but 3 came"),
        ({"spec": spec, "hidden_size": 64}, "hidden_size=64 came beside a spec in which it is 32"),
        ({"spec": spec, "vocab_sizes": 9}, r"no field 'vocab_sizes' \(did you mean 'vocab_size'\?\)"),
        ({"spec": spec, "layers": 9}, r"no field 'layers' \(it belongs to spec\)"),
        ({"spec": spec.to_dict() | {"widht": 3}}, r"no field 'widht' \(did you mean 'width'\?\)"),
        ({"spec": spec, "quantization_config": {}}, "a quantised qklab model cannot be loaded"),
    ]
    for given, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            QKLabConfig(**given)
    with pytest.raises(SpecError):
        QKLabConfig(spec=spec.to_dict() | {"width": 33})
    config = QKLabConfig(spec=spec)
    with pytest.raises(ValueError, match="num_hidden_layers follows from the spec and is 2 there, but 3 came"):
        config.num_hidden_layers = 3
    config.num_hidden_layers = 2
    LlamaConfig(hidden_size=32, num_attention_heads=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"configuration of a 'llama' model.*qklab\.hf\.convert"):
        QKLabConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).decoder_spec == spec


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.newest) for part in (1, 2, 3))])
@torch.no_grad()
def test_every_causal_mechanism_comes_back_from_transformers(part: int, tmp_path: Path) -> None:
    """Spec by spec: the same logits from what config.json says, and cached decoding as without a cache; every fifth is
    saved, loaded by the Auto class, and writes text."""
    ids = torch.arange(12).view(2, 6) * 5 % 19
    specs = [spec for spec in grid() if "cached_decoding" in contracts_of(spec)]
    assert len(specs) > 250
    for number, attention in enumerate(specs[part::4]):
        spec = DecoderSpec(vocab=20, width=8, layers=1, attention=attention, mlp_ratio=1.0, context=16)
        plain = Decoder(spec, seed=1).eval()
        model: Any = wrap_decoder(plain)
        if number % 5 == 0:
            model.save_pretrained(tmp_path)
            model = AutoModelForCausalLM.from_pretrained(tmp_path)
        else:
            model = build_with_weights(
                QKLabConfig.from_dict(json.loads(model.config.to_json_string())), dict(plain.named_parameters())
            )
        assert model.config.decoder_spec == spec
        assert torch.equal(model(ids).logits, plain(ids)), attention.name
        cache = model(ids[:, :4]).past_key_values
        rest = model(ids[:, 4:], past_key_values=cache).logits
        torch.testing.assert_close(rest, plain(ids)[:, 4:], msg=attention.name)
        if number % 5 == 0:
            way: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
            assert torch.equal(model.generate(ids, **way), model.generate(ids, use_cache=False, **way)), attention.name
