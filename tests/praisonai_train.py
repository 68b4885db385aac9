"""The configuration of praisonai-train 0.1.16: its keys, a value for each, and the file that it ships."""

KEYS_BY_SUBJECT = {
    "Model": """model model_name model_parameters max_seq_length load_in_4bit load_in_8bit dtype full_finetuning
        chat_template hf_token trust_remote_code revision""",
    "Adapter": """lora_r lora_alpha lora_dropout lora_bias lora_target_modules use_rslora loftq_config use_dora
        modules_to_save rank_pattern alpha_pattern finetune_last_n_layers layers_to_transform layers_pattern
        target_parameters init_lora_weights use_gradient_checkpointing random_state""",
    "Data": "dataset dataset_text_field dataset_num_proc packing val_split_ratio remove_unused_columns",
    "Method": """method beta max_prompt_length reward_funcs num_generations max_completion_length desirable_weight
        undesirable_weight embedding_learning_rate assistant_only_loss train_on_responses_only""",
    "Rollouts": """fast_inference gpu_memory_utilization max_lora_rank mtp_draft mtp_draft_repo mtp_draft_file
        spec_draft_n_max""",
    "Optimiser": """per_device_train_batch_size gradient_accumulation_steps warmup_steps warmup_ratio max_steps
        num_train_epochs learning_rate fp16 bf16 optim weight_decay lr_scheduler_type lr_scheduler_kwargs max_grad_norm
        adam_beta1 adam_beta2 adam_epsilon group_by_length neftune_noise_alpha seed data_seed""",
    "Running": """train output_dir final_model_dir logging_steps logging_first_step report_to run_name save_steps
        save_strategy save_total_limit save_safetensors resume_from_checkpoint dataloader_num_workers
        ddp_find_unused_parameters training_arguments eval_strategy eval_steps per_device_eval_batch_size
        load_best_model_at_end metric_for_best_model greater_is_better early_stopping_patience
        early_stopping_threshold""",
    "Publishing": """merged_save_dir huggingface_save huggingface_save_gguf hf_model_name hf_private save_method
        commit_message tags push_to_hub hub_model_id hub_strategy ollama_save ollama_model quantization_method
        imatrix_file""",
}
"""``KNOWN_KEYS`` of its ``train/llm/trainer.py``, by what they are about."""

KEYS = [key for keys in KEYS_BY_SUBJECT.values() for key in keys.split()]

_TEXTS = {
    "model": "m", "model_name": "m", "dtype": "bfloat16", "chat_template": "gemma", "revision": "main",
    "lora_bias": "none", "use_gradient_checkpointing": "unsloth", "method": "grpo", "optim": "adamw_8bit",
    "lr_scheduler_type": "linear", "output_dir": "outputs", "report_to": "none", "run_name": "praisonai-train",
    "save_strategy": "steps", "layers_pattern": "layers", "reward_funcs": "myproject.rewards:length_penalty",
    "hf_token": "hf_secret", "merged_save_dir": "merged", "hf_model_name": "me/model", "save_method": "merged_16bit",
    "commit_message": "trained", "hub_model_id": "me/other", "hub_strategy": "every_save", "ollama_model": "me/model",
    "imatrix_file": "imatrix.dat", "model_parameters": "8b", "final_model_dir": "lora_model",
}  # fmt: skip
_STRUCTURES = {
    "lora_target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {"q_proj": 8}, "target_parameters": ["experts.w"], "dataset": [{"name": "d"}],
    "lr_scheduler_kwargs": {"num_cycles": 1}, "training_arguments": {"torch_compile": True},
    "quantization_method": ["q4_k_m"], "tags": ["a"], "loftq_config": {"loftq_bits": 4},
}  # fmt: skip
_NUMBERS = {
    "lora_dropout": 0, "val_split_ratio": 0.05, "warmup_ratio": 0.03, "gpu_memory_utilization": 0.6, "adam_beta1": 0.9,
    "adam_beta2": 0.99, "fp16": False, "num_generations": 2, "layers_to_transform": [0, 1], "load_in_8bit": False,
    "max_completion_length": 64, "max_seq_length": 2048, "per_device_train_batch_size": 2, "max_lora_rank": 16,
    "bf16": "true", "full_finetuning": False,
}  # fmt: skip


def value_of(key: str) -> object:
    """A value of the key as its own files write it."""
    return {**_TEXTS, **_STRUCTURES, **_NUMBERS}.get(key, 1)


SHIPPED = """\
ollama_save: "true"
huggingface_save: "true"
train: "true"

model_name: "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit"
hf_model_name: "mervinpraison/llama-3.1-tamilan-8B-test"
ollama_model: "mervinpraison/llama3.1-tamilan-test"
model_parameters: "8b"

max_seq_length: 2048
load_in_4bit: true
lora_r: 16
lora_target_modules:
  - "q_proj"
  - "k_proj"
  - "v_proj"
  - "o_proj"
  - "gate_proj"
  - "up_proj"
  - "down_proj"
lora_alpha: 16
lora_dropout: 0
lora_bias: "none"
use_gradient_checkpointing: "unsloth"
random_state: 3407
use_rslora: false
loftq_config: null

dataset:
  - name: "yahma/alpaca-cleaned"
    split_type: "train"
    processing_func: "format_prompts"
    rename:
      input: "input"
      output: "output"
      instruction: "instruction"
    filter_data: false
    filter_column_value: "id"
    filter_value: "alpaca"
    num_samples: 20000

dataset_text_field: "text"
dataset_num_proc: 2
packing: false

per_device_train_batch_size: 2
gradient_accumulation_steps: 2
warmup_steps: 5
num_train_epochs: 1
max_steps: 10
learning_rate: 2.0e-4
logging_steps: 1
optim: "adamw_8bit"
weight_decay: 0.01
lr_scheduler_type: "linear"
seed: 3407
output_dir: "outputs"

quantization_method:
  - "q4_k_m"
"""
"""Its ``setup/config.yaml``, without the comments."""
