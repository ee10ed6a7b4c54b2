"""One run of a session, on its partition's stream."""

from collections.abc import Callable, Sequence

import onnxruntime as ort

from partitions.cpu import CpuStream, CpuTask

from ..base import Room, Tensor
from ..errors import Cancelled, ExecutionFailed, OutputsTooLarge
from .errors import clean_message


class OnnxWork(CpuTask):
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
        stream.put(self)

    def __repr__(self) -> str:
        return f"<OnnxWork {self.state}>"

    def wait(self) -> tuple[Tensor, ...]:
        self._stream.wait(self)
        return self._outputs

    def cancel(self) -> None:
        self._options.terminate = True

    def run(self) -> None:
        """See `CpuTask.run`."""
        try:
            if self._options.terminate:
                raise Cancelled("cancelled before it began")
            self._outputs = self._run(*self._call, self._options)
        except (Cancelled, OutputsTooLarge) as error:
            self.error = error
        except Exception as error:
            cancelled = self._options.terminate
            self.error = Cancelled("cancelled while it ran") if cancelled else ExecutionFailed(clean_message(error))
            self.error.__cause__ = error
        except BaseException as error:
            self.error = error
        self.done = True
