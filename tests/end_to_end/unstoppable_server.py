"""`python -m server`, except that ONNX Runtime does not stop what it runs, as in one operator that takes for ever."""

from engines.onnxruntime import outputs
from server import __main__ as command
from server.host.leaving import leave
from server.processes import tenant_process
from server.processes.tenant_process import TenantArguments

_main = tenant_process.main


def main(arguments: TenantArguments) -> None:
    """The process of a tenant."""
    outputs.OnnxWork.cancel = lambda _: None  # type: ignore[method-assign]
    _main(arguments)


if __name__ == "__main__":
    from tests.end_to_end import unstoppable_server

    tenant_process.main = unstoppable_server.main  # By a name that the processes can import.
    leave(command.main())
