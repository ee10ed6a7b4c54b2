"""A partition's CUDA stream used by PyTorch: its kernels run on the partition's SMs, in order with a TensorRT engine.

Needs an NVIDIA GPU, `scripts/install cpu,rtx` and PyTorch with CUDA, and a plan (`greenlane build`) whose only
input and only output are FP32:

    .venv/bin/python examples/partition_stream.py model.plan

Not run in the project's tests, which have no PyTorch: it is compiled and type-checked only. tests/gpu/test_callers.py has
the same calls with streams of cuda.core, and runs on a GPU.

CuPy works in the same way: `cupy.cuda.ExternalStream(partition.handle)`, and `with stream:` around its calls.
"""

import sys
from contextlib import closing
from typing import cast

import torch

from engines import Room, Tensor, load_engine, on_stream
from partitions import open_device
from partitions.cuda.device import CudaPartition


def main(path: str) -> None:
    device = open_device("cuda")
    granules = range(len(device.granules) // 2)  # half of the GPU
    with closing(device.carve(list(granules))) as carved, closing(load_engine(path, device)) as engine:
        partition = cast(CudaPartition, carved)
        partition.attach()  # this thread works on the partition from now on
        with closing(engine.bind(partition)) as executor:
            (x_spec,), (y_spec,) = engine.signature.inputs, engine.signature.outputs
            shape = [abs(size) for size in x_spec.shape]  # -1, any size, becomes 1
            stream = torch.cuda.ExternalStream(partition.handle)
            with torch.cuda.stream(stream), on_stream(partition.handle):
                x = torch.rand(shape, device="cuda") * 2 - 1  # written by PyTorch on the partition's SMs
                y = torch.empty([abs(size) for size in y_spec.shape], device="cuda")
                work = executor.enqueue([Tensor.of(x, x_spec.datatype)], Room.of(y))  # starts after x is written
                mean = y.mean()  # starts after the engine; nothing has waited on the host so far
            work.wait()
            stream.synchronize()
            print(f"{path}: mean of {y_spec.name} is {float(mean)}, computed on {partition.size} SMs")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/partition_stream.py PLAN")
    main(sys.argv[1])
