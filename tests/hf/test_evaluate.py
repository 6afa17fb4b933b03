"""Scores from lm-evaluation-harness against the same scores computed by hand from the model's logits."""

import copy
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import byte_llama, byte_tokenizer
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qklab import Decoder, LatentSpec, recipe
from qklab.cli import main
from qklab.data.questions import TASKS
from qklab.data.tokenizer import byte_of_character
from qklab.hf.evaluate import (
    evaluate,
    evaluate_folder,
    find_tasks,
    hash_weights,
    load_harness_tasks,
    make_scorer,
    run_harness,
    silence_harness,
)
from qklab.hf.export import export_run, wrap_decoder
from qklab.train import load_model, resolve_run, train

Line = dict[str, Any]
Scored = Callable[[str, str], tuple[float, bool]]
WORDS = ["a", "the", "cat", "dog", "sat", "ran", "on", "in", "big", "red", "river", "they", "found", "slowly", "home"]


def sentence(rng: random.Random, length: int) -> str:
    return " ".join(rng.choices(WORDS, k=length))


def write(path: Path, lines: list[Line]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def choice(query: str, choices: list[str], gold: int) -> Line:
    return {"query": query, "choices": choices, "gold": gold}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files in the published files' formats."""
    folder, rng = tmp_path_factory.mktemp("evals"), random.Random(0)
    own = folder / "llm-foundry"

    def drawn(make: Callable[[], Line], count: int = 24) -> list[Line]:
        return [make() for _ in range(count)]

    write(own / "lambada_openai.jsonl", drawn(lambda: {"context": sentence(rng, 9), "continuation": sentence(rng, 1)}))
    write(
        own / "piqa.jsonl",
        drawn(
            lambda: choice(
                f"Question: {sentence(rng, 5)}\n",
                [sentence(rng, rng.randint(1, 6)) for _ in range(2)],
                rng.randint(0, 1),
            )
        ),
    )
    write(
        own / "winogrande.jsonl",
        drawn(
            lambda: {
                "context_options": [sentence(rng, 4), sentence(rng, 4)],
                "continuation": sentence(rng, 2),
                "gold": rng.randint(0, 1),
            }
        ),
    )
    write(own / "winograd_wsc.jsonl", [{"context_options": ["It", "He"], "continuation": "ran.", "gold": 1}] * 2)
    for name in ("arc_easy", "arc_challenge"):
        write(own / f"{name}.jsonl", [choice("Question: Why?", ["so", "because"], 1)] * 2)
    write(own / "openbook_qa.jsonl", [choice("Fog is around", ["a marsh", "a desert"], 0)] * 2)
    write(own / "boolq.jsonl", [choice("Passage: It is.\nQuestion: is it?", ["no", "yes"], 1)] * 2)
    write(own / "copa.jsonl", [choice("He ran, therefore", ["he slept.", "he sat."], 0)] * 2)
    for name in ("commonsense_qa", "siqa"):
        write(own / f"{name}.jsonl", [choice("Question: Q?\nChoices:\nA. a\nB. b\nAnswer:", ["A", "B"], 0)] * 2)
    write(own / "pubmed_qa_labeled.jsonl", [{"context": "Is it?\nA. yes\nAnswer: ", "continuation": "no"}] * 2)
    write(own / "jeopardy_all.jsonl", [{"context": "HISTORY: He ran", "continuation": "Byrd ", "category": "h"}] * 2)
    for name, count in (("wh_island", 12), ("passive_1", 7)):
        pairs = drawn(lambda: {"sentence_good": sentence(rng, 4), "sentence_bad": sentence(rng, 4), "UID": "x"}, count)
        write(folder / "blimp" / f"{name}.jsonl", pairs)
    write(folder / "few.jsonl", [choice(f"{word} and", ["two", "three"], 0) for word in ("One", "Five", "Nine")])
    write(folder / "mine.jsonl", [choice("One and", ["two", "three"], 0)] * 2)
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return byte_llama(max_position_embeddings=160, initializer_range=0.1).eval()


@pytest.fixture
def scored(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Scored:
    """log p(continuation | context), and whether every token of it is the likeliest, from the logits."""

    def both(context: str, continuation: str) -> tuple[float, bool]:
        place = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        number = {byte: place[letter] for letter, byte in byte_of_character().items()}
        given, wanted = [number[byte] for byte in context.encode()] or [256], [number[b] for b in continuation.encode()]
        with torch.no_grad():
            logits = model(torch.tensor([given + wanted])).logits[0].double().log_softmax(-1)
        picked = logits[len(given) - 1 : -1]
        target = torch.tensor(wanted)
        return float(picked.gather(1, target[:, None]).sum()), bool((picked.argmax(-1) == target).all())

    return both


def rows_of(scores: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["task"].removeprefix("local-"), row["metric"]): row for row in scores["rows"]}


def lines_of(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


ALL = [*TASKS, "mine"]
FIRST = {
    "arc_easy": ["Question: Why?\nAnswer:", " so"],
    "arc_challenge": ["Question: Why?\nAnswer:", " so"],
    "openbookqa": ["Fog is around", " a marsh"],
    "boolq": ["It is.\nQuestion: is it?\nAnswer:", " no"],
    "copa": ["He ran, therefore", " he slept."],
    "commonsense_qa": ["Question: Q?\nChoices:\nA. a\nB. b\nAnswer:", " A"],
    "siqa": ["Question: Q?\nChoices:\nA. a\nB. b\nAnswer:", " A"],
    "wsc273": ["It", " ran."],
    "pubmedqa": ["Is it?\nA. yes\nAnswer:", " yes"],
    "jeopardy": ["HISTORY: He ran\nAnswer:", " Byrd"],
    "mine": ["One and", " two"],
}


def test_scores_are_those_computed_from_the_logits(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, data: Path, scored: Scored
):
    scores = evaluate(model, tokenizer, [f"local-{name}" for name in ALL], data=data, batch_size=5)
    rows, own = rows_of(scores), data / "llm-foundry"

    words = [scored(line["context"], " " + line["continuation"]) for line in lines_of(own / "lambada_openai.jsonl")]
    mean = sum(ll for ll, _ in words) / len(words)
    assert rows["lambada", "perplexity"]["value"] == pytest.approx(float(torch.tensor(-mean).exp()), rel=1e-4)
    assert rows["lambada", "acc"]["value"] == sum(greedy for _, greedy in words) / len(words)

    plain, normed = [], []
    for line in lines_of(own / "piqa.jsonl"):
        lls = [scored(line["query"].rstrip() + "\nAnswer:", f" {option}")[0] for option in line["choices"]]
        plain.append(lls.index(max(lls)) == line["gold"])
        per_letter = [ll / len(option) for ll, option in zip(lls, line["choices"], strict=True)]
        normed.append(per_letter.index(max(per_letter)) == line["gold"])
    assert rows["piqa", "acc"]["value"] == pytest.approx(sum(plain) / len(plain))
    assert rows["piqa", "acc_norm"]["value"] == pytest.approx(sum(normed) / len(normed))
    assert plain != normed

    right = []
    for line in lines_of(own / "winogrande.jsonl"):
        lls = [scored(context, " " + line["continuation"])[0] for context in line["context_options"]]
        right.append(lls.index(max(lls)) == line["gold"])
    assert rows["winogrande", "acc"]["value"] == pytest.approx(sum(right) / len(right))

    means = []
    for name in ("wh_island", "passive_1"):
        pairs = lines_of(data / "blimp" / f"{name}.jsonl")
        better = [scored("", " " + p["sentence_good"])[0] > scored("", " " + p["sentence_bad"])[0] for p in pairs]
        means.append(sum(better) / len(better))
        assert rows[f"blimp_{name}", "acc"]["value"] == pytest.approx(means[-1])
        assert rows[f"blimp_{name}", "acc"]["group"] == "local-blimp"
    assert rows["blimp", "acc"]["value"] == pytest.approx(sum(means) / 2)
    assert means[0] != means[1]
    assert rows["blimp", "acc"]["n"] == 19

    asked = {name: scores["tasks"][f"local-{name}"].get("first_request") for name in FIRST}
    assert asked == FIRST
    metrics = {name: {metric for task, metric in rows if task == name} for name in ALL}
    assert metrics["lambada"] == {"acc", "perplexity"}
    normed_tasks = {name for name in ALL if metrics[name] == {"acc", "acc_norm"}}
    assert normed_tasks == {"arc_easy", "arc_challenge", "piqa", "openbookqa", "mine"}
    assert scores["cut"] == 0
    assert len(scores["tasks"]["local-blimp"]["sha256"]) == 2


def test_a_seed_decides_the_examples_and_nothing_else_varies(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, data: Path
):
    tasks = ["local-piqa", "local-lambada", "local-winogrande"]

    def run(seed: int) -> dict[str, Any]:
        return evaluate(model, tokenizer, tasks, data=data, limit=6, fewshot=1, seed=seed)

    first, again, other = run(1), run(1), run(2)
    assert first == again
    assert first["tasks"] != other["tasks"]
    assert {row["n"] for row in first["rows"]} == {6}
    lambada = lines_of(data / "llm-foundry/lambada_openai.jsonl")
    context, target = first["tasks"]["local-lambada"]["first_request"]
    example, question = context.split("\n\n")
    assert question == lambada[0]["context"]
    assert target == " " + lambada[0]["continuation"]
    assert example in [f"{line['context']} {line['continuation']}" for line in lambada[1:]]
    for seed in range(3):
        few = evaluate(model, tokenizer, ["local-few"], data=data, fewshot=2, seed=seed)["tasks"]["local-few"]
        *examples, question = few["first_request"][0].split("\n\n")
        assert question == "One and"
        assert sorted(examples) == ["Five and two", "Nine and two"]  # never the question itself


def test_the_command_prints_a_table_and_keeps_where_it_comes_from(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(model.config, "max_position_embeddings", 48)
    model.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    out = tmp_path / "scores.json"
    words = ["eval", str(tmp_path / "llama"), "--tasks", "local-piqa", "--data", str(data), "--limit", "10"]
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--out", str(out), "--device", "cpu"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    kept = json.loads(out.read_text(encoding="utf-8"))
    for row in kept["rows"]:
        assert re.search(rf"{row['task']} +{row['metric']} ↑ +{row['value']:.4f} +{row['stderr']:.4f} +10", printed)
    questions = lines_of(data / "llm-foundry/piqa.jsonl")[:10]
    lengths = [len(f"{line['query'].rstrip()}\nAnswer: {option}") for line in questions for option in line["choices"]]
    cut = sum(length - 1 > 48 for length in lengths)  # the last token is never read
    assert 0 < cut < 20
    assert f"\n{cut} texts were longer than the model's 48 tokens; their beginnings were cut.\n" in printed
    assert kept["settings"]["tasks"] == ["local-piqa"]
    assert kept["environment"]["packages"]["lm_eval"]
    assert kept["model"]["parameters"] == model.num_parameters()
    assert {"commit", "date", "cut"} <= kept.keys()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    assert kept["model"]["weights"] == hash_weights(model) != hash_weights(other)
    files = kept["tasks"]["local-piqa"]["sha256"]
    assert list(files) == ["piqa.jsonl"]


def test_a_run_is_scored_as_it_was_trained_and_as_its_export_is(data: Path, tmp_path: Path):
    texts, rng = tmp_path / "texts", random.Random(1)
    texts.mkdir()
    for split in ("train", "valid", "test"):
        (texts / f"{split}.txt").write_text("\n<|endoftext|>\n".join(sentence(rng, 40) for _ in range(12)))
    settings = {
        "corpus": {"source": str(texts), "tokenizer": "bytes"},
        "model": {"recipe": "nano", "layers": 1, "context": 128},
        "attention": {"share": "k=v"},
        "batch": {"sequences": 4},
        "budget": {"tokens": 512},
        "execution": {"device": "cpu"},
    }
    spec, execution = resolve_run(settings)
    train(spec, tmp_path / "run", execution)
    export_run(tmp_path / "run", tmp_path / "exported")
    options: dict[str, Any] = {"data": data, "device": "cpu", "batch_size": 3}
    scores, exported = (evaluate_folder(tmp_path / name, ["local-lambada"], **options) for name in ("run", "exported"))
    assert scores["rows"] == exported["rows"]
    assert scores["model"]["run"]
    assert scores["model"]["weights"] == exported["model"]["weights"]

    decoder, tokenizer = load_model(tmp_path / "run")
    found = []
    for line in lines_of(data / "llm-foundry/lambada_openai.jsonl"):
        before, after = (len(part) for part in tokenizer.encode([line["context"], " " + line["continuation"]]))
        whole = [tokenizer.eot, *tokenizer.encode([f"{line['context']} {line['continuation']}"])[0].tolist()]
        with torch.no_grad():
            likelihoods = decoder(torch.tensor([whole]))[0].double().log_softmax(-1)
        assert len(whole) == 1 + before + after
        found.append(sum(float(likelihoods[i - 1, whole[i]]) for i in range(1 + before, len(whole))))
    perplexity = float(torch.tensor(-sum(found) / len(found)).exp())
    assert rows_of(scores)["lambada", "perplexity"]["value"] == pytest.approx(perplexity, rel=1e-4)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("FOLDER", "say with --tasks what to score on"),
        ("FOLDER --tasks local-piqa", "local-piqa reads a local file; say with --data"),
        ("FOLDER --tasks local-pika --data DATA", "local-pika is no known task .*did you mean 'local-piqa'"),
        ("FOLDER --tasks local-copa --data BAD", "local-copa reads copa.jsonl, but it is neither in"),
        ("FOLDER --tasks local-piqa --data DATA/nowhere", "--data must be a folder"),
        ("FOLDER --tasks local-piqa local-piqa --data DATA", "more than once"),
        ("FOLDER --tasks local-piqa --data DATA --limit 0", "limit must be at least 1, but 0 came"),
        ("FOLDER --tasks local-blimp --data DATA --fewshot 2", "defined without examples; leave --fewshot out"),
        ("FOLDER --tasks local-few --data DATA --fewshot 3", "has 3 questions, so at most 2 examples; 3 came"),
        ("DATA --tasks local-piqa --data DATA", "neither a run directory .* nor a Transformers model"),
        ("FOLDER --tasks local-piqa --data DATA", "holds no causal language model that can be loaded"),
        ("FOLDER --tasks local-piqa --data DATA --out nowhere/x.json", "there is no folder nowhere"),
        ("FOLDER --tasks local-broken --data BAD", "line 2 of .*broken.jsonl is no JSON"),
        ("FOLDER --tasks local-gold --data BAD", "line 1 of .*gold.jsonl has no usable 'gold'"),
        ("FOLDER --tasks local-single --data BAD", "line 1 of .*single.jsonl has no usable 'choices'"),
        ("FOLDER --tasks local-other --data BAD", "of no known kind"),
        ("FOLDER --tasks local-empty --data BAD", "it is empty"),
        ("FOLDER --tasks local-pubmedqa --data BAD", "is 'perhaps', but it must be one of yes, no, maybe"),
    ],
)
def test_bad_input_ends_in_one_sentence(
    words: str, sentence: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, bad = tmp_path / "model", tmp_path / "bad"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    write(bad / "broken.jsonl", [choice("a", ["b", "c"], 0)])
    with (bad / "broken.jsonl").open("a") as file:
        file.write("{")
    write(bad / "gold.jsonl", [choice("a", ["b", "c"], 2)])
    write(bad / "single.jsonl", [choice("a", ["b"], 0)])
    write(bad / "other.jsonl", [{"question": "a"}])
    write(bad / "empty.jsonl", [])
    write(bad / "pubmed_qa_labeled.jsonl", [{"context": "a", "continuation": "perhaps"}])
    places = {"FOLDER": str(folder), "DATA": str(data), "BAD": str(bad)}
    arguments = [re.sub("FOLDER|DATA|BAD", lambda found: places[found[0]], word) for word in words.split()]
    with pytest.raises(SystemExit) as stopped:
        main(["eval", *arguments])
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qklab:")]
    assert stopped.value.code == 2
    assert len(err) == 1
    assert re.search(sentence, err[0])


def test_an_answer_longer_than_the_context_is_scored_in_pieces_each_after_what_precedes_it(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
):
    """Of PIQA's own answers some are longer than the context of the smallest models."""
    small = byte_llama(max_position_embeddings=16, initializer_range=0.1).eval()
    choices = ["very " * 9 + "long", "short"]
    write(tmp_path / "piqa.jsonl", [choice("Question: How?\n", choices, gold) for gold in (0, 1)])
    shares: list[float] = []
    with silence_harness():
        found = find_tasks(["local-piqa"], tmp_path, None)
        scores = run_harness(small, tokenizer, found, None, 2, None, 0, shares.append)
        lm = make_scorer(small, tokenizer, 2)
        given, wanted = (tokenizer.encode(text) for text in ("Question: How?\nAnswer:", f" {choices[0]}"))
        ((value, greedy),) = lm._loglikelihood_tokens([(("", ""), given, wanted)], disable_tqdm=True)
    expected = 0.0
    for first in range(0, len(wanted), 8):  # half a context at a time
        piece = wanted[first : first + 8]
        seen = [*given, *wanted[:first], *piece][-17:]
        with torch.no_grad():
            logits = small(torch.tensor([seen[:-1]])).logits[0].double().log_softmax(-1)[-len(piece) :]
        expected += float(logits.gather(1, torch.tensor(piece)[:, None]).sum())
    assert len(wanted) > 2 * small.config.max_position_embeddings
    assert value == pytest.approx(expected, rel=1e-5)
    assert not greedy
    assert scores["cut"] == 4
    assert shares[0] == 0.0
    assert shares == sorted(shares)
    assert rows_of(scores)["piqa", "acc"]["value"] == 0.5


def test_texts_as_a_whole_and_generated_answers_are_scored_too(tokenizer: PreTrainedTokenizerFast):
    import lm_eval
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

    texts = [{"text": word, "answer": ""} for word in WORDS[:4]]
    common = {"custom_dataset": lambda **_: {"test": Dataset.from_list(texts)}, "test_split": "test"}
    bits = {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}
    same = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    rolling = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [bits],
    }
    until = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False}
    written = {"output_type": "generate_until", "doc_to_text": "text", "doc_to_target": "answer", "metric_list": [same]}
    tasks = [
        ConfigurableTask(config={"task": "rolling", **common, **rolling}),
        ConfigurableTask(config={"task": "written", **common, **written, "generation_kwargs": until}),
    ]
    spec = recipe("nano", vocab=257, layers=1, latent=LatentSpec(query_rank=12, kv_rank=8, rope_width=4))
    model: Any = wrap_decoder(Decoder(spec, seed=0), bos_token_id=256, eos_token_id=256, pad_token_id=256)
    harness: Any = lm_eval.simple_evaluate
    with silence_harness():
        manager = TaskManager(include_defaults=False)
        results = harness(model=make_scorer(model, tokenizer, 2), tasks=tasks, task_manager=manager, bootstrap_iters=0)
    total, count = 0.0, 0
    for line in texts:
        ids = torch.tensor([[256, *tokenizer.encode(line["text"])]])
        with torch.no_grad():
            likelihoods = model(ids).logits[0, :-1].double().log_softmax(-1)
        total += float(likelihoods.gather(1, ids[0, 1:, None]).sum())
        count += len(line["text"])
    assert results["results"]["rolling"]["bits_per_byte,none"] == pytest.approx(-total / count / math.log(2), rel=1e-5)
    for line, sample in zip(texts, results["samples"]["written"], strict=True):
        ids = torch.tensor([tokenizer.encode(line["text"])])
        answer = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
        assert sample["resps"][0][0] == str(tokenizer.decode(answer, skip_special_tokens=True)).split("\n")[0]


def test_a_model_without_its_tokenizer_is_one_sentence(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, data: Path, tmp_path: Path
):
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer; put one beside the model"):
        evaluate_folder(tmp_path, ["local-piqa"], data=data, device="cpu")
    smaller = LlamaForCausalLM(LlamaConfig(**model.config.to_diff_dict() | {"vocab_size": 90, "pad_token_id": None}))
    with pytest.raises(ValueError, match=r"gives the number \d+, but the model knows 90 tokens"):
        evaluate(smaller, tokenizer, ["local-piqa"], data=data)


def test_a_task_that_cannot_be_downloaded_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    settings = {"dataset_path": "nobody/nothing", "test_split": "test", "output_type": "loglikelihood"}
    lines = {"task": "piqa", **settings, "doc_to_text": "text", "doc_to_target": "target"}
    (tmp_path / "piqa.yaml").write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    with pytest.raises(ValueError, match=r"the data of piqa could not be downloaded: .*; local-piqa reads local files"):
        load_harness_tasks(manager, "piqa")
    with pytest.raises(ValueError, match=r"there is no task 'pica' \(did you mean 'piqa'\?\)"):
        load_harness_tasks(manager, "pica")


def test_a_missing_harness_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "lm_eval" else object())
    with pytest.raises(SystemExit):
        main(["eval", str(tmp_path), "--tasks", "local-piqa"])
    assert "evaluation needs lm_eval, which is not installed: pip install 'qklab[eval]'." in capsys.readouterr().err


def test_other_commands_do_not_wait_for_the_harness():
    seen = "import sys, qklab.cli; print([name for name in ('lm_eval', 'transformers') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == "[]"
