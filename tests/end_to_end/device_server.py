"""`python -m server`, except that cores have a device process, as a GPU has, in place of the tenants' own processes."""

from server import __main__ as command
from server.host.leaving import leave

if __name__ == "__main__":
    command.on_host_cores = lambda _: False
    leave(command.main())
