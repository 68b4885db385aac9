"""The key ``remote`` of a training file: another machine, reached over SSH, on which the run happens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

from praison_agent_rl.config_values import SETTINGS, Count, Place, Whole

_SECRETS = ("password", "passphrase", "token", "key", "secret", "private_key")


def _as_mapping(value: Any) -> Any:
    """A text alone is the machine; what belongs to nobody else is refused."""
    if not isinstance(value, Mapping):
        return value if isinstance(value, Remote | None) else {"host": value}
    if secrets := [key for key in value if str(key).lower() in _SECRETS]:
        raise ValueError(
            f"remote has {', '.join(secrets)}, but a secret does not belong in a training file; leave it to the SSH "
            "agent or the SSH configuration (identity names the file of a key, env the variables that go along)"
        )
    return value


def _host(value: Any) -> Any:
    """A word that SSH can take for nothing but a machine."""
    if isinstance(value, str) and not re.fullmatch(r"[\w.@:%\[\]][\w.@:%\[\]-]*", value):
        raise ValueError(
            f"remote.host is {value!r}, but must be a machine or an alias of the SSH configuration, such as gpubox or "
            "me@gpu.example; further settings go there, or into remote.options"
        )
    return value


class Remote(BaseModel):
    """Where a run happens instead of here."""

    model_config = SETTINGS

    host: Annotated[str, BeforeValidator(_host)]
    """Machine, or an alias of the SSH configuration; ``user@machine`` too."""
    port: Count | None = None
    """Of its SSH server; by default as the SSH configuration says."""
    identity: Place | None = None
    """File of the private key; by default as the SSH configuration and agent say."""
    options: list[str] = []
    """Further words for the command ``ssh``, such as ``-o`` and ``ProxyJump=gate``."""
    python: str = "python3"
    """Python there, with this package and its extra ``train``."""
    workdir: str = "~/.praison-agent-rl"
    """Folder there, under which each run gets its own."""
    gpus: Whole | None = None
    """GPUs that must be there; by default as many as ``launch`` needs, and none is missed."""
    env: list[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]] = []
    """Names of variables of this environment that the run gets too, such as ``HF_TOKEN``."""
    bring: list[Place] = []
    """Files and folders that go along, besides the modules of rewards and what these import."""


RemoteField = Annotated[Remote | None, BeforeValidator(_as_mapping)]
