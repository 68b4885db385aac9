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
work=$(mktemp -d)
praison-agent-rl train recipes/short_answers.yaml --set "model_name=${1:-smollm2-135m-instruct}" \
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
