"""What is remembered, and how much of it there is."""

from typing import Any

from qklab import AttentionSpec

from .sketch import LINE, Sketch


def cache() -> Sketch:
    """Bytes to scale, read from the spec, and one row of a cache."""
    s = Sketch(360, "What is cached per token and layer at width 1024 and 16 heads, to scale; and room in a cache")
    rows: list[dict[str, Any]] = [
        {"share": share, "kv_heads": heads} for heads in (16, 4, 1) for share in ("none", "k=v")
    ]
    most = AttentionSpec(width=1024, heads=16).cache_bytes(1)
    for i, choices in enumerate(rows):
        spec = AttentionSpec(width=1024, heads=16, **choices)
        name = spec.projection.tuple_name + (f", G = {spec.kv_heads}" if spec.kv_heads < 16 else "")
        stored = spec.cache_bytes(1)
        y, wide = 34 + 32 * i, 300 * stored / most
        s.text(22, y, name, 14, "start")
        if spec.key_is_value:
            s.bar(150, y - 10, wide, 20, "kv")
        else:
            s.bar(150, y - 10, wide / 2, 20, "k")
            s.bar(150 + wide / 2, y - 10, wide / 2, 20, "v")
        saved = "" if stored == most else f"   −{100 * (1 - stored / most):g} %"
        s.text(160 + wide, y, f"{stored:,} B{saved}", 13, "start")
    for i in range(9):
        s.bar(150 + 40 * i, 264, 40, 28, "kv" if i < 6 else "paper")
    s.text(22, 278, "one sequence", 14, "start")
    s.text(270, 250, "length: filled", 13)
    s.text(450, 250, "spare", 13, colour=LINE)
    s.text(330, 314, "append fills spare room, then grows by half; crop shortens the length", 13)
    s.text(330, 334, "reorder copies rows for beam search; left padding is a text of its own that nobody sees", 13)
    return s
