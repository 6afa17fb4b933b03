"""Stage 2: how the query and the key of one token move each other."""

from .sketch import FAINT, LINE, STROKE, Sketch


def coupling() -> Sketch:
    """Two groups of two query heads: a key moves its queries, the mean of the queries moves the key."""
    s = Sketch(300, "Coupling pairs each query head with its group's key, and the key with the mean of its queries")
    for left, g, heads in ((20, 1, (1, 2)), (330, 2, (3, 4))):
        for h, x in zip(heads, (left + 60, left + 150), strict=True):
            s.box(x, 60, 62, 40, f"q_{h}", "q", 17)
            s.arrow((left + 105 + (x - left - 105) * 0.35, 206), (x - 8, 82), colour=STROKE["k"])
            s.line((x + 16, 80), (x + 16, 102), colour=STROKE["q"])
        s.line((left + 76, 102), (left + 232, 102), colour=STROKE["q"])
        s.arrow((left + 232, 102), (left + 232, 122), colour=STROKE["q"])
        s.box(left + 232, 138, 62, 30, "mean q̄", "q", 14)
        s.arrow((left + 232, 153), (left + 232, 180), colour=STROKE["q"])
        s.box(left + 232, 196, 46, 30, "f", "", 16)
        s.line((left + 232, 211), (left + 232, 228), colour=STROKE["q"])
        s.arrow((left + 232, 228), (left + 138, 228), colour=STROKE["q"])
        s.box(left + 105, 228, 62, 40, f"k_{g}", "k", 17)
        s.text(left + 46, 150, "+ δ k", 14, colour=STROKE["k"])
        s.text(left + 186, 243, "+ δ f(q̄)", 14, colour=STROKE["q"])
    s.line((320, 20), (320, 250), colour=FAINT, dashed=True)
    s.text(165, 22, "group 1", 14, bold=True)
    s.text(475, 22, "group 2", 14, bold=True)
    s.text(320, 280, "one token, H = 4, G = 2: nothing crosses tokens or groups; k⁺ is cached in place of k", 13)
    return s


Q_LANE, K_LANE = 62, 178


def lanes(title: str, note: str, right: float = 580) -> Sketch:
    """q and k as two lines from left to right."""
    s = Sketch(250, title)
    for y, kind in ((Q_LANE, "q"), (K_LANE, "k")):
        s.arrow((80, y), (right - 28, y), colour=STROKE[kind])
        s.box(52, y, 56, 42, kind, kind, 18)
        s.box(right, y, 56, 42, f"{kind}⁺", kind, 18)
    s.text(320, 228, note, 13)
    return s


def kick(s: Sketch, x: float, force: str, label: str) -> None:
    """q moves k through a force."""
    middle = (Q_LANE + K_LANE) / 2
    s.node(x, Q_LANE, "")
    s.arrow((x, Q_LANE), (x, middle - 15), colour=STROKE["q"])
    s.box(x, middle, 44, 30, force, "", 16)
    s.arrow((x, middle + 15), (x, K_LANE - 12), colour=STROKE["q"])
    s.node(x, K_LANE)
    s.text(x + 30, middle + 4, label, 14, "start")


def drift(s: Sketch, x: float, label: str) -> None:
    """k moves q directly."""
    s.node(x, K_LANE, "")
    s.arrow((x, K_LANE), (x, Q_LANE + 12), colour=STROKE["k"])
    s.node(x, Q_LANE)
    s.text(x + 12, (Q_LANE + K_LANE) / 2 + 4, label, 14, "start")


def euler() -> Sketch:
    s = lanes("Euler: q and k move at once, both by the old state", "both arrows start from the old q and the old k")
    s.line((190, 34), (190, 206), colour=FAINT, dashed=True)
    s.text(190, 24, "old state", 13, colour=LINE)
    s.node(190, Q_LANE, "")
    s.node(190, K_LANE, "")
    s.arrow((190, Q_LANE), (227, 86), colour=STROKE["q"])
    s.box(246, 98, 40, 28, "f", "", 16)
    s.arrow((266, 110), (391, 172), colour=STROKE["q"])
    s.arrow((190, K_LANE), (391, 68), colour=STROKE["k"])
    s.node(402, Q_LANE)
    s.node(402, K_LANE)
    s.text(416, 88, "+ δ k", 14, "start", STROKE["k"])
    s.text(416, 152, "+ δ f(q)", 14, "start", STROKE["q"])
    return s


def symplectic_euler() -> Sketch:
    s = lanes(
        "Symplectic Euler: the key moves first, the query by the new key",
        "first the key, then the query by the new key k⁺",
    )
    kick(s, 210, "f", "kick  δ")
    drift(s, 400, "drift  δ")
    return s


def leapfrog() -> Sketch:
    s = lanes(
        "Leapfrog: half a kick, a drift, half a kick",
        "over n steps neighbouring half kicks share one f: n + 1 evaluations, not 2n",
    )
    kick(s, 150, "f", "½ kick  δ/2")
    drift(s, 305, "drift  δ")
    kick(s, 425, "f", "½ kick  δ/2")
    return s


def affine() -> Sketch:
    s = lanes(
        "Affine: the key scales and shifts the query, then the new query scales and shifts the key",
        "u ↦ u ⊙ exp(s) + t, with |s| at most s_max; both networks start at s = t = 0",
    )
    middle = (Q_LANE + K_LANE) / 2
    for x, start, end, kind, label in ((205, K_LANE, Q_LANE, "k", "s_1, t_1"), (410, Q_LANE, K_LANE, "q", "s_2, t_2")):
        way = 1 if end > start else -1
        s.node(x, start, "")
        s.arrow((x, start), (x, middle - 16 * way), colour=STROKE[kind])
        s.box(x, middle, 76, 32, label, "", 15)
        s.arrow((x, middle + 16 * way), (x, end - 15 * way), colour=STROKE[kind])
        s.box(x, end, 104, 30, "⊙ exp(s) + t", "paper", 14)
    return s


def uncoupled() -> Sketch:
    s = lanes("Uncoupled: query and key each move by a network of their own; nothing crosses", "")
    for y, out, kind, force in ((Q_LANE, 104, "q", "g"), (K_LANE, 220, "k", "f")):
        s.node(190, y, "")
        s.line((190, y), (190, out), colour=STROKE[kind])
        s.arrow((190, out), (272, out), colour=STROKE[kind])
        s.box(300, out, 56, 30, force, "", 16)
        s.line((328, out), (410, out), colour=STROKE[kind])
        s.arrow((410, out), (410, y + 12), colour=STROKE[kind])
        s.node(410, y)
        s.text(428, out, f"+ δ {force}({kind})", 14, "start", STROKE[kind])
    s.line((40, 141), (600, 141), colour=FAINT, dashed=True)
    s.text(110, 130, "no crossing", 13, colour=LINE)
    return s


def linear() -> Sketch:
    s = lanes("Linear: a matrix instead of a force, so the whole map folds into W_q and W_k", "", right=360)
    kick(s, 140, "A", "δ A")
    drift(s, 256, "δ")
    s.arrow((398, 120), (478, 120))
    s.text(438, 106, "fold()", 15, bold=True)
    for y, kind in ((Q_LANE, "q"), (K_LANE, "k")):
        s.box(520, y, 64, 40, f"W_{kind}′", "paper", 16)
        s.arrow((552, y), (576, y), colour=STROKE[kind])
        s.box(598, y, 44, 40, f"{kind}⁺", kind, 16)
    s.text(190, 228, "two shears, both linear in (q, k)", 13)
    s.text(545, 228, "same outputs, plain layer", 13)
    return s
