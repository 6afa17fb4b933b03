import dataclasses
import sys


@dataclasses.dataclass(frozen=True)
class MechanismsCommand:
    """Every mechanism: what it costs in parameters, FLOPs and cache, and whether decoding through its cache agrees."""

    def execute(self) -> int:
        from rich.console import Console
        from rich.table import Table

        from qklab.describe import format_change, make_baseline
        from qklab.mechanisms import HEADS, TOLERANCE, WIDTH, decoding_error, generate_both_ways, list_mechanisms

        console = Console(width=None if sys.stdout.isatty() else 140)
        title = f"One attention layer, width {WIDTH}, {HEADS} heads; float32 on the CPU"
        table = Table(title=title, title_justify="left")
        table.add_column("mechanism")
        for column in ("parameters", "vs (Q,K,V)", "FLOPs/token", "cache B/token", "cache", "cached = full"):
            table.add_column(column, justify="right")
        agreed = True
        for spec in list_mechanisms():
            plain, error = make_baseline(spec), decoding_error(spec)
            agreed &= error < TOLERANCE
            table.add_row(
                spec.name,
                f"{spec.parameters():,}",
                format_change(spec.parameters(), plain.parameters()),
                f"{spec.flops_per_token(1024):,}",
                f"{spec.cache_bytes_per_token():,}",
                format_change(spec.cache_bytes_per_token(), plain.cache_bytes_per_token()),
                f"{'yes' if error < TOLERANCE else 'NO'}  {error:.0e}",
            )
        console.print(table)
        console.print(
            "FLOPs: forward matrix products at 1,024 tokens. Cache: bf16, of each token; what is looked back on is "
            "kept once\nper sequence. Last column: half the tokens in one chunk, then one at a time through the cache; "
            "largest\ndifference from the full forward relative to the largest "
            "output.\n"
        )
        decoder, same = generate_both_ways()
        console.print(f"Decoder {decoder.name}, {decoder.parameters():,} parameters, untrained:")
        console.print(
            f"  24 tokens greedily through the cache and by full forwards: {'the same' if same else 'DIFFERENT'}\n"
        )
        return 0 if agreed and same else 1
