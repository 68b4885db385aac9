"""The errors of this package: one root, and each leaf is also the standard type that a caller would expect.

A ``ValueError`` leaf says that something given was wrong and nothing has run yet (exit code 2 on the command line);
a ``RuntimeError`` leaf says that a run failed on the way (exit code 1). Messages say what was wrong, with the value,
where, and what to do.
"""


class PraisonRLError(Exception):
    """Root of every error that this package raises on purpose."""


class RewardError(PraisonRLError, ValueError):
    """A reward function cannot be found, called or believed."""


class ConfigError(PraisonRLError, ValueError):
    """A configuration key or value is wrong, or two of them contradict each other."""


class DataError(PraisonRLError, ValueError):
    """A dataset cannot be read, lacks columns, or has rows that cannot be trained on."""


class ModelError(PraisonRLError, ValueError):
    """The weights beneath an agent cannot be found, loaded, adapted or merged."""


class AgentError(PraisonRLError, ValueError):
    """An agent cannot be found, asked or pointed at another model."""


class VersionError(PraisonRLError, ValueError):
    """A version of an agent cannot be found, believed, promoted or taken back."""


class MissingExtra(PraisonRLError, ImportError):
    """An optional part is not installed; the message names the extra to install."""


class TrainingFailed(PraisonRLError, RuntimeError):
    """A training run ended without a trained adapter."""


class ServerFailed(PraisonRLError, RuntimeError):
    """A model server did not come up, or went away."""


class VersionDamaged(PraisonRLError, RuntimeError):
    """The files of a version are not what they were."""
