import numpy as np

from engines import DATATYPES, Room, Tensor
from engines.base import NO_ROOM
from engines.memory import view


def test_a_tensor_of_an_array_is_its_own_memory() -> None:
    data = np.arange(6, dtype=np.int16).reshape(2, 3)
    tensor = Tensor.of(data)
    assert (tensor.shape, tensor.address, tensor.nbytes) == ((2, 3), data.ctypes.data, 12)


def test_a_tensor_of_an_array_with_gaps_is_a_copy_in_rows() -> None:
    data = np.arange(6, dtype=np.int16).reshape(2, 3).T
    tensor = Tensor.of(data)
    assert tensor.shape == (3, 2)
    assert tensor.address != data.ctypes.data
    assert np.frombuffer(view(tensor.address, tensor.nbytes), np.int16).tolist() == [0, 3, 1, 4, 2, 5]


def test_a_tensor_of_a_single_number_has_no_dimension() -> None:
    assert Tensor.of(np.array(7.0)).shape == ()


def test_a_tensor_keeps_the_memory_it_is_of() -> None:
    tensor = Tensor.of(np.full(1000, 7, np.int64))
    assert tensor.array(DATATYPES["INT64"]).tolist() == [7] * 1000


def test_an_array_of_a_tensor_is_a_copy_of_the_same_shape() -> None:
    data = np.arange(6, dtype=np.float32).reshape(3, 1, 2)
    taken = Tensor.of(data).array(DATATYPES["FP32"])
    data[:] = 0
    assert taken.shape == (3, 1, 2)
    assert taken.ravel().tolist() == [0, 1, 2, 3, 4, 5]


def test_an_empty_tensor_is_an_empty_array() -> None:
    assert Tensor.of(np.zeros((0, 3), np.float32)).array(DATATYPES["FP32"]).shape == (0, 3)


def test_there_is_no_room_by_default() -> None:
    assert Room() == NO_ROOM == (0, 0)
