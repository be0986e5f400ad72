"""The errors that a user can act on.

Everything derived from :class:`UserError` is shown as one line, without a traceback: its message names the setting, the
input or the peer at fault, its value, and what to do.
"""


class UserError(Exception):
    """Something the user can mend; the message alone is shown."""


class ConfigError(UserError):
    """A setting is unknown, has the wrong type or value, or contradicts another one."""


class DataError(UserError):
    """A data file or a prepared data set is missing, malformed or inconsistent."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or does not belong to the model."""


class TrainingError(UserError):
    """Training cannot go on: a non-finite loss, a constant prediction, a lost peer."""


class UsageError(UserError, ValueError):
    """An operator, the sharder or symmetric memory is used wrongly: a shape, a dtype, calls that differ between ranks."""


class CommunicationError(UserError):
    """Ranks cannot reach each other: a peer is lost, a wait exceeded its limit, or memory cannot be shared."""
