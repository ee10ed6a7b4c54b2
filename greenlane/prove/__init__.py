"""`greenlane prove`: whether the tenants of a configuration are isolated from each other on this machine, in minutes.

`command_line` reads the words, `command` runs all steps: a server (`server`), what its tenants can be asked for (`survey`),
where work ran (`confinement`), victims beside aggressors (`attacks`, `plan`, `measure`), verdicts (`greenlane.load.rules`),
and the report (`document`, `text`, `page`).
"""
