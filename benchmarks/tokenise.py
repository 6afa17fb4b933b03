"""How fast a corpus is prepared: `QKLAB_DATA=… python benchmarks/tokenise.py --corpus wikipedia --name two-cores`.

The gate first: on a sample of the corpus the tokens must be those of `tokenizers` itself, text by text. Then the whole
corpus is prepared into a temporary folder, once per tokenizer. Rates are bytes of text per second of wall clock, over
the tokenising pass alone and over everything (reading, training the BPE, tokenising, hashing). Processor seconds are
kept beside them, because wall clock on a machine with other work to do says little.
"""

import argparse
import os
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import keep, provenance
from qklab.data import Corpus, DataSpec, prepare_corpus
from qklab.data.tokenizer import build_bpe
from qklab.runs.environment import count_cores

SPECS = {"gpt2": {"tokenizer": "gpt2"}, "bpe-4096": {"tokenizer": "bpe", "vocab": 4096}}


def gate(corpus: Corpus, documents: int = 100) -> int:
    """Tokens compared with those of `tokenizers`; raises where one differs."""
    reference, valid, compared = build_bpe(corpus.tokenizer.definition), corpus.splits["valid"], 0
    for start, stop in pairwise(valid.starts[: documents + 1].tolist()):
        tokens = valid.read(start + 1, stop)
        expected = reference.encode(corpus.tokenizer.decode(tokens), add_special_tokens=False).ids
        if tokens.tolist() != expected:
            raise SystemExit(f"the document at token {start} is tokenised differently by tokenizers")
        compared += len(tokens)
    return compared


def batch_rate(corpus: Corpus) -> float:
    """MB/s of `tokenizers`' own encode_batch_fast with its own threads, on the held-out text: what there is to beat."""
    texts = []
    for name in ("valid", "test"):
        split = corpus.splits[name]
        for start, stop in pairwise(split.starts.tolist()):
            texts.append(corpus.tokenizer.decode(split.read(start + 1, stop)))
    reference = build_bpe(corpus.tokenizer.definition)
    start = time.perf_counter()
    for i in range(0, len(texts), 64):
        reference.encode_batch_fast(texts[i : i + 64], add_special_tokens=False)
    return sum(len(text.encode()) for text in texts) / 1e6 / (time.perf_counter() - start)


def measured(spec: DataSpec, data: Path, workers: int) -> dict[str, Any]:
    reports: list[tuple[float, int]] = []

    def note(what: str, done: int, total: int) -> None:
        if what == "tokenising":
            reports.append((time.perf_counter(), done))

    with tempfile.TemporaryDirectory() as folder:
        load, before, start = os.getloadavg()[0], os.times(), time.perf_counter()
        corpus = prepare_corpus(spec, data=data, out=Path(folder) / "out", workers=workers, progress=note)
        whole, after = time.perf_counter() - start, os.times()
        size = sum(split.bytes for split in corpus.splits.values())
        (begun, done_first), (ended, done_last) = reports[0], reports[-1]
        processor = sum(after[:4]) - sum(before[:4])
        return {
            "bytes": size,
            "tokens": sum(split.tokens for split in corpus.splits.values()),
            "gate_tokens_compared": gate(corpus),
            "seconds": round(whole, 2),
            "seconds_tokenising": round(ended - begun, 2),
            "processor_seconds": round(processor, 2),
            "mb_per_second": round(size / 1e6 / whole, 2),
            "mb_per_second_tokenising": round((done_last - done_first) / 1e6 / (ended - begun), 2),
            "mb_per_processor_second": round(size / 1e6 / processor, 2),
            "mb_per_second_tokenizers_encode_batch_fast": round(batch_rate(corpus), 2),
            "load_average_before": round(load, 2),
            "load_average_after": round(os.getloadavg()[0], 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast a corpus is prepared.")
    parser.add_argument("--corpus", default="wikipedia", help="name of a corpus in QKLAB_DATA")
    parser.add_argument("--workers", type=int, default=count_cores())
    parser.add_argument("--limit-bytes", type=int, default=None, help="only this much training text")
    parser.add_argument("--commit", default=None, help="where git is not at hand")
    parser.add_argument("--name", default=None, help="keep the result as results/tokenise-NAME.json")
    options = parser.parse_args()
    data = Path(os.environ["QKLAB_DATA"])
    result: dict[str, Any] = {
        **provenance("cpu", options.commit),
        "cores": count_cores(),
        "workers": options.workers,
        "tokenizers": version("tokenizers"),
        "numpy": version("numpy"),
        "corpus": options.corpus,
    }
    for name, choice in SPECS.items():
        spec = DataSpec(source=options.corpus, limit_bytes=options.limit_bytes, **choice)
        result[name] = measured(spec, data, options.workers)
        print(name, result[name])
    if options.name:
        keep(f"tokenise-{options.name}", result)


if __name__ == "__main__":
    main()
