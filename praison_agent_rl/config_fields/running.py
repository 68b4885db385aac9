"""Keys of a training file: where a run happens, and where its result goes."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from praison_agent_rl.config_fields.launching import LaunchField
from praison_agent_rl.config_fields.remote import RemoteField
from praison_agent_rl.config_values import SETTINGS, Place, Texts


class RunningFields(BaseModel):
    """Where a run happens, and where its result goes."""

    model_config = SETTINGS

    backend: Literal["auto", "transformers", "unsloth"] = "auto"
    """What loads the model and its adapter; ``auto`` is unsloth on a GPU where it is installed, else transformers."""
    launch: LaunchField = None
    """Several processes that train: their number, or a mapping (``Launch``)."""
    remote: RemoteField = None
    """Another machine for the run, reached over SSH: its name, or a mapping (``Remote``)."""

    merged_save_dir: Place | None = None
    """Folder for the merged model, besides the run's own."""
    huggingface_save: bool = False
    """Push the result to the hub, as ``save_method`` says."""
    huggingface_save_gguf: bool = False
    """Push a GGUF file of it to the hub."""
    hf_model_name: str | None = None
    """Repository on the hub, as ``user/name``."""
    hf_private: bool = True
    """Whether that repository is private when it is made."""
    save_method: Literal["merged", "lora"] = "merged"
    """What is pushed: the merged model, or the adapter alone."""
    commit_message: str | None = None
    """Of the push."""
    tags: Texts | None = None
    """Tags of the model card."""
    ollama_save: bool = False
    """Make an Ollama model of it."""
    ollama_model: str | None = None
    """Name of the Ollama model, with its tag if it has one: ``user/name:8b``."""
    quantization_method: str | list[str] | None = None
    """How GGUF files are quantised, such as ``q4_k_m``."""
    imatrix_file: Place | None = None
    """Importance matrix of llama.cpp for that."""
