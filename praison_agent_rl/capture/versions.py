"""Which version of ours has answered, by what a reply says of itself.

A name of ``praison-agent-rl serve`` goes over from version to version while an agent asks for it, and only the reply
knows which one it was. A server of others names its model as it likes, and that is no version.
"""

import re
from typing import Any

from pydantic import BaseModel

from praison_agent_rl.capture.replies import fields
from praison_agent_rl.runs import slug

_SERVED = re.compile(r"rl-([a-z0-9-]+)-(?:v[1-9][0-9]*|base)")
"""`registry.served_name` and `server_pool.base_name`: of a folder of versions, and which of them."""
_PINNED = re.compile(r"@v[1-9][0-9]*$")
_DIGEST = re.compile(r"-[0-9a-f]{8}$")
"""At the end of a folder whose plain name was another agent's already (`registry.agent_folder`)."""


def model_named(answer: Any) -> str | None:
    """The model that a server named in its answer, or in a part of a stream."""
    if isinstance(answer, tuple):  # of a streamed Responses answer, by the framework
        answer = answer[-1]
    hidden = getattr(answer, "_hidden_params", None)  # of a stream's parts litellm says what was asked for
    found = hidden.get("provider_response_model") if isinstance(hidden, dict) else None
    if found is None:
        said = fields(answer)
        event = said.get("response")  # which a part of a Responses stream is about
        found = said.get("model") or (fields(event).get("model") if isinstance(event, BaseModel) else None)
    return found if isinstance(found, str) else None


def version_named(named: str | None, asked: str | None) -> str | None:
    """``named`` if that is a version of the agent that was ``asked`` for, by whichever of its names; else None.

    >>> version_named("rl-help-desk-v3", "openai/Help Desk")
    'rl-help-desk-v3'
    >>> version_named("gpt-4o-2024-08-06", "gpt-4o"), version_named("rl-cook-v3", "openai/help-desk")
    (None, None)
    """
    found = _SERVED.fullmatch(named.rpartition("/")[2]) if named and asked else None
    if found is None or asked is None:
        return None
    names = {asked, asked.partition("/")[2] or asked}  # litellm puts a provider before it
    names |= {_PINNED.sub("", name) for name in names} | {m[1] for name in names if (m := _SERVED.fullmatch(name))}
    folders = {slug(name) for name in names}
    return found[0] if {found[1], _DIGEST.sub("", found[1])} & folders else None
