"""What decoding keeps of past tokens: exactly the tensors the spec needs, preallocated, and not a byte more.

A cache starts with room for `tokens` tokens. Filled beyond that it grows, over-allocating by at most half
(`spare_bytes` says by how much), or with `grow=False` refuses before anything is written. A `StaticCache` never moves:
its length is a tensor, so that one compiled graph serves every step.

What only the last n tokens matter for is kept in a ring of n + `drafts` slots, token p in slot p modulo that many: n is
W − 1 for keys and values that are seen through a window of W tokens, and what `token_rings` says for what is looked
back on. A filled ring can so be cropped by `drafts` tokens, one unless more are asked for, and by no more. A single new
token reads a window's ring as it lies; several at once are read behind the last W − 1 before them, put in order.

Caches are for inference: decode under `torch.no_grad()`. With gradients on, the first chunk backpropagates as a full
forward does; once later tokens are written beside it torch refuses to, rather than give a wrong gradient.
"""

from qklab.attention.cache.growing import Cache
from qklab.attention.cache.kinds import KeyValueCache, LatentCache, SharedCache, cache_class
from qklab.attention.cache.static import StaticCache

__all__ = ["Cache", "KeyValueCache", "LatentCache", "SharedCache", "StaticCache", "cache_class"]
