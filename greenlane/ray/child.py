"""`python -m greenlane.ray.child`: the server of a replica. What to serve comes on stdin, as JSON."""

import ctypes
import json
import os
import signal
import sys
from types import MappingProxyType
from typing import NoReturn

from greenlane.own import protect_children

_PR_SET_PDEATHSIG = 1


def main() -> NoReturn:
    """Serve the configuration with the given address, admin key, cores and shares; drain when the replica's process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    given = json.load(sys.stdin)
    if os.getppid() != given["parent"]:  # It ended before prctl was called.
        sys.exit(1)
    if given["cores"]:
        os.sched_setaffinity(0, given["cores"])
    protect_children()
    from server.__main__ import run
    from server.command_line import Options
    from server.config.schema import Config
    from server.host.leaving import leave
    from server.tenants.auth import digest

    def adjust(config: Config) -> Config:
        shares = given["shares"]
        tenants = {
            name: tenant.model_copy(update={"granules": shares[name], "cores": None, "sms": None}) if name in shares else tenant
            for name, tenant in config.tenants.items()
        }
        server = config.server.model_copy(update={"admin_key_sha256": digest(given["key"])})
        return config.model_copy(update={"server": server, "tenants": MappingProxyType(tenants)})

    leave(run(Options(config=given["config"], host=given["host"], port=given["port"]), adjust))


if __name__ == "__main__":
    main()
