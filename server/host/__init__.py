"""The process and the machine, apart from requests: logs, exit codes, signals, memory, the watchdog."""
