import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from hybridrl.parallel.gather import whole_parameters

BUCKETS = (1, 60, 1000, 1 << 30)


class Awkward(nn.Module):
    """Nothing divides: 51 and 7 rows, biases of 3 and 1, a tied head, a buffer, one parameter of another type."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(51, 6)
        self.narrow = nn.Linear(6, 3)
        self.single = nn.Linear(3, 1)
        self.scale = nn.Parameter(torch.randn(7, 2, 3).bfloat16())
        self.head = nn.Linear(6, 51, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor([3, 4]))
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("scratch", torch.randn(5), persistent=False)


NAMES = ["embedding.weight", "mean", "narrow.bias", "narrow.weight", "scale", "single.bias", "single.weight", "steps"]


def collect(model, **settings):
    return {name: tensor.clone() for name, tensor in whole_parameters(model, **settings)}


def _gather(mesh):
    """What one rank sees of a model sharded over a one-axis mesh, for every type and size of bucket."""
    model, results = Awkward(), {}
    fully_shard(model.narrow, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for dtype in (None, torch.float32, torch.bfloat16):
        for bucket in BUCKETS:
            buffers, found = {}, {}
            with CommDebugMode() as communication:
                for name, tensor in whole_parameters(model, dtype, bucket):
                    buffers[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                    found[name] = tensor.clone()
            calls = sum(communication.get_comm_counts().values())
            results[dtype, bucket] = {"found": found, "largest": max(buffers.values()), "calls": calls}
    return results


def _rank(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    torch.save({4: _gather(init_device_mesh("cpu", (4,))), 2: _gather(pairs["shard"])}, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(_rank, (folder,), nprocs=4)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.fixture(params=[2, 4])
def world(request):
    return request.param


@pytest.fixture
def ranks(gathered, world):
    return [rank[world] for rank in gathered]


@pytest.mark.processes
def test_gathered_weights_are_bitwise_those_that_were_sharded(ranks):
    model = Awkward()
    expected = {name: model.state_dict()[name] for name in NAMES}
    for rank in ranks:
        for (dtype, _), result in rank.items():
            assert sorted(result["found"]) == NAMES  # a tied tensor once, buffers too
            for name, tensor in result["found"].items():
                wanted = expected[name].to(dtype) if dtype and expected[name].is_floating_point() else expected[name]
                assert tensor.dtype is wanted.dtype and torch.equal(tensor, wanted)


@pytest.mark.processes
def test_no_buffer_is_larger_than_a_bucket_or_the_largest_parameter(ranks, world):
    for rank in ranks:
        for (dtype, bucket), result in rank.items():
            size = 2 if dtype is torch.bfloat16 else 4
            largest_parameter = -(-51 // world) * world * 6 * size  # padded to equal shares
            assert result["largest"] <= max(bucket, largest_parameter)
            if bucket == 60:
                assert result["largest"] == largest_parameter


@pytest.mark.processes
def test_one_collective_a_bucket_and_no_other(ranks):
    for (dtype, bucket), result in ranks[0].items():
        calls = result["calls"]
        if bucket == 1:
            assert calls == 6  # a parameter each
        if bucket == 1 << 30:
            assert calls == (1 if dtype else 2)  # types do not mix


def test_an_unsharded_model_gives_its_own_tensors():
    model = Awkward()
    found = dict(whole_parameters(model))
    assert sorted(found) == NAMES
    assert found["narrow.weight"].data_ptr() == model.narrow.weight.data_ptr()
    assert not any(tensor.requires_grad for tensor in found.values())
    half = collect(model, dtype=torch.bfloat16)
    assert half["mean"].dtype is torch.bfloat16 and half["steps"].dtype is torch.int64
