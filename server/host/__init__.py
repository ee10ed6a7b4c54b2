"""What concerns the process and the machine, and no request: logs, exit codes, signals, memory, the watchdog."""
