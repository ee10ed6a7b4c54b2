"""The CUDA sources compile for the architectures that have green contexts, and hold the kernels that are asked for by name.

NVRTC needs no GPU.
"""

import pytest
from cuda.bindings import nvrtc

from engines.cuda.copies import SOURCE as COPIES
from partitions.cuda.sm_probe import SOURCE as PROBE

SOURCES = {"copies": (COPIES, [b"copy_in", b"copy_out"]), "sm_probe": (PROBE, [b"where_am_i"])}


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("name", SOURCES)
def test_a_source_compiles_to_the_kernels_that_are_looked_up(name: str, architecture: int) -> None:
    source, kernels = SOURCES[name]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"source.cu", 0, [], [])
    (result,) = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{architecture}".encode()])
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    assert log.rstrip(b"\0") == b"", "no warnings"
    cubin = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, cubin)
    assert all(b".text." + kernel + b"\0" in cubin for kernel in kernels)
