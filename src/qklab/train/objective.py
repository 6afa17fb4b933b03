"""What is minimised: the mean negative log-likelihood of the next token."""

from collections.abc import Iterator

from torch import Tensor, nn

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
        self, ids: Tensor, targets: Tensor, segments: Tensor | None = None, per_token: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(loss, nll) for ids, targets [B, T]: nll the mean over targets other than −100, loss the same plus
        z_loss · mean(logsumexp²). With `per_token`: each token's own nll [B·T] twice, without gradient."""
        x = self.decoder.features(ids, segments=segments)
        if per_token:
            losses = token_losses(x, self.decoder.head.weight, targets)
            return losses, losses
        return linear_cross_entropy(x, self.decoder.head.weight, targets, z_loss=self.z_loss)


def named_weights(decoder: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter once, and the buffers that belong to the saved state."""
    yield from decoder.named_parameters()
    saved = decoder.state_dict(keep_vars=True)
    for name, buffer in decoder.named_buffers():
        if name in saved:
            yield name, buffer
