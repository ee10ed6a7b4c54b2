"""The Open Inference Protocol over gRPC, on a port of the tenant's own: from a call to one inference and back. No HTTP."""

import os

# gRPC's library writes to standard error by itself, for what any client sends, and past the log's limits. Its errors come as
# statuses and exceptions.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
