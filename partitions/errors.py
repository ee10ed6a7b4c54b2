"""What can go wrong with hardware shares; no HTTP, no models."""


class PartitionError(Exception):
    """Base of every error of this package."""


class DeviceUnavailable(PartitionError):
    """The device asked for is not here, or cannot be carved; the text says what is needed."""


class DoesNotFit(PartitionError):
    """A plan asks for more granules than there are; the text shows the arithmetic."""


class Misplaced(PartitionError):
    """A partition ran where it should not have: outside its grant, or on another's units."""


class DeviceLost(PartitionError):
    """The device failed for good: every later call in this process fails too, so the process has to be started again."""
