"""`greenlane curve`: how fast models are on shares of a device, and the smallest share that keeps a target.

`options` reads the command line and `command` runs it. `subject` opens device and models and makes tensors for them, `measure`
drives executors on one share, and `whole` does so for all tenants of a device. `points` decides, and is pure; `text` and `page`
show what was found.
"""
