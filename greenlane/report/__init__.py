"""What the commands show people: pages of HTML that need no other file, and pictures for them.

`greenlane curve`, `greenlane prove` and the benchmarks use it. It imports nothing of the server.
"""
