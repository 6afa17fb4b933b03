"""Stage 5: scores, weights and sums."""

import math

from .sketch import LINE, STROKE, Rows, Sketch


def softmax() -> Sketch:
    """One query, four keys: scores, weights, a weighted sum."""
    s = Sketch(280, "Softmax attention: scores become weights that sum to one; the output is the weighted sum")
    scores = (0.4, 1.7, 0.2, 1.0)
    weights = [math.exp(score) / sum(map(math.exp, scores)) for score in scores]
    s.box(60, 62, 56, 40, "q_i", "q", 17)
    for j, weight in enumerate(weights):
        x = 190 + 84 * j
        s.box(x, 62, 56, 36, f"k_{j + 1}", "k")
        s.bar(x - 16, 166 - 108 * weight, 32, 108 * weight, "q")
        s.text(x, 176, f"{weight:.2f}", 13)
        s.box(x, 222, 56, 36, f"v_{j + 1}", "v")
        s.arrow((x, 98), (x, 80), colour=STROKE["q"])
        s.arrow((x, 184), (x, 204))
        s.line((x, 240), (x, 256), colour=STROKE["v"])
    s.line((60, 82), (60, 98), (442, 98), colour=STROKE["q"])
    s.line((190, 256), (570, 256), colour=STROKE["v"])
    s.arrow((570, 256), (570, 242), colour=STROKE["v"])
    s.text(22, 140, "weights a_ij", 14, "start")
    s.text(22, 158, "sum to 1", 13, "start", LINE)
    s.text(320, 28, "scores q_i·k_j/√D, then softmax over the keys it may see", 14)
    s.box(570, 222, 96, 40, "o_i = Σ a v", "paper", 15)
    s.text(22, 222, "values", 14, "start")
    return s


def attention_map(sharpness: float, shift: float, n: int = 6) -> list[list[float]]:
    """A causal attention map with a peak on the tokens `shift` back and a floor of noise."""
    rows = []
    for i in range(n):
        scores = [sharpness * (j == max(0, i - shift)) + 0.5 * math.sin(3 * j + 1) for j in range(i + 1)]
        total = sum(map(math.exp, scores))
        rows.append([math.exp(score) / total for score in scores])
    return rows


def differential() -> Sketch:
    s = Sketch(250, "Differential attention: the two attention maps of a pair of heads are subtracted")
    first, second, weight, cell, n = attention_map(2.2, 2), attention_map(0.0, 0), 0.7, 20, 6
    difference = [[a - weight * b for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)]
    for x, values, name in (
        (30, first, "softmax(q_1 k_1ᵀ)"),
        (200, second, "softmax(q_2 k_2ᵀ)"),
        (370, difference, "difference"),
    ):
        padded: Rows = [[*row, *[None] * (n - len(row))] for row in values]
        s.map(x, 52, padded, cell)
        s.text(x + 60, 190, name, 14)
    s.text(172, 112, "− λ ·", 18)
    s.text(342, 112, "=", 22)
    s.text(428, 36, "red: below zero", 13, colour=LINE)
    s.arrow((496, 112), (566, 112))
    s.box(578, 62, 92, 38, "[v_1 ; v_2]", "v")
    s.arrow((578, 81), (578, 100))
    s.node(578, 112, "×")
    s.arrow((578, 124), (578, 138))
    s.box(578, 156, 92, 36, "RMSNorm")
    s.text(578, 190, "· (1 − λ_init)", 14)
    s.text(320, 222, "each map sums to 1 along a row; the difference sums to 1 − λ", 13, colour=LINE)
    return s


def differential_v2() -> Sketch:
    s = Sketch(256, "Differential v2: two query heads over one key/value head; the gated second output is subtracted")
    for y, name in ((60, "q_{2h}"), (170, "q_{2h+1}")):
        s.box(62, y, 76, 40, name, "q")
        s.arrow((100, y), (246, y), colour=STROKE["q"])
        s.box(300, y, 106, 40, "softmax · v")
    s.box(160, 100, 44, 30, "k", "k")
    s.box(160, 131, 44, 30, "v", "v")
    s.cached(160, 115.5, 44, 61, "")
    s.arrow((187, 115), (246, 72))
    s.arrow((187, 115), (246, 158))
    s.line((353, 60), (470, 60))
    s.arrow((470, 60), (470, 103))
    s.arrow((353, 170), (378, 170))
    s.node(390, 170, "×")
    s.line((402, 170), (470, 170))
    s.arrow((470, 170), (470, 127))
    s.node(470, 115, "−")
    s.arrow((482, 115), (542, 115))
    s.box(570, 115, 52, 40, "o_h")
    s.box(390, 222, 150, 34, "λ = σ(w_h · x)", "", 15)
    s.arrow((390, 205), (390, 182))
    s.text(160, 222, "2H query heads, G key/value heads", 13, colour=LINE)
    s.text(560, 222, "per token and head", 13, colour=LINE)
    return s
