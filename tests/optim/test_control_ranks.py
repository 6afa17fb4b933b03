"""Logit control over several ranks: sharded or replicated, it does to the weights what it does in one process."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from qklab.attention.spec import AttentionSpec
from qklab.model.decoder import Decoder
from qklab.model.spec import DecoderSpec
from qklab.optim import LogitControl, QKClip, Rows, attention_roles, layer_roles
from qklab.testing.processes import run_on_ranks

Result = dict[str, Tensor]
LATENT = {"query_rank": 7, "kv_rank": 9, "rope_width": 2}

# 3 heads of 5 make 15 rows: 8 and 7 on two ranks, so that the second head lies on both
KINDS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {"kv_heads": 1},
    "q=k": {"share": "q=k"},
    "biases": {"bias": True},
    "coupling": {"coupling": {"kind": "linear", "step_sharing": "per-head"}},
    "mla": {"latent": LATENT, "position": "rope"},
    "mla without norm": {"latent": LATENT | {"norm": False}, "position": "rope"},
}


def run_ranks(world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What work(*arguments) gives on each of `world` gloo ranks."""
    return run_on_ranks(world, run_work, work, *arguments)


def run_work(work: Callable[..., Any], *arguments: Any) -> Any:
    return as_numpy(work(*arguments))


def as_numpy(value: Any) -> Any:
    """Tensors as arrays, which unlike tensors go through a pipe as bytes."""
    if isinstance(value, dict):
        return {name: as_numpy(item) for name, item in value.items()}
    return value.numpy() if isinstance(value, Tensor) else value


def same(ours: dict[str, Any], reference: Result, within: float = 1e-12) -> None:
    """All factors and norms, and all weights relative to the largest of their matrix."""
    assert ours.keys() == reference.keys()
    for name, tensor in reference.items():
        scale = tensor.abs() if not name.startswith("weight.") else tensor.abs().amax()
        apart = ((torch.as_tensor(ours[name]) - tensor).abs() / scale).amax()
        assert apart <= within, f"{name} is {apart:.1e} apart"


def plain(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def decoder(kind: str) -> Decoder:
    choices = {"position": "none"} | KINDS[kind]
    attention = AttentionSpec.from_dict({"width": 12, "heads": 3, "head_width": 5} | choices)
    spec = DecoderSpec(vocab=16, width=12, layers=2, attention=attention, mlp_ratio=2.0, context=16)
    model = Decoder(spec, seed=1).double()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        parameter.data *= 4  # for gradients that move it
        if name.endswith(("bias", "gain")):  # otherwise zero and alike, where a mistake would not show
            parameter.data += 0.1 * torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def batch() -> Tensor:
    return torch.randint(16, (4, 10), generator=torch.Generator().manual_seed(3))


def own(ids: Tensor) -> Tensor:
    """This rank's part of a batch."""
    return ids.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else ids


def backward(call: nn.Module, ids: Tensor) -> None:
    F.cross_entropy(call(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()


def sharded(model: Decoder, mesh: DeviceMesh) -> Decoder:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def controlled(model: nn.Module, call: nn.Module, norm: Any, steps: int = 2) -> Result:
    """Steps so large that norms change a lot; then factors, initial norms and weights.

    Adam's ε is large, as the gradient of a key's bias, which is nothing but rounding, would otherwise move it.
    """
    bare = torch.optim.AdamW(model.parameters(), lr=0.5, eps=1e-2, weight_decay=0.1)
    optimiser = LogitControl(bare, attention_roles(model), tau=0.5, norm=norm)
    for _ in range(steps):
        backward(call, batch())  # the same on all ranks: what they average is not rounded differently
        optimiser.step()
        optimiser.zero_grad()
    return {name: tensor.clone() for name, tensor in optimiser.tensors().items()} | weights(model)


def weights(model: nn.Module) -> Result:
    return {f"weight.{name}": plain(parameter) for name, parameter in model.named_parameters()}


def fsdp(kinds: list[str], norms: list[str], shapes: list[tuple[int, ...]]) -> dict[str, Result]:
    results = {}
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shares")[-len(shape) :])
        for kind in kinds:
            for norm in norms:
                model = sharded(decoder(kind), mesh)
                results[f"{kind}, {norm}, {shape}"] = controlled(model, model, norm)
    return results


def ddp(kind: str) -> dict[str, Result]:
    model = decoder(kind)
    wrapped = DistributedDataParallel(model)
    return {kind: controlled(wrapped, wrapped, "frobenius")}


def alone(kind: str, norm: str) -> Result:
    model = decoder(kind)
    result = controlled(model, model, norm)
    moved = torch.cat([value.log().abs() for name, value in result.items() if name.startswith("factors.")])
    assert moved.amax() > 0.1, "factors so near 1 would hide a mistake"
    return result


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(2, fsdp, list(KINDS), ["frobenius", "spectral"], [(2,)])


@pytest.mark.parametrize("norm", ["frobenius", "spectral"])
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_over_two_ranks_it_is_as_in_one_process(kind: str, norm: str, on_two: list[Any]) -> None:
    reference = alone(kind, norm)
    for rank in on_two:
        same(rank[f"{kind}, {norm}, (2,)"], reference)


def test_four_ranks_some_with_copies_and_some_without_a_row_are_as_one_process() -> None:
    """As (4,) the shared rotary key's two rows leave two ranks without any; (2, 2) is HSDP."""
    reference = alone("mla", "frobenius")
    for rank in run_ranks(4, fsdp, ["mla"], ["frobenius"], [(4,), (2, 2)]):
        assert len(rank) == 2
        for result in rank.values():
            same(result, reference)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_replicated_by_ddp_it_is_as_in_one_process(kind: str) -> None:
    first, second = run_ranks(2, ddp, kind)
    reference = alone(kind, "frobenius")
    renamed = [{name.replace("weight.module.", "weight."): v for name, v in r[kind].items()} for r in (first, second)]
    for ours in renamed:
        same(ours, reference)
    for name in reference:
        assert (renamed[0][name] == renamed[1][name]).all()


class Bare(nn.Module):
    """Matrices of two layers in the order q, k, q, k, and a gain and a bias, without a forward pass.

    Inputs of 5 and 6 columns become 3 and 3 on the first of two ranks, 2 and 3 on the second.
    """

    def __init__(self, axis: int):
        super().__init__()
        generator = torch.Generator().manual_seed(4)

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64))

        self.axis = axis
        self.gain = draw(5)
        self.matrices = nn.ParameterList(
            draw(*((15, inputs) if axis == 0 else (inputs, 15))) for inputs in (5, 6, 6, 5, 5, 6)
        )
        self.bias = draw(15)

    def roles(self) -> dict[str, Any]:
        rows = torch.arange(15).view(3, 5)
        found = {}
        for layer in range(3):
            parts = []
            for matrix in self.matrices[2 * layer : 2 * layer + 2]:
                inputs = matrix.shape[1 - self.axis]
                gain = self.gain if layer == 1 and inputs == 5 else None
                bias = self.bias if layer == 2 and inputs == 5 else None
                parts.append(Rows(matrix, rows, bias, self.axis, gain))
            found[f"layer {layer}"] = layer_roles(query=parts[0], key=parts[1], heads=3)
        return found


def placed(model: nn.Module, mesh: DeviceMesh, placements: list[Any]) -> None:
    """Every matrix cut as `placements` say, and every vector cut only along its one axis."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            fitting = [p if not isinstance(p, Shard) or p.dim < parameter.dim() else Replicate() for p in placements]
            cut = distribute_tensor(parameter.detach(), mesh, fitting)
            module.register_parameter(name, nn.Parameter(cut))


def stepped(model: Bare, norm: Any) -> Result:
    """Two steps on grown weights. Growth and gradients are wild functions of the weights, and so need no cutting."""
    bare = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    optimiser = LogitControl(bare, model.roles(), tau=0.7, norm=norm)
    for _ in range(2):
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.add_(torch.sin(9 * parameter), alpha=2.0)
            parameter.grad = torch.sin(100 * parameter.detach())
        optimiser.step()
    return {name: tensor.clone() for name, tensor in optimiser.tensors().items()} | weights(model)


PLACEMENTS: dict[str, list[Any]] = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "copies": [Replicate()],
    "rows, then rows": [Shard(0), Shard(0)],
    "rows and columns": [Shard(0), Shard(1)],
}


def every_placement(world: int) -> dict[str, Result]:
    results = {}
    for name, placements in PLACEMENTS.items():
        if len(placements) == world // 2:
            mesh = init_device_mesh("cpu", (2,) * len(placements))
            for axis in (0, 1):
                for norm in ("frobenius", "spectral"):
                    model = Bare(axis)
                    placed(model, mesh, placements)
                    results[f"{name}, axis {axis}, {norm}"] = stepped(model, norm)
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_however_a_weight_is_cut_factors_and_updates_are_the_same(world: int) -> None:
    """By rows (FSDP2), by columns (tensor parallel, or FSDP2 where weights are [inputs, outputs]), by both."""
    for rank in run_ranks(world, every_placement, world):
        assert len(rank) == {2: 12, 4: 8}[world]
        for name, result in rank.items():
            axis, norm = name.split(", ")[-2:]
            same(result, stepped(Bare(int(axis[-1])), norm))


def tensor_parallel() -> dict[str, Result]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shares", "tensor"))
    results = {}
    for norm in ("frobenius", "spectral"):
        model = Bare(0)
        linear = nn.Linear(5, 15, dtype=torch.float64)
        linear.weight, linear.bias = model.matrices[0], model.bias
        parallelize_module(linear, mesh["tensor"], ColwiseParallel())
        model.matrices[0], model.bias = linear.weight, linear.bias
        fully_shard(model, mesh=mesh["shares"])
        assert len(model.matrices[0].placements) == 2
        results[norm] = stepped(model, norm)
    return results


def test_tensor_parallel_and_sharded_over_the_rest() -> None:
    """Rows cut first for tensor parallelism, then by FSDP2, whose cut is then a strided one."""
    for rank in run_ranks(4, tensor_parallel):
        for norm, result in rank.items():
            same(result, stepped(Bare(0), norm))


def cut_otherwise() -> str:
    """15 rows as 7 and 8, where DTensor itself would make it 8 and 7."""
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(7 + dist.get_rank(), 4)
    query = nn.Parameter(
        DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((15, 4)), stride=(4, 1))
    )
    key = nn.Parameter(torch.ones(15, 4))
    try:
        LogitControl(torch.optim.SGD([query, key], lr=0.1), {"one": {"query": query, "key": key, "heads": 3}})
    except ValueError as error:
        return f"refused: {error}"
    return "taken"


def test_a_weight_cut_otherwise_than_dtensor_would_is_refused() -> None:
    for rank in run_ranks(2, cut_otherwise):
        assert re.search(r"refused: a weight \[15, 4\] is cut as .*, but it has \[[78], 4\]; logit control needs", rank)


def clipped(model: nn.Module, call: nn.Module) -> Result:
    """Logits above a low threshold, and on every rank those of its own part of the batch."""
    bare = torch.optim.AdamW(model.parameters(), lr=0.5, eps=1e-2, weight_decay=0.1)
    optimiser = QKClip(bare, attention_roles(model), threshold=1e-4)
    result = {}
    for step in range(2):
        backward(call, own(batch()))
        result |= {f"alone.{step}.{name}": largest.clone() for name, largest in optimiser.watch.largest.items()}
        optimiser.step()
        optimiser.zero_grad()
    return result | {name: tensor.clone() for name, tensor in optimiser.tensors().items()} | weights(model)


def clipped_on_ranks(kind: str, parallel: str) -> Result:
    model = decoder(kind)
    if parallel == "ddp":
        return clipped(model, DistributedDataParallel(model))
    model = sharded(model, init_device_mesh("cpu", (2,)))
    return clipped(model, model)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_qk_clip_goes_by_the_largest_logit_of_all_ranks(kind: str, parallel: str) -> None:
    model = decoder(kind)
    reference = clipped(model, model)
    shrunk = [value for name, value in reference.items() if name.startswith("factors.")]
    assert torch.cat(shrunk).amin() < 0.9, "nothing was clipped"
    ranks = run_ranks(2, clipped_on_ranks, kind, parallel)
    seen = [name for name in reference if name.startswith("alone.")]
    differ = False
    for name in seen:
        first, second = (torch.as_tensor(rank[name]) for rank in ranks)
        differ |= bool((first != second).any())
        # measured in float32, from float64 logits that are rounded once
        torch.testing.assert_close(torch.maximum(first, second), reference[name], rtol=2e-7, atol=0.0)
    assert differ, "both ranks saw the same logits"
    for name in ranks[0]:
        if name not in seen:
            assert (ranks[0][name] == ranks[1][name]).all()
    unseen = {name: value for name, value in reference.items() if name not in seen}
    for rank in ranks:
        same({name: rank[name] for name in unseen}, unseen, within=2e-7)
