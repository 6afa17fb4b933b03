"""What every attention layer promises, whatever its spec, and every decoder of such layers: one check per promise."""

import io
import json
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from qklab.attention.layer import Attention
from qklab.attention.spec import AttentionSpec
from qklab.model.decoder import Decoder
from qklab.model.spec import DecoderSpec
from qklab.model.stack import list_unstackable, stack, unstack
from qklab.ops.loss.api import IGNORED
from qklab.optim.optimiser import Optimiser
from qklab.optim.population import PopulationOptimiser
from qklab.optim.spec import OptimiserSpec
from qklab.testing.grid import randomise
from qklab.testing.numerics import close, within_budget
from qklab.train.objective import Objective

BATCH, TOKENS, MEMBERS = 2, 6, 3
STEPS, LR = 2, 1e-2


def layer_and_input(spec: AttentionSpec, device: str) -> tuple[Attention, Tensor]:
    """A randomised float64 layer (not the first: λ_init depends on it) and x [2, 6, width]."""
    torch.manual_seed(0)
    attention = randomise(Attention(spec, layer=2)).to(device)
    return attention, torch.randn(BATCH, TOKENS, spec.width, dtype=torch.float64).to(device)


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


def outputs_and_gradients(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """y, and the gradients of Σ y² by every parameter."""
    module.zero_grad()
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


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
    everywhere = spec.replace(window=None)  # what is hidden is computed too where no kernel leaves it out
    assert counter.get_total_flops() == BATCH * TOKENS * everywhere.flops_per_token(TOKENS)
    if spec.window is not None:
        seen = spec.window if spec.causal else 2 * spec.window - 1
        assert spec.flops_per_token(TOKENS) == everywhere.flops_per_token(min(TOKENS, seen))


@torch.no_grad()
def cache_size(spec: AttentionSpec, device: str) -> None:
    """A filled cache owns the bytes `cache_bytes` promises."""
    attention, x = layer_and_input(spec, device)
    for dtype in (torch.float64, torch.bfloat16):
        cache = attention.new_cache(BATCH, TOKENS, dtype)
        attention(x, cache=cache)
        owned = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in cache.owned_tensors
        }
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


def stacking(spec: AttentionSpec, device: str) -> None:
    """Three layers stacked give each one's outputs and gradients, packed or not, and come back bit-equal."""
    layers = [randomise(Attention(spec, layer=2), seed).to(device) for seed in range(MEMBERS)]
    stacked, x = stack(layers), torch.randn(MEMBERS, BATCH, TOKENS, spec.width, dtype=torch.float64).to(device)
    segments = torch.tensor([[7, 7, 7, 1, 7, 7], [0, 0, 2, 2, 2, 2]], device=device)
    for packed in (None, segments):
        each = None if packed is None else packed.expand(MEMBERS, -1, -1)
        together = outputs_and_gradients(stacked, lambda x, each=each: stacked(x, segments=each), x)
        alone = [
            outputs_and_gradients(layer, lambda x, layer=layer, packed=packed: layer(x, segments=packed), rows)
            for layer, rows in zip(layers, x, strict=True)
        ]
        for actual, *expected in zip(together, *alone, strict=True):
            close(actual, torch.stack(expected))
    for layer, member in zip(layers, unstack(stacked), strict=True):
        assert type(member) is Attention
        assert torch.equal(member(x[0]), layer(x[0]))
        assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), member.parameters(), strict=True))


def training(spec: AttentionSpec, device: str) -> None:
    """Decoders asked for some tokens of packed texts learn together, as a population, what one learns in a loop of
    torch's own parts over the texts one by one, and another with our loss and optimiser."""
    model = DecoderSpec(vocab=11, width=spec.width, layers=1, attention=spec, context=TOKENS)
    decoders = [Decoder(model, seed=seed).double().to(device) for seed in range(2)]
    stacked, numbers = stack(decoders), OptimiserSpec(lr=LR, weight_decay=0.0, clip=0.0)
    ids = torch.randint(model.vocab, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    asked = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 0, 0, 1, 0, 1]], device=device).bool()
    targets = torch.where(asked, ids.flip(1), IGNORED)
    segments = torch.tensor([[7, 7, 7, 7, 1, 1]], device=device).expand(BATCH, -1)

    betas, rates = (numbers.beta1, numbers.beta2), torch.full((2,), LR, dtype=torch.float64).to(device)
    plain = torch.optim.AdamW(decoders[0].parameters(), LR, betas, numbers.eps, weight_decay=0.0)
    ours, population = Optimiser(numbers, decoders[1]), PopulationOptimiser([numbers] * 2, stacked)
    seen: list[Tensor] = []
    for _ in range(STEPS):
        for optimiser in (plain, ours, population):
            optimiser.zero_grad()
        logits = torch.cat([decoders[0](text) for text in ids.split([4, 2], 1)], 1)
        alone = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        other, _ = Objective(decoders[1])(ids, targets, segments)
        together, _ = Objective(stacked)(*(tensor.expand(2, -1, -1) for tensor in (ids, targets, segments)))
        (alone + other + together.sum()).backward()
        plain.step()
        ours.step(LR)
        population.step(rates, torch.zeros_like(rates, dtype=torch.bool))
        seen.append(together.detach())
        close(seen[-1], torch.stack([alone, other]).detach())
    assert (seen[-1] < seen[0]).all()


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
        stacking,
        training,
    )
}
CAUSAL_ONLY = {"causality", "cached_decoding", "left_padding", "cache_size"}


def contracts_of(spec: AttentionSpec) -> list[str]:
    """The promises this spec makes: those about order and caches only where it is causal, that about training only
    where it is not; and those about members only where every mechanism says how its parameters take them, which another
    package's need not."""
    left_out = {"training"} if spec.causal else set(CAUSAL_ONLY)
    if list_unstackable(Attention(spec)):
        left_out |= {"stacking", "training"}
    return [name for name in CONTRACTS if name not in left_out]


def decoder_and_ids(spec: DecoderSpec, device: str) -> tuple[Decoder, Tensor]:
    """A randomised float64 decoder and ids [2, 6]."""
    decoder = randomise(Decoder(spec, seed=0)).to(device)
    ids = torch.randint(spec.vocab, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    return decoder.eval(), ids.to(device)


def decoder_costs(spec: DecoderSpec, device: str) -> None:
    """Parameters, FLOPs and cache bytes are what the spec says."""
    decoder, ids = decoder_and_ids(spec, device)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == spec.parameters()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        decoder(ids)
    everywhere = spec.replace(attention=[one.replace(window=None) for one in spec.pattern])
    assert counter.get_total_flops() == ids.numel() * everywhere.flops_per_token(TOKENS)
    if spec.causal:
        assert decoder.new_cache(BATCH, TOKENS).bytes == BATCH * spec.cache_bytes(TOKENS, torch.float64)


@torch.no_grad()
def decoder_caching(spec: DecoderSpec, device: str) -> None:
    """Chunks over a growing cache give the full forward's logits, and left-padded rows those of the rows alone."""
    if not spec.causal:
        return
    decoder, ids = decoder_and_ids(spec, device)
    cache = decoder.new_cache(BATCH, tokens=4)
    close(torch.cat([decoder(chunk, cache=cache) for chunk in ids.split([3, 2, 1], 1)], 1), decoder(ids))
    cache = decoder.new_cache(BATCH, TOKENS, left_padding=torch.tensor([2, 0]))
    padded = torch.cat([decoder(chunk, cache=cache) for chunk in ids.split([4, 1, 1], 1)], 1)
    close(padded[0, 2:], decoder(ids[:1, 2:])[0])
    close(padded[1], decoder(ids[1:])[0])


@torch.no_grad()
def decoder_packing(spec: DecoderSpec, device: str) -> None:
    """Texts packed into one row give what each gives alone."""
    decoder, ids = decoder_and_ids(spec, device)
    packed = decoder(ids[:1], segments=torch.tensor([[0, 0, 0, 1, 2, 2]], device=device))
    close(packed, torch.cat([decoder(text) for text in ids[:1].split([3, 1, 2], 1)], 1))


def decoder_stacking(spec: DecoderSpec, device: str) -> None:
    """Three decoders stacked give each one's logits and gradients, and come back bit-equal."""
    decoders = [randomise(Decoder(spec, seed=seed), seed).to(device) for seed in range(MEMBERS)]
    ids = torch.randint(spec.vocab, (MEMBERS, BATCH, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    segments = torch.tensor([[0, 0, 0, 1, 2, 2]], device=device).expand(BATCH, -1)
    stacked = stack(decoders)
    each = segments.expand(MEMBERS, -1, -1)
    together = outputs_and_gradients(stacked, lambda ids: stacked(ids, segments=each), ids)
    alone = [
        outputs_and_gradients(decoder, lambda ids, decoder=decoder: decoder(ids, segments=segments), rows)
        for decoder, rows in zip(decoders, ids, strict=True)
    ]
    for actual, *expected in zip(together, *alone, strict=True):
        close(actual, torch.stack(expected))
    for decoder, member in zip(decoders, unstack(stacked), strict=True):
        assert torch.equal(member(ids[0]), decoder(ids[0]))


def decoder_compilation(spec: DecoderSpec, device: str) -> None:
    """torch.compile(fullgraph=True) gives eager's logits and gradients, recomputing the layers of a pattern."""
    decoder, ids = decoder_and_ids(spec, device)
    eager = outputs_and_gradients(decoder, decoder, ids)
    decoder.recompute("layers" if len(spec.pattern) > 1 else "none")
    torch._dynamo.reset()
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(outputs_and_gradients(decoder, compiled, ids), eager, strict=True):
        close(actual, expected)


@torch.no_grad()
def decoder_saving(spec: DecoderSpec, device: str) -> None:
    """A decoder rebuilt from its spec's JSON and its state dict is the same decoder."""
    decoder, ids = decoder_and_ids(spec, device)
    again = DecoderSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    twin = Decoder(again, seed=1).double().to(device).eval()
    twin.load_state_dict(decoder.state_dict())
    assert again == spec
    assert hash(again) == hash(spec)
    assert torch.equal(twin(ids), decoder(ids))


DECODER_CONTRACTS: dict[str, Callable[[DecoderSpec, str], None]] = {
    contract.__name__: contract
    for contract in (
        decoder_costs,
        decoder_caching,
        decoder_packing,
        decoder_stacking,
        decoder_compilation,
        decoder_saving,
    )
}
