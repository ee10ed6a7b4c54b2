"""Who was granted how much of a device, and who used it: the account. Pure: knows no device, no process and no clock."""
