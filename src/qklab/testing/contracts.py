"""What every attention layer promises, whatever its spec: one check per promise, for every spec of the grid."""

import io
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from qklab.attention.layer import Attention
from qklab.attention.spec import AttentionSpec
from qklab.testing.grid import randomise

BATCH, TOKENS = 2, 6


def layer_and_input(spec: AttentionSpec, device: str) -> tuple[Attention, Tensor]:
    """A randomised float64 layer (not the first: λ_init depends on it) and x [2, 6, width]."""
    torch.manual_seed(0)
    attention = randomise(Attention(spec, layer=2)).to(device)
    return attention, torch.randn(BATCH, TOKENS, spec.width, dtype=torch.float64).to(device)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def within_budget(actual: Tensor, low_precision: Tensor, exact: Tensor) -> None:
    """The error against float64 stays within twice that of an independent low-precision run, plus one rounding."""
    allowed = 2 * (low_precision.double() - exact).norm() + torch.finfo(actual.dtype).eps * exact.norm()
    error = (actual.double() - exact).norm()
    assert error <= allowed, f"error {float(error):.2e} exceeds {float(allowed):.2e}"


def causality(spec: AttentionSpec, device: str) -> None:
    """Changing token t changes no output before t, and does change the output at t."""
    attention, x = layer_and_input(spec, device)
    changed = x.clone()
    changed[:, 3] += 1
    before, after = attention(x), attention(changed)
    close(after[:, :3], before[:, :3])
    assert not torch.allclose(after[:, 3], before[:, 3])


@torch.no_grad()
def cached_decoding(spec: AttentionSpec, device: str) -> None:
    """A chunk, another chunk and single tokens over a growing cache give the full forward's outputs."""
    attention, x = layer_and_input(spec, device)
    attention.eval()
    cache = attention.new_cache(batch=BATCH, tokens=4)
    chunks = [attention(chunk, cache=cache) for chunk in x.split([3, 2, 1], 1)]
    close(torch.cat(chunks, 1), attention(x))


@torch.no_grad()
def left_padding(spec: AttentionSpec, device: str) -> None:
    """Rows padded on the left decode as they do alone."""
    attention, x = layer_and_input(spec, device)
    attention.eval()
    cache = attention.new_cache(BATCH, TOKENS, left_padding=torch.tensor([2, 0]))
    padded = torch.cat([attention(chunk, cache=cache) for chunk in x.split([4, 1, 1], 1)], 1)
    close(padded[0, 2:], attention(x[:1, 2:])[0])
    close(padded[1], attention(x[1:])[0])
    assert padded.isfinite().all()


def packing(spec: AttentionSpec, device: str) -> None:
    """Texts packed into one row give what each gives alone; a later text may reuse an id."""
    attention, x = layer_and_input(spec, device)
    segments = torch.tensor([[7, 7, 7, 1, 7, 7], [0, 0, 2, 2, 2, 2]], device=device)
    packed = attention(x, segments=segments)
    for row, lengths in enumerate(([3, 1, 2], [2, 4])):
        alone = [attention(text)[0] for text in x[row : row + 1].split(lengths, 1)]
        close(packed[row], torch.cat(alone))


def gradients(spec: AttentionSpec, device: str) -> None:
    """Autograd's derivative by the input and by every parameter is the numerical one."""
    attention, x = layer_and_input(spec, device)
    names, values = zip(*attention.named_parameters(), strict=True)

    def outputs(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(attention, dict(zip(names, parameters, strict=True)), (x,))

    inputs = [t.detach()[:1, :3].clone() if t is x else t.detach().clone() for t in (x, *values)]
    assert torch.autograd.gradcheck(outputs, [t.requires_grad_() for t in inputs], fast_mode=True)


def outputs_and_gradients(attention: Attention, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """y, and the gradients of Σ y² by every parameter."""
    attention.zero_grad()
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in attention.parameters() if p.grad is not None)]


def compilation(spec: AttentionSpec, device: str) -> None:
    """torch.compile(fullgraph=True) gives eager's outputs and gradients."""
    attention, x = layer_and_input(spec, device)
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    eager = outputs_and_gradients(attention, attention, x)
    for actual, expected in zip(outputs_and_gradients(attention, compiled, x), eager, strict=True):
        close(actual, expected)


def inductor(spec: AttentionSpec, device: str) -> None:
    """Inductor's float32 outputs and gradients are as close to float64 as eager float32's."""
    attention, x = layer_and_input(spec, device)
    exact = outputs_and_gradients(attention, attention, x)
    attention, x = attention.float(), x.float()
    eager = outputs_and_gradients(attention, attention, x)
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True)
    for actual, low, truth in zip(outputs_and_gradients(attention, compiled, x), eager, exact, strict=True):
        within_budget(actual, low, truth)


def costs(spec: AttentionSpec, device: str) -> None:
    """`parameters()` and `flops_per_token()` are what the layer has and what torch's counter sees."""
    attention, x = layer_and_input(spec, device)
    assert sum(parameter.numel() for parameter in attention.parameters()) == spec.parameters()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        attention(x)
    assert counter.get_total_flops() == BATCH * TOKENS * spec.flops_per_token(TOKENS)


@torch.no_grad()
def cache_size(spec: AttentionSpec, device: str) -> None:
    """A filled cache owns the bytes `cache_bytes` promises."""
    attention, x = layer_and_input(spec, device)
    for dtype in (torch.float64, torch.bfloat16):
        cache = attention.new_cache(BATCH, TOKENS, dtype)
        attention(x, cache=cache)
        owned = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in cache.tensors}
        assert cache.length == TOKENS
        assert sum(owned.values()) == cache.bytes == BATCH * spec.cache_bytes(TOKENS, dtype)


@torch.no_grad()
def saving(spec: AttentionSpec, device: str) -> None:
    """A layer rebuilt from its spec's dict and its state dict is the same layer."""
    attention, x = layer_and_input(spec, device)
    file = io.BytesIO()
    torch.save(attention.state_dict(), file)
    file.seek(0)
    twin = Attention(AttentionSpec.from_dict(spec.to_dict()), layer=2).double().to(device)
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert twin.spec == spec
    assert hash(twin.spec) == hash(spec)
    assert torch.equal(twin(x), attention(x))


Contract = Callable[[AttentionSpec, str], None]
CONTRACTS: dict[str, Contract] = {
    contract.__name__: contract
    for contract in (
        causality,
        cached_decoding,
        left_padding,
        packing,
        gradients,
        compilation,
        costs,
        cache_size,
        saving,
    )
}
CAUSAL_ONLY = {"causality", "cached_decoding", "left_padding", "cache_size"}


def contracts_of(spec: AttentionSpec) -> list[str]:
    """The promises this spec makes: those about order and caches only where it is causal."""
    return [name for name in CONTRACTS if spec.causal or name not in CAUSAL_ONLY]
