"""One run of a session, on its partition's stream."""

from collections.abc import Callable, Sequence

import onnxruntime as ort

from partitions.cpu import CpuStream

from ..base import Room, Tensor
from ..errors import Cancelled, ExecutionFailed, OutputsTooLarge
from .errors import clean_message


class OnnxWork:
    """See `engines.base.Work`."""

    def __init__(
        self, stream: CpuStream, inputs: Sequence[Tensor], room: Room, key: object, run: Callable[..., tuple[Tensor, ...]]
    ) -> None:
        """`key` is of these inputs and this room, for `run`."""
        self._stream = stream
        self._call = (inputs, room, key)
        self._run = run
        self._options = ort.RunOptions()  # Its log level is the session's.
        self._outputs: tuple[Tensor, ...] = ()
        self._task = stream.put(self._execute)

    def __repr__(self) -> str:
        return f"<OnnxWork {self._task!r}>"

    def wait(self) -> tuple[Tensor, ...]:
        self._stream.wait(self._task)
        return self._outputs

    def cancel(self) -> None:
        self._options.terminate = True

    def _execute(self) -> None:
        if self._options.terminate:
            raise Cancelled("cancelled before it began")
        try:
            self._outputs = self._run(*self._call, self._options)
        except OutputsTooLarge:
            raise
        except Exception as error:
            if self._options.terminate:
                raise Cancelled("cancelled while it ran") from error
            raise ExecutionFailed(clean_message(error)) from error
