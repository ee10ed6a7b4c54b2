"""The CUDA sources compile for the architectures that have green contexts, and hold the kernels that are asked for by name.

NVRTC needs no GPU.
"""

from pathlib import Path

import pytest
from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions

from engines.cuda.copies import SOURCE as COPIES
from partitions.cuda.kernels import KeptPrograms
from partitions.cuda.sm_probe import SOURCE as PROBE
from partitions.cuda.strain import NAMES as STRAINING
from partitions.cuda.strain import SOURCE as STRAIN

SOURCES = {
    "copies": (COPIES, [b"copy_in", b"copy_out"]),
    "sm_probe": (PROBE, [b"where_am_i"]),
    "strain": (STRAIN, [name.encode() for name in STRAINING]),
}


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
    """By cuda.core itself: the file's bytes are the code. Any user may read it who may read other new files."""

    def compiled() -> bytes:
        program = Program(PROBE, "c++", ProgramOptions(arch="sm_90"))
        return bytes(program.compile("cubin", cache=KeptPrograms(tmp_path)).code)

    code = compiled()
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file.read_bytes() == code
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode
    file.write_bytes(b"as it is there")
    assert compiled() == b"as it is there"


def test_kept_programs_are_a_mapping_of_files_of_their_own(tmp_path: Path) -> None:
    programs = KeptPrograms(tmp_path)
    (tmp_path / "model.kernels").touch()
    for key in ("text", b"bytes"):
        programs[key] = b"code"
    del programs["text"]
    assert len(programs) == 1
    assert programs.get("text") is None
    with pytest.raises(KeyError):
        del programs["text"]
    programs.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["model.kernels"]
