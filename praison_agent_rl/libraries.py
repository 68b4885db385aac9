"""Which versions of Python and of other packages are installed; none of them is imported."""

import importlib.metadata
import platform

_LIBRARIES = (
    *("praison-agent-rl", "praisonaiagents", "torch", "transformers", "trl", "peft", "datasets", "accelerate"),
    *("bitsandbytes", "unsloth"),
)


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that a result depends on."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
