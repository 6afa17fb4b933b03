"""What models ship around the softmax: who is seen, what leaves, what is let through."""

from .sketch import LINE, STROKE, Rows, Sketch


def window() -> Sketch:
    s = Sketch(250, "Sliding window: a query sees the last tokens, and the cache is a ring of as many slots")
    size, wide, cell = 8, 3, 20
    band: Rows = [[1.0 if 0 <= i - j < wide else None for j in range(size)] for i in range(size)]
    s.map(40, 44, band, cell)
    s.text(120, 28, "who sees whom, W = 3", 14)
    s.text(120, 226, "keys j", 13, colour=LINE)
    s.text(430, 60, "the cache after tokens 5, 6 and 7", 14)
    for row, tokens in enumerate(((3, 4, 5), (6, 4, 5), (6, 7, 5))):
        y = 96 + 44 * row
        for slot, token in enumerate(tokens):
            s.box(370 + 62 * slot, y, 52, 32, f"k_{token}", "kv" if (token, row) in ((6, 1), (7, 2)) else "k")
        s.text(318, y, f"t = {5 + row}", 13, "end", LINE)
    s.cached(432, 184, 176, 32, "slot t mod W")
    return s


def sinks() -> Sketch:
    s = Sketch(240, "Sinks: one more logit of every head takes its share of the weights and gives nothing")
    weights = (0.10, 0.34, 0.08, 0.18, 0.30)
    for j, weight in enumerate(weights):
        x, sink = 120 + 92 * j, j == 4
        s.box(x, 50, 64, 36, "s_h" if sink else f"q·k_{j + 1}", "" if sink else "k")
        s.arrow((x, 69), (x, 82))
        s.bar(x - 18, 166 - 220 * weight, 36, 220 * weight, "" if sink else "q")
        s.text(x, 178, f"{weight:.2f}", 13)
        if not sink:
            s.box(x, 212, 56, 30, f"v_{j + 1}", "v")
            s.arrow((x, 187), (x, 196), colour=STROKE["v"])
    s.text(488, 212, "no value", 13, colour=LINE)
    s.text(590, 120, "sum to 1", 13, colour=LINE)
    s.text(300, 20, "one softmax over the keys and the sink", 14)
    return s


def exclusive() -> Sketch:
    s = Sketch(220, "XSA: the output's part along the token's own value leaves")
    s.arrow((120, 170), (330, 170), colour=STROKE["v"])
    s.text(346, 170, "v_i", 16, "start")
    s.arrow((120, 170), (260, 60), colour=STROKE["q"])
    s.text(270, 52, "o_i", 16, "start")
    s.line((260, 64), (260, 166), dashed=True)
    s.arrow((120, 170), (120, 62))
    s.text(108, 56, "z_i", 16, "end")
    s.line((256, 60), (124, 60), dashed=True)
    s.text(190, 194, "taken out", 13, colour=LINE)
    s.text(500, 92, "z_i = o_i − (o_i·v_i/‖v_i‖²) v_i", 16)
    s.text(500, 124, "what a token already is,", 13, colour=LINE)
    s.text(500, 142, "the residual stream brings along", 13, colour=LINE)
    return s


def gate() -> Sketch:
    s = Sketch(220, "Output gate: what the heads give is weighted by what the token asks for")
    s.box(70, 60, 104, 40, "softmax · v")
    s.arrow((122, 60), (298, 60))
    s.text(200, 46, "o", 16)
    s.box(70, 160, 60, 40, "x", "paper", 16)
    s.arrow((100, 160), (252, 160))
    s.box(310, 160, 116, 40, "σ(W_g x)", "", 16)
    s.arrow((310, 139), (310, 72))
    s.node(310, 60, "×")
    s.arrow((322, 60), (420, 60))
    s.box(470, 60, 92, 40, "W_o", "", 16)
    s.arrow((516, 60), (580, 60))
    s.text(596, 60, "y", 16)
    s.text(506, 150, "element: one for each entry of o", 13, colour=LINE)
    s.text(506, 170, "head: one for each head", 13, colour=LINE)
    return s


def value_norm() -> Sketch:
    s = Sketch(220, "Value norm with k = v: one tensor is cached, and key and value are made of it on reading")
    s.box(70, 110, 84, 40, "s = W_k x", "kv")
    s.cached(70, 110, 84, 40)
    s.arrow((118, 104), (206, 62))
    s.arrow((118, 116), (206, 158))
    s.box(262, 60, 112, 40, "norm, gain g_k", "", 14)
    s.arrow((316, 60), (372, 60))
    s.box(410, 60, 72, 40, "R_p")
    s.arrow((446, 60), (508, 60), colour=STROKE["k"])
    s.box(540, 60, 60, 40, "k", "k", 16)
    s.box(262, 160, 112, 40, "norm, no gain", "", 14)
    s.arrow((316, 160), (508, 160), colour=STROKE["v"])
    s.box(540, 160, 60, 40, "v", "v", 16)
    s.text(410, 112, "half the cache, and a value that does not turn", 13, colour=LINE)
    return s
