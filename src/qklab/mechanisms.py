"""Every mechanism built, counted and decoded from its cache."""

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from qklab.attention.layer import Attention
from qklab.attention.spec import AttentionSpec, CouplingSpec, LatentSpec
from qklab.describe import baseline, change
from qklab.model.decoder import Decoder
from qklab.model.recipes import recipe

WIDTH, HEADS, TOKENS = 512, 8, 48


def mechanisms() -> list[AttentionSpec]:
    """One spec per mechanism, at the width of the 60M model."""

    def spec(**choices: object) -> AttentionSpec:
        return AttentionSpec(width=WIDTH, heads=HEADS, **choices)  # pyright: ignore[reportArgumentType]

    return [
        spec(),
        spec(kv_heads=2),
        spec(kv_heads=1),
        spec(share="k=v"),
        spec(share="k=v", kv_rotation="on-read"),
        spec(share="k=v", kv_heads=2),
        spec(share="q=k"),
        spec(share="q=k=v"),
        spec(latent=LatentSpec(query_rank=256, kv_rank=128, rope_width=32)),
        *(spec(coupling=CouplingSpec(kind=kind)) for kind in ("euler", "symplectic-euler", "leapfrog")),
        spec(coupling=CouplingSpec(kind="leapfrog", force="gradient")),
        *(spec(coupling=CouplingSpec(kind=kind)) for kind in ("affine", "uncoupled", "linear")),
        spec(norm="qk"),
        spec(mix="differential"),
        spec(mix="differential-v2"),
        spec(share="k=v", kv_heads=2, coupling=CouplingSpec(kind="affine"), norm="qk", mix="differential"),
    ]


@torch.no_grad()
def decoding_error(spec: AttentionSpec) -> float:
    """Largest difference between decoding through the cache and the full forward, relative to the largest output."""
    torch.manual_seed(0)
    attention, x = Attention(spec), torch.randn(1, TOKENS, spec.width)
    cache = attention.new_cache(batch=1, tokens=TOKENS)
    chunks: list[Tensor] = list(x.split([TOKENS // 2] + [1] * (TOKENS - TOKENS // 2), 1))
    full = attention(x)
    decoded = torch.cat([attention(chunk, cache=cache) for chunk in chunks], 1)
    return float((decoded - full).abs().max() / full.abs().max())


def show(console: Console) -> bool:
    """Print what every mechanism costs; True when every cache agreed with its full forward."""
    rows = Table(title=f"One attention layer, width {WIDTH}, {HEADS} heads; float32 on the CPU", title_justify="left")
    rows.add_column("mechanism")
    for column in ("parameters", "vs (Q,K,V)", "FLOPs/token", "cache B/token", "cache", "cached = full"):
        rows.add_column(column, justify="right")
    agreed = True
    for spec in mechanisms():
        plain, error = baseline(spec), decoding_error(spec)
        agreed &= error < 1e-4
        rows.add_row(
            spec.name,
            f"{spec.parameters():,}",
            change(spec.parameters(), plain.parameters()),
            f"{spec.flops_per_token(1024):,}",
            f"{spec.cache_bytes(1):,}",
            change(spec.cache_bytes(1), plain.cache_bytes(1)),
            f"{'yes' if error < 1e-4 else 'NO'}  {error:.0e}",
        )
    console.print(rows)
    console.print(
        "FLOPs: forward matrix products at 1,024 tokens. Cache: bf16. Last column: half the tokens in one chunk, then\n"
        "one at a time through the cache; largest difference from the full forward relative to the largest output.\n"
    )
    agreed &= generation(console)
    console.print()
    return agreed


@torch.no_grad()
def generation(console: Console) -> bool:
    """An untrained nano decoder continues a prompt greedily, with its cache and by full forwards: the same tokens."""
    model = Decoder(recipe("nano", share="k=v", kv_heads=2, coupling=CouplingSpec(kind="leapfrog")), seed=0)
    prompt = torch.arange(8)[None]
    cached = model.generate(prompt, 24, temperature=0)
    full = prompt
    for _ in range(24):
        full = torch.cat([full, model(full)[:, -1:].argmax(-1)], 1)
    same = torch.equal(cached, full)
    console.print(f"Decoder {model.spec.name}, {model.spec.parameters():,} parameters, untrained:")
    console.print(f"  24 tokens greedily through the cache and by full forwards: {'the same' if same else 'DIFFERENT'}")
    return same
