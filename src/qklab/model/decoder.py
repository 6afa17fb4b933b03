"""A decoder language model around the attention layer."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qklab.attention.cache import Cache
from qklab.attention.layer import Attention
from qklab.attention.positions import Positions, TokenSlots, find_positions, find_slots
from qklab.attention.rotate import LearnedPositions
from qklab.attention.spec import AttentionSpec
from qklab.attention.visibility import Visibility, find_visibility
from qklab.model.dropout import Dropout
from qklab.model.generate import check_ids, generate
from qklab.model.initialise import initialise
from qklab.model.spec import DecoderSpec
from qklab.ops.gelu import gelu

Recompute = Literal["none", "coupling", "layers"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) ⊙ W_up x)."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.gate = nn.Linear(spec.width, spec.hidden, bias=spec.bias)
        self.up = nn.Linear(spec.width, spec.hidden, bias=spec.bias)
        self.down = nn.Linear(spec.hidden, spec.width, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GELU(nn.Module):
    """W_down gelu(W_up x)."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.up = nn.Linear(spec.width, spec.hidden, bias=spec.bias)
        self.down = nn.Linear(spec.hidden, spec.width, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))


MLPS = {"swiglu": SwiGLU, "gelu": GELU}


class RMSNorm(nn.RMSNorm):
    """x / √(mean x² + eps) ⊙ g, taken in the gain's precision where x is coarser, as under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def new_last_norm(spec: DecoderSpec) -> nn.Module:
    """What stands between the last block and the head: a norm, unless that block ends with one."""
    return new_norm(spec) if spec.norm_place == "pre" else nn.Identity()


def new_norm(spec: DecoderSpec) -> nn.Module:
    if spec.norm == "rms":
        return RMSNorm(spec.width, eps=spec.norm_eps)
    return nn.LayerNorm(spec.width, eps=spec.norm_eps, bias=spec.bias)


class Block(nn.Module):
    """x ← x + Attention(norm(x)) ; x ← x + MLP(norm(x)); or x ← norm(x + Attention(x)) ; x ← norm(x + MLP(x))."""

    def __init__(self, spec: DecoderSpec, layer: int):
        super().__init__()
        self.attention_norm = new_norm(spec)
        self.attention = Attention(spec.attention_of(layer), layer)
        self.mlp_norm = new_norm(spec)
        self.mlp = MLPS[spec.mlp](spec)
        self.attention_dropout = Dropout(spec.dropout, 2 * layer + 1)
        self.mlp_dropout = Dropout(spec.dropout, 2 * layer + 2)
        self.post = spec.norm_place == "post"

    def forward(self, x: Tensor, positions: Positions, visibility: Visibility, cache: Cache | None) -> Tensor:
        if self.post:
            y = self.attention(x, cache=cache, positions=positions, visibility=visibility)
            x = self.attention_norm(x + self.attention_dropout(y))
            return self.mlp_norm(x + self.mlp_dropout(self.mlp(x)))
        y = self.attention(self.attention_norm(x), cache=cache, positions=positions, visibility=visibility)
        x = x + self.attention_dropout(y)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))


Located = tuple[Positions, Visibility]


def locate_tokens(
    pattern: Sequence[AttentionSpec],
    x: Tensor,
    segments: Tensor | None,
    caches: Sequence[Cache | None] | None,
    find: Callable[[AttentionSpec, TokenSlots, Tensor], Visibility] = find_visibility,
) -> list[Located]:
    """Positions and visibility of the tokens x [B, T, width] for each spec of the pattern.

    What several specs have in common is found once. `caches` are the layers'; all have seen the same tokens.
    """
    slots: dict[int | None, TokenSlots] = {}
    positions: dict[Any, Positions] = {}
    visibility: dict[Any, Visibility] = {}
    located = []
    for layer, spec in enumerate(pattern):
        window = spec.window
        if window not in slots:
            slots[window] = find_slots(x, segments, None if caches is None else caches[layer])
        turn = (spec.rotated_width, spec.rope_base, spec.rotation.turns_key, window)
        sight = (spec.causal, spec.head_width, window)
        if turn not in positions:
            positions[turn] = find_positions(spec, slots[window], x.dtype)
        if sight not in visibility:
            visibility[sight] = find(spec, slots[window], x)
        located.append((positions[turn], visibility[sight]))
    return located


def call_block(block: nn.Module, *given: Any) -> Tensor:
    return block(*given)


def run_blocks(
    model: Any,
    x: Tensor,
    located: list[Located],
    caches: Sequence[Any] | None = None,
    call: Callable[..., Tensor] = call_block,
    states: list[Tensor] | None = None,
) -> Tensor:
    """Embeddings x [B, T, width] → what the last block gives, through the positions, dropout and blocks of a model.

    `call` runs a block, or runs it so that its insides are computed again; what goes into each is added to `states`.
    """
    if model.positions is not None:
        x = model.positions(x, located[0][0])
    x = model.dropout(x)
    if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
        # the residual stream too: half the bytes for every addition and norm of every layer
        x = x.to(torch.get_autocast_dtype(x.device.type))
    for layer, block in enumerate(model.blocks):
        if states is not None:
            states.append(x)
        x = call(block, x, *located[layer % len(located)], None if caches is None else caches[layer])
    return x


class DecoderCache(list[Cache]):
    """One cache per layer, moved together."""

    @property
    def length(self) -> int:
        return self[0].length

    @property
    def capacity(self) -> int:
        """Tokens that every layer has room for; one with a window needs room for these only."""
        return max(cache.capacity for cache in self)

    @property
    def bytes(self) -> int:
        """Bytes owned by all layers."""
        return sum(cache.bytes for cache in self)

    @property
    def spare_bytes(self) -> int:
        """Bytes owned but not filled."""
        return sum(cache.spare_bytes for cache in self)

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        for cache in self:
            cache.crop(length)

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was, in every layer."""
        for cache in self:
            cache.reorder(rows)


class Decoder(nn.Module):
    """ids [B, T] → logits [B, T, vocab].

    Weights are drawn from `seed` (by default one draw of torch's global generator) by parameter name: two models that
    share a parameter share its initial value, whatever else differs, so paired arms of a study start alike.
    """

    def __init__(self, spec: DecoderSpec, seed: int | None = None):
        super().__init__()
        self.spec = spec
        seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
        self.embed = nn.Embedding(spec.vocab, spec.width)
        self.positions = LearnedPositions(spec.context, spec.width) if spec.learns_positions else None
        self.dropout = Dropout(spec.dropout, 0)
        self.recomputes_layers = False
        self.blocks = nn.ModuleList(Block(spec, layer) for layer in range(spec.layers))
        self.norm = new_last_norm(spec)
        self.head = nn.Linear(spec.width, spec.vocab, bias=False)
        self.initialise(seed)

    def initialise(self, seed: int) -> None:
        """Draw every weight anew from `seed`, e.g. after building on the meta device and `to_empty`."""
        if self.spec.tied:
            self.head.weight = self.embed.weight
        initialise(self, seed)

    def forward(self, ids: Tensor, *, segments: Tensor | None = None, cache: DecoderCache | None = None) -> Tensor:
        """ids [B, T] → logits [B, T, vocab] for the token after each; `segments` and `cache` as in `Attention`."""
        return self.head(self.features(ids, segments=segments, cache=cache))

    def features(self, ids: Tensor, *, segments: Tensor | None = None, cache: DecoderCache | None = None) -> Tensor:
        """ids [B, T] → what the output matrix sees [B, T, width], for losses that never form all logits."""
        self.check(ids, cache)
        x = self.embed(ids.long())
        located = locate_tokens(self.spec.pattern, x, segments, cache)
        again = self.recomputes_layers and cache is None and torch.is_grad_enabled()
        return self.norm(run_blocks(self, x, located, cache, self.call_again if again else call_block))

    def call_again(self, block: nn.Module, *given: Any) -> Tensor:
        """Run a block of which only the inputs are kept; all else is computed again in the backward pass."""
        result = checkpoint(block, *given, use_reentrant=False, preserve_rng_state=self.spec.dropout > 0)
        assert isinstance(result, Tensor)
        return result

    def recompute(self, what: Recompute) -> None:
        """What backward passes compute again instead of keeping it, for less memory and the same gradients.

        "coupling": queries and keys as projected, where a coupling needs them to go back; "layers": everything inside a
        layer, so that only what goes from layer to layer is kept; "none".
        """
        if what not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, but {what!r} came.")
        self.recomputes_layers = what == "layers"
        for layer in range(self.spec.layers):
            attention = self.attention(layer)
            attention.recomputes = what == "coupling" and attention.couple is not None

    def attention(self, layer: int) -> Attention:
        block = self.blocks[layer]
        assert isinstance(block, Block)
        return block.attention

    def check(self, ids: Tensor, cache: DecoderCache | None) -> None:
        check_ids(ids)
        if cache is not None and (not isinstance(cache, DecoderCache) or len(cache) != self.spec.layers):
            raise ValueError(
                f"a decoder's cache comes from its new_cache and has {self.spec.layers} layers, "
                f"but a {type(cache).__name__} came{f' of {len(cache)}' if isinstance(cache, list) else ''}."
            )
        tokens = ids.shape[1] + (0 if cache is None else cache.length)
        if self.positions is not None and tokens > self.spec.context:
            raise ValueError(
                f"this model has learned positions for {self.spec.context} tokens, but {tokens} came; "
                "shorten the text or build it with a larger context."
            )

    def new_cache(
        self,
        batch: int,
        tokens: int,
        dtype: torch.dtype | None = None,
        *,
        grow: bool = True,
        left_padding: Tensor | None = None,
        drafts: int = 1,
    ) -> DecoderCache:
        """An empty cache for every layer (see `Attention.new_cache`)."""
        options: dict[str, Any] = {"grow": grow, "left_padding": left_padding, "drafts": drafts}
        return DecoderCache(
            self.attention(layer).new_cache(batch, tokens, dtype, **options) for layer in range(self.spec.layers)
        )

    @torch.no_grad()
    def fold(self) -> "Decoder":
        """A model without coupling and with the same logits, where the coupling is `linear` (see `Attention.fold`)."""
        layers = [self.attention(layer) for layer in range(self.spec.layers)]
        if any(attention.couple is not None for attention in layers):
            layers = [attention if attention.couple is None else attention.fold() for attention in layers]
        else:
            layers[0].fold()  # says why not
        plain = Decoder(self.spec.replace(attention=tuple(layer.spec for layer in layers)), seed=0)
        plain.to(self.embed.weight).load_state_dict(self.state_dict(), strict=False)
        for layer, attention in enumerate(layers):
            plain.attention(layer).load_state_dict(attention.state_dict())
        return plain.train(self.training)

    generate = generate
