"""`uvicorn server.app:app` by the options of `python -m server`: the HTTP of all tenants shares one event loop."""

import os

import uvicorn

from server.command_line import parse

if __name__ == "__main__":
    options = parse()
    os.environ["GREENLANE_CONFIG"] = str(options.config)
    uvicorn.run("server.app:app", port=int(options.port or 0), access_log=False)
