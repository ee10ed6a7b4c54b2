"""The dispatcher: accepts connections, and hands them to the process that they belong to."""
