"""A LoRA adapter merged into the safetensors shards of its base, a piece of a tensor at a time."""
