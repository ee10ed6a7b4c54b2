"""The CUDA sources compile for the architectures that have green contexts, and hold the kernels that are asked for by name.

NVRTC needs no GPU.
"""

from pathlib import Path

import pytest
from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache

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


def test_what_was_compiled_into_a_folder_is_taken_from_there_by_the_next_process(tmp_path: Path) -> None:
    """By cuda.core itself, which `partitions.cuda.kernels` relies on: the file's bytes are the code."""

    def compiled() -> bytes:
        program = Program(PROBE, "c++", ProgramOptions(arch="sm_90"))
        return bytes(program.compile("cubin", cache=FileStreamProgramCache(tmp_path)).code)

    code = compiled()
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file.read_bytes() == code
    file.write_bytes(b"as it is there")
    assert compiled() == b"as it is there"
