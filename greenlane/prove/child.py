"""`python -m greenlane.prove.child`: the server that `greenlane prove` starts. What to serve comes on stdin, as JSON."""

import ctypes
import json
import signal
import sys
from pathlib import Path
from secrets import token_urlsafe
from types import MappingProxyType
from typing import Any, NoReturn

from greenlane.own import protect_children

_PR_SET_PDEATHSIG = 1


def main() -> NoReturn:
    """Serve the configuration, with keys and a port of its own; drain and end when the process that started this one ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    protect_children()
    from server.__main__ import run
    from server.command_line import Options
    from server.config.changes import LIMITS_OF_TENANT
    from server.config.schema import Config
    from server.host.leaving import leave
    from server.tenants.auth import digest

    given = json.load(sys.stdin)

    def adjust(config: Config) -> Config:
        keys = {name: token_urlsafe() for name, tenant in config.tenants.items() if tenant.keys_sha256}
        # Limits would keep victims from being asked often enough, and aggressors from being aggressive.
        same: dict[str, Any] = dict.fromkeys(("port", "grpc_port", *LIMITS_OF_TENANT))
        same |= {} if given["lends"] else {"burst": None, "lend": 0.0}
        tenants = {
            name: tenant.model_copy(update=same | ({"keys_sha256": (digest(keys[name]),)} if name in keys else {}))
            for name, tenant in config.tenants.items()
        }
        server = config.server.model_copy(
            update={
                "admin_key_sha256": digest(given["admin"]),
                "drain_grace": 0.0,
                "strict_readiness": False,
                "autopilot": "off",  # The shares are those of the file until the end.
                "usage_dir": None,  # The account of the server that serves stays its own.
            }
        )
        file = Path(given["keys"])
        file.touch(0o600)
        lend = {name: tenant.lend for name, tenant in config.tenants.items() if tenant.lend}
        burst = [name for name, tenant in config.tenants.items() if tenant.burst]
        file.write_text(json.dumps({"keys": keys, "tenants": [*config.tenants], "lend": lend, "burst": burst}))
        return config.model_copy(update={"server": server, "tenants": MappingProxyType(tenants)})

    leave(run(Options(config=given["config"], host="127.0.0.1", port=given["port"], log_level="warning"), adjust))


if __name__ == "__main__":
    main()
