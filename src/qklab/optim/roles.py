"""What a parameter is for, which decides how it is optimised."""

from typing import Literal, get_args

from torch import nn

Role = Literal["embedding", "head", "matrix", "coupling", "vector"]
ROLES: tuple[Role, ...] = get_args(Role)


def role(name: str, parameter: nn.Parameter) -> Role:
    """The role of a decoder's parameter.

    - `embedding`: token embeddings (also where they are tied to the output) and learned positions
    - `head`: an output matrix of its own
    - `matrix`: two-dimensional weights of the blocks' linear maps
    - `coupling`: weights of the coupling's forces, layer-wide or per head
    - `vector`: gains, biases, step sizes, λ: what neither weight decay nor orthogonalisation is meant for
    """
    if name.startswith(("embed.", "positions.")):
        return "embedding"
    if name.startswith("head."):
        return "head"
    if parameter.dim() < 2 or ".mix.query_lambdas" in name or ".mix.key_lambdas" in name:
        return "vector"
    if ".couple." in name:
        return "coupling"
    return "matrix" if parameter.dim() == 2 and name.endswith(".weight") else "vector"


def roles(model: nn.Module) -> dict[str, Role]:
    """Parameter name → role; a tied parameter appears once, under its first name."""
    return {name: role(name, parameter) for name, parameter in model.named_parameters()}
