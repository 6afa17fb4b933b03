"""A study without the command line: two attentions, three paired seeds, tuned alike, an answer and a report.

The same folder again goes on where it was, and `spec.replace(seeds=6)` adds seeds to it.
"""

from contextlib import closing
from pathlib import Path

from qklab.report import build_report
from qklab.runs.progress import Terminal
from qklab.study import StudySpec
from qklab.study.answer import write_answer
from qklab.study.execute import Study
from qklab.study.executors.local import LocalExecutor


def write_texts(folder: Path) -> None:
    """Stands for yours: a folder of texts, here of numbers that count up."""
    folder.mkdir(exist_ok=True)
    for i, (split, texts) in enumerate({"train": 200, "valid": 20, "test": 20}.items()):
        numbers = (" ".join(str(1000 * i + 7 * text + n) for n in range(20)) for text in range(texts))
        (folder / f"{split}.txt").write_text("\n<|endoftext|>\n".join(numbers), encoding="utf-8")


def main() -> None:
    write_texts(Path("texts"))
    spec = StudySpec.from_dict(
        {
            "name": "shared key and value",
            "baseline": "standard",
            "arms": {"standard": {}, "k=v": {"attention": {"share": "k=v"}}},
            "base": {
                "corpus": {"tokenizer": "bytes"},
                "model": {"layers": 1, "width": 16, "context": 16},
                "attention": {"heads": 2},
                "batch": {"sequences": 4},
                "budget": {"tokens": 1024},
                "evaluation": {"times": 2, "tokens": 256, "probes": 0},
            },
            "corpora": ["texts"],
            "lrs": [0.01],
            "seeds": 3,
        }
    )
    study = Study(spec, Path("my-study"))
    with study.open(), closing(LocalExecutor()) as executor:
        results = study.carry_out(executor, Terminal())
    print(write_answer(spec, results))
    print(build_report([study.folder], study.folder / "report.html"))


if __name__ == "__main__":  # the runs are processes that import this file
    main()
