"""The data types that the Open Inference Protocol and the runtimes share, under the protocol's names."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class DataType:
    """One element type.

    `size` is the size of an element in wire form in bytes; 0 for BYTES, whose elements have lengths of their own. `numpy` is
    the type of an array over the wire form; BF16, which NumPy does not have, is its 16 bits, BYTES raw bytes. `kind` is one of
    bool, uint, int, float, bytes.
    """

    name: str
    size: int
    numpy: "np.dtype[np.generic]"
    kind: str

    def __repr__(self) -> str:
        return self.name

    @property
    def config_name(self) -> str:
        """The name in Triton's model configuration."""
        return "TYPE_STRING" if self.name == "BYTES" else f"TYPE_{self.name}"


def _types() -> dict[str, DataType]:
    plain = {"BOOL": "bool"}
    plain |= {f"UINT{8 * n}": f"<u{n}" for n in (1, 2, 4, 8)}
    plain |= {f"INT{8 * n}": f"<i{n}" for n in (1, 2, 4, 8)}
    plain |= {f"FP{8 * n}": f"<f{n}" for n in (2, 4, 8)}
    kinds = {"b": "bool", "u": "uint", "i": "int", "f": "float"}
    types = {name: np.dtype(code) for name, code in plain.items()}
    table = {name: DataType(name, dtype.itemsize, dtype, kinds[dtype.kind]) for name, dtype in types.items()}
    table["BF16"] = DataType("BF16", 2, np.dtype("<u2"), "float")
    table["BYTES"] = DataType("BYTES", 0, np.dtype("u1"), "bytes")
    return table


DATATYPES = _types()
"""Every data type by its protocol name."""
