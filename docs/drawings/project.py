"""Stage 1: which projections are shared."""

from .sketch import CACHED, LINE, STROKE, Sketch


def separate() -> Sketch:
    """Four query heads over four, two and one key/value heads."""
    s = Sketch(250, "(Q,K,V): every query head its own key and value head, groups of them, or one for all")
    for left, groups, name in ((20, 4, "G = H"), (230, 2, "GQA: 1 < G < H"), (440, 1, "MQA: G = 1")):
        s.text(left + 90, 26, name, 15, bold=True)
        for h in range(4):
            x = left + 18 + 48 * h
            s.box(x, 72, 38, 34, f"q_{h + 1}", "q")
            g = h * groups // 4
            target = left + 90 + 48 * (g - (groups - 1) / 2) * 4 / groups
            s.arrow((x, 89), (target, 131))
        for g in range(groups):
            x = left + 90 + 48 * (g - (groups - 1) / 2) * 4 / groups
            s.box(x, 150, 38, 34, f"k_{g + 1}", "k")
            s.box(x, 188, 38, 34, f"v_{g + 1}", "v")
            s.cached(x, 169, 38, 72, "")
    s.text(320, 228, "dashed: what is cached, 2GD elements per token", 13, colour=CACHED)
    return s


def shared_key_value() -> Sketch:
    s = sharing("(Q,K=V): one tensor is compared with the query and is summed as the value", "q", "kv")
    s.text(470, 232, "the same tensor twice: compared, then summed", 13)
    return s


def shared_query_key() -> Sketch:
    s = sharing("(Q=K,V): one matrix for query and key; the scores are symmetric", "qk", "v")
    s.text(470, 232, "s_ij = s_ji, until coupling, a gain or a bias breaks it", 13)
    return s


def shared_all() -> Sketch:
    s = sharing("(Q=K=V): one tensor is query, key and value", "qkv", "")
    s.text(470, 232, "one tensor asks, is asked and answers", 13)
    return s


def sharing(title: str, upper: str, lower: str) -> Sketch:
    """x → matrices → tensors → scores → weighted sum. `upper` and `lower` are the tensors' letters."""
    s = Sketch(256, title)
    names = {
        "q": ("W_q", "q"),
        "v": ("W_v", "v"),
        "kv": ("W_k", "k = v"),
        "qk": ("W_k", "q = k"),
        "qkv": ("W_k", "q = k = v"),
    }
    s.box(48, 115, 48, 40, "x")
    for kind, y in ((upper, 60 if lower else 115), (lower, 170)):
        if not kind:
            continue
        matrix, tensor = names[kind]
        s.arrow((72, 115), (114, y))
        s.box(140, y, 52, 36, matrix)
        s.arrow((166, y), (206, y))
        s.box(252, y, 92, 40, tensor, kind)
        if kind not in ("q", "qk") or (kind == "qk" and lower == "v"):
            s.cached(252, y, 92, 40)
    s.box(448, 60, 148, 44, "softmax(q kᵀ/√D)")
    s.box(448, 170, 148, 44, "weighted sum")
    s.arrow((448, 82), (448, 148))
    s.text(456, 114, "weights a_ij", 13, "start", LINE)
    top = 60 if lower else 115
    if upper == "q":
        s.arrow((298, 60), (374, 60), colour=STROKE["q"])
    else:
        s.arrow((298, top - 6), (374, 54), colour=STROKE["q"])
        s.arrow((298, top + 6), (374, 68), colour=STROKE["k"])
        s.text(346 if lower else 318, 40 if lower else 66, "query", 13, colour=STROKE["q"])
        s.text(348 if lower else 356, 88 if lower else 104, "key", 13, colour=STROKE["k"])
    if lower == "kv":
        s.arrow((298, 160), (374, 74), colour=STROKE["k"])
        s.text(318, 118, "key", 13, colour=STROKE["k"])
    low = 170 if lower else 130
    s.arrow((298, low), (374, 170), colour=STROKE["v"])
    s.text(336, 187 if lower else 166, "value", 13, colour=STROKE["v"])
    s.arrow((522, 170), (562, 170))
    s.box(586, 170, 48, 40, "o")
    return s


def latent() -> Sketch:
    """MLA: everything through bottlenecks, drawn narrower; only the narrow things are cached."""
    s = Sketch(320, "MLA: queries and keys/values pass through narrow latents; the key/value latent is what is cached")
    s.box(40, 165, 44, 170, "x")
    rows = {"dq": 62, "dkv": 165, "kr": 268}
    s.arrow((62, 100), (102, 62))
    s.box(132, 62, 56, 34, "W_dq")
    s.arrow((160, 62), (198, 62))
    s.box(222, 62, 44, 40, "c_q", "q")
    for y, matrix in ((40, "W_uq"), (84, "W_qr")):
        s.arrow((244, 62), (292, y))
        s.box(322, y, 56, 32, matrix)
    s.arrow((350, 40), (436, 40))
    s.arrow((350, 84), (372, 84))
    s.box(388, 84, 30, 28, "R")
    s.arrow((403, 84), (436, 84))
    s.box(474, 62, 72, 78, "q", "q", 17)

    s.arrow((62, rows["dkv"]), (102, rows["dkv"]))
    s.box(132, 165, 56, 34, "W_dkv")
    s.arrow((160, 165), (196, 165))
    s.box(222, 165, 44, 40, "c", "kv")
    s.cached(222, 165, 44, 40, "")
    for y, matrix in ((142, "W_uk"), (196, "W_uv")):
        s.arrow((249, 165), (292, y))
        s.box(322, y, 56, 32, matrix)
    s.arrow((350, 142), (436, 142))
    s.box(474, 142, 72, 40, "k", "k", 17)
    s.arrow((350, 196), (436, 196))
    s.box(474, 196, 72, 40, "v", "v", 17)

    s.arrow((62, 230), (102, 268))
    s.box(132, 268, 56, 34, "W_kr")
    s.arrow((160, 268), (188, 268))
    s.box(204, 268, 30, 28, "R")
    s.arrow((219, 268), (256, 268))
    s.box(292, 268, 62, 34, "k_rope", "k")
    s.cached(292, 268, 62, 34, "")
    s.line((328, 268), (556, 268))
    s.line((556, 268), (556, 150))
    s.arrow((556, 150), (510, 150))
    s.text(440, 256, "the same for all heads", 13, colour=LINE)
    s.text(566, 190, "joined", 13, "start", LINE)
    s.text(566, 206, "to every k", 13, "start", LINE)
    s.text(222, 126, "cached: d_c wide", 13, colour=CACHED)
    s.text(292, 304, "cached: d_rope wide", 13, colour=CACHED)
    s.text(522, 54, "D + d_rope", 13, "start", LINE)
    s.text(522, 71, "per head", 13, "start", LINE)
    return s
