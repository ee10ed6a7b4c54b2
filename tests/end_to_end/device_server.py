"""`python -m server`, except that cores have a device process, as a GPU has, in place of the tenants' own processes."""

import sys

from server import __main__ as command

if __name__ == "__main__":
    command.on_host_cores = lambda _: False
    sys.exit(command.main())
