"""The Open Inference Protocol over gRPC, on a port of the tenant's own: from a call to one inference and back. No HTTP."""
