"""Load for a server over HTTP, from processes of their own, and figures of what their clients saw.

`greenlane prove`, `greenlane curve` and the benchmarks use it. It imports nothing of the server.
"""
