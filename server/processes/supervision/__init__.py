"""Starts and replaces all other processes: the supervisor, and what it keeps of each of them (`supervised*`).

`tenant_processes` carries out what concerns several processes of a tenant; `affinity` says where they run, and how many.
"""
