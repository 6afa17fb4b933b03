"""What a model reads of each task and must say, by a sequence of the task itself."""

from collections.abc import Callable

from qklab import register
from qklab.data.tasks import Draws, parse_task

from .sketch import FAINT, Sketch

EXAMPLES = {  # arguments that give a sequence short enough to be drawn
    "mqar": "pairs=3&length=12&keys=6&values=6",
    "induction": "length=12&block=4&symbols=9",
    "selective-copy": "length=12&tokens=3&symbols=6",
    "needle": "length=12&symbols=9",
}
LEFT, STEP = 112, 43


def draw_task(name: str) -> Sketch:
    task = parse_task(f"task:{name}?{EXAMPLES.get(name, 'length=12')}")
    assert task is not None
    tokens, answers = (rows[0].tolist() for rows in task.draw_sequences(Draws(5), 1))
    kind = register.task[name]
    s = Sketch(116, f"{name}: {kind.__doc__.split('.')[0].split(',')[0].replace(chr(10), ' ')}")
    s.text(14, 34, "reads", 15, "start")
    s.text(14, 84, "must say", 15, "start")
    for place, (token, answer) in enumerate(zip(tokens, answers, strict=True)):
        x, symbol = LEFT + STEP * place, task.alphabet[token]
        s.box(x, 34, 36, 32, "" if symbol == "_" else symbol, "paper" if symbol == "_" else "q", 14)
        if answer < 0:
            s.text(x, 84, "·", 15, colour=FAINT)
        else:
            s.box(x, 84, 36, 32, task.alphabet[answer], "v", 14)
    return s


TASKS: dict[str, Callable[[], Sketch]] = {
    f"tasks/{name}.svg": lambda name=name: draw_task(name) for name in register.task
}
