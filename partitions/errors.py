"""The errors of this package. No HTTP, no models."""


class PartitionError(Exception):
    """Base of every error of this package."""


class DeviceUnavailable(PartitionError):
    """The device does not exist or cannot be partitioned; the text says what is needed."""


class DoesNotFit(PartitionError):
    """A plan needs more granules than the device has, or a strain more memory than is free; the text has the numbers."""


class Misplaced(PartitionError):
    """A partition ran on units outside its granules, or on another partition's."""


class DeviceLost(PartitionError):
    """The device failed for good: every later call in this process fails, so the process must be restarted."""


class Unsupported(PartitionError):
    """The device has nothing of the kind that was asked for; the text says what it has."""


class MpsError(PartitionError):
    """A GPU's MPS daemon cannot be started, or does not do what it is asked to; the text says what to do."""
