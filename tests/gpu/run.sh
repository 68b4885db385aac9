#!/usr/bin/env bash
# For the day a GPU is there: the model tests on it, then a real run with its speed. Prints what it measured.
#   bash tests/gpu/run.sh [MODEL]      MODEL: a folder or hub name; by default the embedded one
set -euo pipefail
cd "$(dirname "$0")/../.."
python - <<'PY'
import torch
assert torch.cuda.is_available(), "torch sees no GPU"
print(torch.cuda.get_device_name(), torch.__version__)
PY
export PRAISON_AGENT_RL_DEVICE=cuda
python -m pytest -q tests/model tests/contract
# The step that computes shared prompts once against TRL's own, on a real model: the largest relative difference of a
# log-probability, an entropy, the loss or a gradient. On a CPU, in float32, it was 6e-5.
python - "${1:-smollm2-135m-instruct}" <<'PY'
import sys, tempfile
from praison_agent_rl.config import TrainConfig
from praison_agent_rl.models import find_weights, load_model, load_tokenizer, plain_weights
from tests.model.test_exactness import DEVICE, LENGTHS, SYSTEM, batch_of, differences, largest, trainer_of
source = plain_weights(find_weights(sys.argv[1]))
beginning = SYSTEM * 30  # 360 tokens
prompts = [[*beginning, 70], [*beginning, *range(71, 171)], [*beginning, 75, 76]]
for dtype in ("float32", "bfloat16"):
    config = TrainConfig.load({"model_name": source, "dtype": dtype}, need_data=False)
    model, tokenizer = load_model(source, config, device=DEVICE), load_tokenizer(source, config)
    trainer = trainer_of(model, tokenizer, tempfile.mkdtemp(), longest=2048, bf16=dtype == "bfloat16")
    found = differences(trainer, batch_of(prompts, [8 * n for n in LENGTHS]))
    print("shared against TRL,", dtype, "%.1e (%s)" % largest(found))
PY
work=$(mktemp -d)
praison-agent-rl train recipes/grpo/config.yaml --set "model_name=${1:-smollm2-135m-instruct}" \
  --set "output_dir=$work/run" --set max_steps=20
python - "$work/run" <<'PY'
import json, sys
from pathlib import Path
from praison_agent_rl.runs import RunFolder
run = RunFolder(Path(sys.argv[1]))
steps = run.steps()
print("median seconds a step:", sorted(step["seconds"] for step in steps)[len(steps) // 2])
print("merge:", run.merge_file.read_text())
print("comparison:", json.loads(run.comparison_file.read_text())["total"])
PY
