"""What is minimised: the mean negative log-likelihood of the next token, or of what else is asked."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from qklab.data.batches import IGNORED
from qklab.model.decoder import Decoder
from qklab.ops.loss import linear_cross_entropy, token_losses


class Objective(nn.Module):
    """The decoder and its loss in one module, so that compiling, DDP and FSDP2 see the whole step.

    The logits of all tokens never exist at once (see `qklab.ops.loss`).
    """

    def __init__(self, decoder: Decoder, z_loss: float = 0.0):
        super().__init__()
        self.decoder = decoder
        self.z_loss = z_loss

    def forward(
        self,
        ids: Tensor,
        targets: Tensor,
        segments: Tensor | None = None,
        per_token: bool = False,
        counts_hits: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(loss, nll) for ids, targets [B, T]: nll the mean over targets other than −100, loss the same plus
        z_loss · mean(logsumexp²). With `per_token`: each token's own nll [B·T] without gradient, and with `counts_hits`
        whether the target is what the model finds most likely [B·T], else the same again."""
        x = self.decoder.features(ids, segments=segments)
        if per_token:
            losses = token_losses(x, self.decoder.head.weight, targets)
            return losses, find_hits(x, self.decoder.head.weight, targets) if counts_hits else losses
        return linear_cross_entropy(x, self.decoder.head.weight, targets, z_loss=self.z_loss)


@torch.no_grad()
def find_hits(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Whether each target is the word that features x [..., d] find most likely, under the output matrix [V, d]; or, of
    members with the same targets [S, B, T], under theirs [S, V, d]. Where nothing is asked, it is not."""
    members = weight.shape[:-2]
    x, wanted = x.reshape(*members, -1, x.shape[-1]), targets.reshape(*members, -1)
    asked = (wanted[0] if members else wanted) != IGNORED
    hits = torch.zeros(wanted.shape, dtype=torch.bool, device=x.device)
    hits[..., asked] = (x[..., asked, :] @ weight.mT).argmax(-1) == wanted[..., asked]
    return hits


def named_weights(decoder: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once, and the buffers that belong to the saved state."""
    yield from decoder.named_parameters()
    saved = decoder.state_dict(keep_vars=True)
    for name, buffer in decoder.named_buffers():
        if name in saved:
            yield name, buffer
