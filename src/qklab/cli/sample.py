import dataclasses
from pathlib import Path

from tyro.conf import Positional


@dataclasses.dataclass(frozen=True)
class SampleCommand:
    """Draws through the model's key/value cache.

    Args:
        run: a run directory
        prompt: the text to continue
        tokens: how many tokens at most
        temperature: 0 takes the likeliest token
        best: the best checkpoint instead of the newest
    """

    run: Positional[Path]
    prompt: Positional[str] = ""
    tokens: int = 100
    temperature: float = 0.8
    seed: int | None = None
    best: bool = False

    def execute(self) -> int:
        from qklab.train.load import load_model, sample_text

        decoder, tokenizer = load_model(self.run, "best" if self.best else "newest")
        print(sample_text(decoder, tokenizer, self.prompt, self.tokens, temperature=self.temperature, seed=self.seed))
        return 0
