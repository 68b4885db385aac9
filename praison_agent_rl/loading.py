"""How weights and tokenizers come into memory: to train on, to merge into, and as a server would load them.

Nothing heavy is imported but in the functions, which need the ``train`` extra.
"""

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from praison_agent_rl.config import TrainConfig
from praison_agent_rl.errors import MissingExtra, ModelError
from praison_agent_rl.preflight import is_template_file
from praison_agent_rl.templates import ready_template


def load_tokenizer(source: str, config: TrainConfig) -> Any:
    """The tokenizer of ``source``, padding on the left, with the config's chat template if it names one."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=config.revision, trust_remote_code=config.trust_remote_code, padding_side="left"
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer of {source!r} cannot be loaded: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template:
        tokenizer.chat_template = _template(config.chat_template)
    return tokenizer


def _template(given: str) -> str:
    if ready := ready_template(given):
        return ready
    if not is_template_file(given):
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # it was there when the run was planned
        raise ModelError(f"the chat template {given!r} cannot be read: {error}") from error


def load_model(source: str, config: TrainConfig, *, device: str, full_precision: bool = False) -> Any:
    """The causal language model of ``source`` on ``device``; ``full_precision`` means float32, unquantised."""
    from transformers import AutoModelForCausalLM

    options = _load_options(config, device=device, full_precision=full_precision)
    return _placed(_loaded(AutoModelForCausalLM, source, options), device, full_precision=full_precision)


def load_deployed(source: str, config: TrainConfig, *, device: str) -> Any:
    """The model of ``source`` as a server loads it: in the format that it is stored in, however it is trained.

    Who trains in fewer bits may have a GPU that is too small for all of it: what does not fit lies in the memory of
    its host then.
    """
    from transformers import AutoModelForCausalLM

    plain = as_deployed(config)
    options = _load_options(plain, device=device, full_precision=False)
    if plain != config and device.startswith("cuda"):
        options["device_map"] = "auto"
    return _placed(_loaded(AutoModelForCausalLM, source, options), device)


def as_deployed(config: TrainConfig) -> TrainConfig:
    """The configuration by which weights are loaded as a server loads them, in no fewer bits than they are stored."""
    return config.model_copy(update={"load_in_4bit": False, "load_in_8bit": False})


def load_scorer(
    source: str, config: TrainConfig, *, device: str, new_head: bool = False, full_precision: bool = False
) -> Any:
    """The model of ``source`` with one number as its output, the score.

    Raises:
        ModelError: the weights have no head that gives a score; with ``new_head`` one starts from the seed.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    options = _load_options(config, device=device, full_precision=full_precision)
    torch.manual_seed(config.seed)
    asked = {**options, "num_labels": 1, "output_loading_info": True}
    with only_errors_of("transformers.modeling_utils"):  # it warns that the head is new, which is why it is trained
        model, found = _loaded(AutoModelForSequenceClassification, source, asked)
    if (missing := sorted(found["missing_keys"])) and not new_head:
        raise ModelError(
            f"{source!r} is no reward model: it has no weights for {missing[0]}; a language model gives no score, "
            "train a reward model on it first (method: reward)"
        )
    # by it the model finds the last token of each text in a batch
    model.config.get_text_config().pad_token_id = load_tokenizer(source, config).pad_token_id
    return _placed(model, device, full_precision=full_precision)


def _placed(model: Any, device: str, *, full_precision: bool = False) -> Any:
    """``model`` on ``device``, unless its weights have chosen their devices already; quantised ones do."""
    if not getattr(model, "is_quantized", False):
        return model if hasattr(model, "hf_device_map") else model.to(device)
    if full_precision:
        return model.dequantize().float()
    for layer in model.modules():
        # Where it may, bitsandbytes 0.50 packs 4-bit weights anew for AVX-512 at the first answer, and a forward over
        # such weights has no gradient (bitsandbytes/nn/modules.py and autograd/_functions.py, matmul_4bit)
        if vars(layer).get("support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return model


def _load_options(config: TrainConfig, *, device: str, full_precision: bool) -> dict[str, Any]:
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(
            f"the device is {device!r}, but the installed torch sees no GPU here; install a CUDA build of torch, or "
            "set PRAISON_AGENT_RL_DEVICE=cpu and begin anew (a run stays on the kind of device that it was planned for)"
        )
    options: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    if full_precision or (device == "cpu" and config.dtype == "auto"):
        options["dtype"] = torch.float32  # CPUs are no faster in 16 bits, and less exact
    elif config.dtype != "auto":
        options["dtype"] = getattr(torch, config.dtype)
    if not full_precision and (config.load_in_4bit or config.load_in_8bit):
        options["quantization_config"] = _quantization(config)
    return options


def _loaded(kind: Any, source: str, options: dict[str, Any]) -> Any:
    from safetensors import SafetensorError

    try:
        return kind.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the weights of {source!r} cannot be loaded: {error}") from error


@contextlib.contextmanager
def only_errors_of(name: str) -> Iterator[None]:
    """The logger ``name`` says nothing of warnings that are true and mean nothing here."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def stored_dtype(source: str, config: TrainConfig) -> str:
    """The number format that the weights of ``source`` are stored in, as ``float32`` or ``bfloat16``."""
    from transformers import AutoConfig

    described = AutoConfig.from_pretrained(source, revision=config.revision, trust_remote_code=config.trust_remote_code)
    return str(getattr(described, "dtype", None) or "float32").removeprefix("torch.")


def _quantization(config: TrainConfig) -> Any:
    import torch
    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingExtra("load_in_4bit and load_in_8bit need bitsandbytes: pip install bitsandbytes")
    if config.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )
