#!/usr/bin/env bash
# For the day a GPU is there, in ten minutes of one: what each part shows is said above it, and a table ends it. Parts for
# which no time is left are left out, and the table says so.
#   bash tests/gpu/run.sh [MODEL]      MODEL: a folder or hub name; by default the embedded one
# With PRAISON_AGENT_RL_VLLM (the command vllm) its parts run too, with PRAISON_AGENT_RL_UNSLOTH (a Python that has
# Unsloth, see make test-unsloth) those of Unsloth; with two GPUs, NCCL.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PRAISON_AGENT_RL_DEVICE=cuda
model="${1:-smollm2-135m-instruct}"
work=$(mktemp -d)
table="$work/table.txt"

part() { # NAME SECONDS COMMAND...: run it, at most so long, and note how it ended
  local name="$1" limit="$2" start=$SECONDS left=$((600 - SECONDS))
  shift 2
  if [ "$left" -lt 30 ]; then
    echo "$name: left out, since the ten minutes are over" >> "$table"
    return
  fi
  [ "$limit" -le "$left" ] || limit=$left
  echo "=== $name"
  timeout "$limit" "$@"
  local code=$?
  echo "$name: $([ $code = 0 ] && echo passed || echo "failed ($code)") in $((SECONDS - start)) s" >> "$table"
}
steps() { # NAME PYTHON KEY=VALUE...: 20 steps of the recipe, then speed, merge proof and comparison
  local name="$1" python="$2" sets=()
  shift 2
  for key in "$@"; do sets+=(--set "$key"); done
  "$python" -m praison_agent_rl.cli train recipes/grpo/config.yaml --set "model_name=$model" \
    --set "output_dir=$work/$name" --set max_steps=20 "${sets[@]}" || return 1
  "$python" - "$work/$name" <<'PY'
import json, sys
from pathlib import Path
from praison_agent_rl.runs import RunFolder
run = RunFolder(Path(sys.argv[1]))
steps = run.steps()
print("median seconds a step:", sorted(step["seconds"] for step in steps)[len(steps) // 2])
print("merge:", run.merge_file.read_text())
print("comparison:", json.loads(run.comparison_file.read_text())["total"])
print("notes:", *(event["text"] for _, event in run.events() if event["event"] == "note"), sep="\n  ")
PY
}
export -f steps
export model work

part "torch sees a GPU" 60 python -c "import torch; assert torch.cuda.is_available(); print(torch.cuda.get_device_name())"
# shows: training, sampling, merging and quantised bases do on the GPU what they do on a CPU
part "model tests" 240 python -m pytest -q -n 6 tests/model/test_grpo.py tests/model/test_shared_prefix.py \
  tests/model/test_exactness.py tests/model/test_merging.py tests/model/test_preferences.py \
  tests/model/test_quantised.py tests/contract
# shows: the step that computes shared prompts once against TRL's own, on a real model: the largest relative difference
# of a log-probability, an entropy, the loss or a gradient (on a CPU, in float32, 6e-5)
part "exactness" 120 python - "$model" <<'PY'
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
# shows: seconds a step, the proof of the merge and the held-out comparison, by plain weights and by 4 bits
part "20 steps" 180 bash -c 'steps plain python'
part "20 steps, prompts shared" 180 bash -c 'steps shared python gradient_checkpointing=false'
part "20 steps, 4 bits" 180 bash -c 'steps four python load_in_4bit=true'
if [ -n "${PRAISON_AGENT_RL_VLLM:-}" ]; then
  # shows: vLLM draws from each policy as an adapter; versions are loaded and swapped under load
  part "20 steps, vLLM server" 240 bash -c 'steps vllm python sampler=vllm gpu_memory_utilization=0.3'
  part "vLLM serves versions" 300 python -m pytest -q tests/vllm/test_serving.py
fi
if [ -n "${PRAISON_AGENT_RL_UNSLOTH:-}" ]; then
  # shows: Unsloth's kernels and its own trainer (the notes say that it took over), and its vLLM in the process
  part "20 steps, Unsloth" 240 bash -c 'steps unsloth "$PRAISON_AGENT_RL_UNSLOTH" backend=unsloth load_in_4bit=true'
  part "20 steps, Unsloth and vLLM" 300 bash -c 'steps fast "$PRAISON_AGENT_RL_UNSLOTH" backend=unsloth fast_inference=true'
fi
if python -c "import sys, torch; sys.exit(torch.cuda.device_count() < 2)"; then
  # shows: two processes over NCCL, by DDP, and with the weights shared out
  part "20 steps, two GPUs" 180 bash -c 'steps two python launch=2'
  part "20 steps, two GPUs, FSDP2" 240 bash -c 'steps fsdp python "launch={nproc: 2, sharding: fsdp2}"'
fi
echo; cat "$table"
! grep -q ": failed" "$table"
