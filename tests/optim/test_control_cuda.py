"""Logit control on a GPU: the numbers of the CPU, without a wait for the device."""

from typing import Any

import pytest
import torch
from control import KINDS, decoder, draw_gradients, tokens

from qklab.optim import LogitControl, QKClip, attention_roles

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def stepped(kind: str, device: str, steps: int = 3, **choices: Any) -> tuple[torch.nn.Module, LogitControl]:
    """A model after a few steps on the same gradients, its last step under the eye of torch's check for waits."""
    model = decoder(**KINDS[kind]).to(device)
    bare = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, fused=True)
    control = LogitControl(bare, attention_roles(model), **choices)
    for step in range(steps):
        draw_gradients(model, step)
        if device == "cuda" and step == steps - 1:
            torch.cuda.set_sync_debug_mode("error")
        try:
            control.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return model, control


@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_do_not_wait_and_equal_those_of_the_cpu(kind: str, norm: Any) -> None:
    (here, _), (there, control) = stepped(kind, "cpu", norm=norm, tau=0.5), stepped(kind, "cuda", norm=norm, tau=0.5)
    for a, b in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-9, atol=1e-12)
    assert any((f - 1).abs().max() > 1e-3 for parts in control.factors().values() for f in parts.values())


def test_an_update_skipped_on_the_device_leaves_every_bit() -> None:
    model = decoder().to("cuda")
    bare = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, fused=True)
    control = LogitControl(bare, attention_roles(model), tau=0.5)
    before = [p.detach().clone() for p in model.parameters()]
    draw_gradients(model, 0)
    bare.found_inf = torch.ones((), device="cuda")  # type: ignore[attr-defined]
    control.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_qk_clip_sees_the_logits_of_the_cpu(compiled: bool) -> None:
    seen = {}
    for device in ("cpu", "cuda"):
        model = decoder().to(device)
        clip = QKClip(torch.optim.SGD(model.parameters(), lr=0.0), attention_roles(model), threshold=0.5)
        call = torch.compile(model) if compiled and device == "cuda" else model
        call(tokens().to(device)).sum().backward()
        seen[device] = {name: largest.cpu().clone() for name, largest in clip.watch.largest.items()}
        clip.step()
    for name, largest in seen["cpu"].items():
        torch.testing.assert_close(seen["cuda"][name], largest, rtol=1e-6, atol=0.0)
