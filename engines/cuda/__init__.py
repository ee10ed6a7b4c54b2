"""What any library of engines needs on a GPU: streams, graphs, copies, staging, the launch loop's recipes. Knows no library.

An executor captures its runs (`capture`) between the SMs' copies of inputs and outputs (`copies`, in `turns`), by tables of
addresses (`address_cache`; memory that the GPU does not reach goes through `staging`). It orders preparations with alternates
(`sharing`, `locks`) and works with callers' streams (`stream_order`), and gives the launch loop `recipes`. `resources` are what
it owns on a partition, and `work` is an inference in flight.
"""
