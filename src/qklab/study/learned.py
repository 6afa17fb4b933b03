"""How far the models of a study have come: what they read, what they learned of it, and on how much that was tested."""

from collections.abc import Sequence
from typing import Any

from qklab.runs.progress import format_duration
from qklab.study.plan import write_rounded
from qklab.study.records import RunResult

BARELY = 0.9  # of a unigram model's loss: above it little more than how often tokens occur has been learned
BUSY = 1.25  # runs that take so much longer than planned are told of


def has_barely_learned(results: Sequence[RunResult]) -> bool:
    """Whether the mean test loss of these runs is still close to that of a model without context."""
    losses = collect_test(results, "loss", "unigram_loss")
    return bool(losses) and sum(loss for loss, _ in losses) > BARELY * sum(unigram for _, unigram in losses)


def collect_test(results: Sequence[RunResult], *names: str) -> list[list[float]]:
    """These numbers of the final evaluation on test text, of every finished run that has all of them."""
    found = [result.summary.get("evaluation", {}).get("test", {}) for result in results if result.status == "finished"]
    return [[own[name] for name in names] for own in found if all(own.get(name) is not None for name in names)]


def describe_learning_state(results: Sequence[RunResult], arm: str) -> list[str]:
    """Sentences about what the runs of an arm read, learned and were tested on."""
    finished = [result.summary for result in results if result.status == "finished"]
    if not finished:
        return []
    return [*describe_reading(finished[0]), *describe_loss(results, arm), *describe_sampling(results)]


def describe_reading(summary: dict[str, Any]) -> list[str]:
    tokens, parameters, corpus = summary.get("tokens"), summary.get("parameters"), summary.get("corpus")
    if not tokens or not parameters:
        return []
    rate = f"{write_rounded(tokens / parameters)} a parameter"
    sentence = f"Each run trained {write_rounded(parameters / 1e6, 3)} M parameters on {tokens:,} tokens, {rate}"
    if corpus is None or not corpus["train_tokens"]:
        return [f"{sentence}."]
    if "sequences" in corpus:
        return [
            f"{sentence}: {write_rounded(tokens / corpus['train_tokens'])} times {corpus['sequences']:,} sequences."
        ]
    used = min(1.0, tokens / corpus["train_tokens"]) * corpus["train_bytes"]
    of = corpus["text_bytes"] or corpus["train_bytes"]
    epochs = tokens / corpus["train_tokens"]
    often = f", each {write_rounded(epochs)} times" if epochs > 1 else ""
    return [
        f"{sentence}: {write_rounded(used / 1e6, 3)} MB of the corpus's {write_rounded(of / 1e6, 3)} MB of text{often}."
    ]


def describe_loss(results: Sequence[RunResult], arm: str) -> list[str]:
    losses = collect_test(results, "loss", "unigram_loss")
    if not losses:
        return []
    if hits := collect_test(results, "accuracy", "sequence_accuracy", "chance"):
        right, whole, chance = (100 * sum(column) / len(hits) for column in zip(*hits, strict=True))
        return [
            f"{arm} gets {right:.2f} % of the answers right and {whole:.2f} % of the sequences; saying the most "
            f"frequent answer of each place, {chance:.2f} % of the answers would be right."
        ]
    loss, unigram = (sum(column) / len(losses) for column in zip(*losses, strict=True))
    sentence = f"The test loss of {arm} is {loss:.3f} nats per token, that of a unigram model {unigram:.3f}."
    if has_barely_learned(results):
        sentence += (
            " These models have barely learned: what holds for them says little of models that have; more tokens a run "
            "would tell."
        )
    return [sentence]


def describe_sampling(results: Sequence[RunResult]) -> list[str]:
    what, read, there = "tokens", "tokens", "split_tokens"
    if collect_test(results, "sequences", "split_sequences"):
        what, read, there = "sequences", "sequences", "split_sequences"
    sampled = [own for own in collect_test(results, read, there, "standard_error") if own[2]]
    if not sampled:
        return []
    number, whole, error = sampled[0]
    return [
        f"Tested on {number:,} of {whole:,} {what} of test text, the same for every run: another choice would "
        f"move all losses by about ±{error:.2g}, and differences between arms by less."
    ]


def describe_pace(results: Sequence[RunResult], planned: float | None) -> str | None:
    """A sentence on runs that took longer than planned; None where they did not."""
    taken = [result.process_seconds for result in results]
    if planned is None or not taken or sum(taken) / len(taken) <= BUSY * planned:
        return None
    mean = sum(taken) / len(taken)
    return (
        f"Runs took {write_rounded(mean / planned)} times as long as planned ({format_duration(mean)} instead of "
        f"{format_duration(planned)}): the machine was busier than when its speed was measured."
    )
