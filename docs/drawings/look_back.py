"""Choices that look a few tokens back."""

from .sketch import LINE, STROKE, Sketch


def tokens(s: Sketch, y: float, labels: tuple[str, ...], kind: str, left: float = 120) -> list[float]:
    """Boxes of successive tokens in a row, with their places."""
    places = [left + 120 * i for i in range(len(labels))]
    for x, label in zip(places, labels, strict=True):
        s.box(x, y, 84, 38, label, kind, 16)
    return places


def cca() -> Sketch:
    s = Sketch(340, "CCA: query and key pass two short convolutions beside their mean, then a norm; values come late")
    s.text(22, 36, "u = [q ; k]", 15, "start")
    s.text(22, 118, "conv₁, by entry", 14, "start")
    s.text(22, 200, "conv₂, by head", 14, "start")
    places = tokens(s, 36, ("u_{t−2}", "u_{t−1}", "u_t"), "qk", 200)
    middle = [260.0, 380.0]
    for x, label in zip(middle, ("a_{t−1}", "a_t"), strict=True):
        s.box(x, 118, 84, 36, label, "paper", 16)
    for i, x in enumerate(middle):
        for start in places[i : i + 2]:
            s.arrow((start, 56), (x + (start - x) * 0.3, 98))
    for x in middle:
        s.arrow((x, 137), (320 + (x - 320) * 0.4, 180))
    s.box(320, 200, 84, 36, "y_t", "paper", 16)
    s.box(530, 118, 130, 36, "(q + k)/2, mean", "qk", 14)
    s.arrow((484, 40), (530, 98))
    s.arrow((362, 200), (400, 200))
    s.node(412, 200)
    s.line((530, 137), (530, 200))
    s.arrow((530, 200), (424, 200))
    s.arrow((412, 212), (412, 240))
    s.box(412, 260, 190, 36, "length √D, k times τ", "paper", 14)
    s.text(96, 262, "v_t", 15)
    s.bar(126, 250, 60, 24, "v")
    s.bar(186, 250, 60, 24, "paper")
    s.text(156, 290, "own", 13, colour=STROKE["v"])
    s.text(216, 290, "of v_{t−1}", 13, colour=LINE)
    s.text(320, 322, "kept for decoding: u of two tokens, half a value of one", 13)
    return s


def short_convolution() -> Sketch:
    s = Sketch(220, "Short convolution: a key is a weighted sum of its own token's projection and of those before")
    places = tokens(s, 50, ("k_{t−3}", "k_{t−2}", "k_{t−1}", "k_t"), "k")
    for x, weight in zip(places, ("c_3", "c_2", "c_1", "c_0"), strict=True):
        s.arrow((x, 70), (300 + (x - 300) * 0.25, 132), colour=STROKE["k"])
        s.text(300 + (x - 300) * 0.75 + 14, 100, weight, 14, "start")
    s.box(300, 152, 150, 38, "Σ c_i ⊙ k_{t−i}", "k", 16)
    s.text(320, 202, "every entry with its own weights; values alike; it starts with c_0 = 1 and all else 0", 13)
    return s


def key_shift() -> Sketch:
    s = Sketch(220, "Key shift: rotated entries of a key stay, the others are the previous token's")
    for column, name in enumerate(("t − 1", "t")):
        x = 110 + 260 * column
        s.text(x + 100, 24, f"token {name}", 14)
        for i in range(8):
            s.bar(x + 25 * i, 40, 25, 30, "k" if i < 4 else "q")
            s.bar(x + 25 * i, 140, 25, 30, "k" if i < 4 else "paper" if not column else "q")
        s.arrow((x + 50, 74), (x + 50, 134), colour=STROKE["k"])
    s.arrow((262, 74), (462, 134), colour=STROKE["q"])
    s.text(22, 55, "projected", 14, "start")
    s.text(22, 155, "compared", 14, "start")
    s.text(320, 202, "left half: turned by RoPE; right half: not turned, from the token before", 13)
    return s
