"""`greenlane curve`: how fast models are on shares of a device, and the smallest share that keeps a target.

`options` reads the command line and `command` runs it. `subject` opens device and models, `requests` makes tensors for them,
`loops` drives executors, `measure` does so for one share and `plan` for all tenants of a device. `intervals`, `points`,
`search` and `fit` decide, and are pure; `text`, `pictures` and `page` show what was found.
"""
