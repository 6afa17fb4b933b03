"""Stages 3 and 4: lengths and positions."""

import math

from .sketch import FAINT, LINE, STROKE, Rows, Sketch


def qk_norm() -> Sketch:
    """Vectors of any length land on one sphere and keep their direction."""
    s = Sketch(240, "QK-norm: queries and keys keep their direction and get one length")
    vectors = ((0.35, 88, "q"), (1.35, 42, "q"), (2.5, 74, "q"), (3.7, 58, "k"), (4.6, 30, "k"), (5.5, 84, "k"))
    for x, length in ((130, None), (400, 62.0)):
        s.circle(x, 112, 62, stroke=FAINT)
        for angle, raw, kind in vectors:
            r = raw if length is None else length
            s.arrow((x, 112), (x + r * math.cos(angle), 112 - r * math.sin(angle)), colour=STROKE[kind])
    s.arrow((236, 112), (316, 112))
    s.text(276, 94, "÷ rms", 15)
    s.text(130, 216, "any length", 14)
    s.text(400, 216, "length √D, same direction", 14)
    s.arrow((482, 112), (520, 112))
    s.box(572, 80, 96, 40, "g_q ⊙ q", "q")
    s.box(572, 144, 96, 40, "g_k ⊙ k", "k")
    s.text(572, 192, "no g_k where k = v", 13, colour=LINE)
    return s


def rope() -> Sketch:
    """Dials: each pair of entries turns with the position at its own speed."""
    s = Sketch(290, "RoPE turns pairs of entries by an angle that grows with the position, each at its own speed")
    for y, speed, name in ((84, 0.9, "first pair"), (160, 0.28, "a later pair")):
        s.text(22, y, name, 14, "start")
        for p in range(5):
            x, angle = 160 + 100 * p, 0.3 + speed * p
            s.circle(x, y, 30, stroke=FAINT, fill="#ffffff")
            s.line((x, y), (x + 28 * math.cos(0.3), y - 28 * math.sin(0.3)), colour=FAINT, dashed=True)
            s.arrow((x, y), (x + 29 * math.cos(angle), y - 29 * math.sin(angle)), colour=STROKE["q"])
    for p in range(5):
        s.text(160 + 100 * p, 30, f"position {p}", 14)
    s.text(22, 224, "partial:", 14, "start")
    for i in range(16):
        s.bar(130 + 26 * i, 212, 26, 24, "q" if i < 4 else "paper")
    s.text(182, 256, "turned: rope_fraction · D", 13, colour=STROKE["q"])
    s.text(390, 256, "left as they are", 13, colour=LINE)
    return s


def rope_once() -> Sketch:
    """The two ways to rotate when key and value are one tensor."""
    s = Sketch(300, "Key and value in one tensor: rotate once and undo on the output, or rotate on reading")
    for y, name in ((80, "once"), (222, "on-read")):
        s.text(22, y - 56, f'kv_rotation="{name}"', 15, "start", bold=True)
        s.box(46, y, 48, 38, "k_j", "k")
    s.arrow((70, 80), (102, 80))
    s.box(122, 80, 40, 34, "R_j")
    s.arrow((142, 80), (184, 80))
    s.box(222, 80, 66, 38, "k = v", "kv")
    s.cached(222, 80, 66, 38)
    s.arrow((255, 74), (362, 66), colour=STROKE["k"])
    s.arrow((255, 86), (362, 94), colour=STROKE["v"])
    s.box(400, 80, 76, 56, "mix")
    s.arrow((438, 80), (480, 80))
    s.box(510, 80, 56, 36, "R_i⁻¹")
    s.arrow((538, 80), (570, 80))
    s.box(594, 80, 44, 38, "o_i")
    s.text(460, 132, "values weigh in as R_{j−i} k_j", 13, colour=LINE)

    s.arrow((70, 222), (184, 222))
    s.box(222, 222, 66, 38, "k = v", "kv")
    s.cached(222, 222, 66, 38)
    s.arrow((255, 214), (290, 204), colour=STROKE["k"])
    s.box(312, 200, 40, 32, "R_j")
    s.arrow((332, 204), (362, 208), colour=STROKE["k"])
    s.arrow((255, 232), (362, 236), colour=STROKE["v"])
    s.box(400, 222, 76, 56, "mix")
    s.arrow((438, 222), (570, 222))
    s.box(594, 222, 44, 38, "o_i")
    s.text(460, 274, "values weigh in as k_j", 13, colour=LINE)
    s.line((20, 152), (620, 152), colour=FAINT, dashed=True)
    return s


def learned_positions() -> Sketch:
    s = Sketch(250, "Learned positions: one vector per position is added to the embedding, anew in every text")
    words = (("the", 0), ("cat", 1), ("sat", 2), ("a", 0), ("dog", 1))
    for i, (word, p) in enumerate(words):
        x = 170 + 92 * i + (24 if i > 2 else 0)
        s.box(x, 56, 58, 36, word, "paper")
        s.line((x, 74), (x, 86))
        s.node(x, 96, "+", 10)
        s.arrow((x, 120), (x, 106))
        s.box(x, 138, 58, 36, f"e_{p}")
        s.arrow((x + 10, 96), (x + 42, 96), (x + 42, 182))
    s.text(22, 56, "token", 14, "start")
    s.text(22, 138, "position", 14, "start")
    s.box(368, 200, 478, 34, "first layer")
    s.line((414, 20), (414, 164), colour=FAINT, dashed=True)
    s.text(424, 24, "next text: from 0 again", 13, "start", LINE)
    s.text(368, 234, "no rotation afterwards: queries and keys meet as they are", 13, colour=LINE)
    return s


SCORES = ((0.9, 0.35, 0.55, 0.1), (0.35, 0.7, 0.2, 0.6), (0.55, 0.2, 0.8, 0.3), (0.1, 0.6, 0.3, 0.95))


def asymmetry_2d() -> Sketch:
    s = Sketch(240, "2-D asymmetry: symmetric scores plus a learned bias per column are no longer symmetric")
    cell, bias = 30, (0.0, 0.45, 0.1, 0.3)
    n = len(SCORES)
    scores: Rows = [list(row) for row in SCORES]
    column: Rows = [list(bias) for _ in range(n)]
    total: Rows = [[(SCORES[i][j] + bias[j]) / 1.45 for j in range(n)] for i in range(n)]
    s.text(24, 106, "s ·", 18, "start")
    s.map(58, 46, scores, cell, "k")
    s.text(212, 106, "+", 22)
    s.map(246, 46, column, cell, "")
    s.text(400, 106, "=", 22)
    s.map(434, 46, total, cell, "k")
    s.text(118, 190, "k kᵀ/√D: symmetric", 14)
    s.text(306, 190, "w·P: the same in every row", 14)
    s.text(496, 190, "s_ij ≠ s_ji", 14)
    s.text(320, 220, "what is constant along a row cancels in the softmax, so only the columns count", 13, colour=LINE)
    s.line((58, 46), (178, 166), colour=FAINT, dashed=True)
    s.line((434, 46), (554, 166), colour=FAINT, dashed=True)
    return s
