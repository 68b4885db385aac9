"""LoRA layers that add the adapter into the base product give PEFT's values, and go PEFT's way wherever they do not."""

import copy
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from praison_agent_rl.decoding.weights import SamplingModel
from praison_agent_rl.training import fused_lora
from praison_agent_rl.training.fused_lora import FusedLinear, LowWeight, fuse, product

RELATIVE = 1e-5  # of the largest value: float32 has 24 bits, and the sums run in another order
WIDTH, OUT, RANK = 24, 40, 4
IDS = torch.tensor([[5, 9, 200, 31, 7], [11, 12, 13, 14, 15]])


class Net(nn.Module):
    """One linear layer with a name that an adapter can be put on."""

    def __init__(self, bias=False):
        super().__init__()
        self.q = nn.Linear(WIDTH, OUT, bias=bias)

    def forward(self, x, **options):
        return self.q(x, **options)


def config_of(**settings):
    return LoraConfig(**{"r": RANK, "lora_alpha": 6, "target_modules": ["q"], **settings})


def stir(model):
    """Give every number of the adapters a value, since a fresh B is 0 and hides the adapter."""
    for name, parameter in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def adapted(biased=False, **settings):
    torch.manual_seed(1)
    return stir(get_peft_model(Net(biased), config_of(**settings)))


def layer_of(model):
    return model.base_model.model.q


def fused(biased=False, **settings):
    model = adapted(biased, **settings)
    assert fuse(model) == 1
    return model


def rows(*shape, dtype=torch.float32):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


def pull(y):
    """What flows back into ``y``: another number for each of its numbers."""
    return torch.linspace(-1, 2, y.numel()).view(y.shape).cos().to(y.dtype)


def results(forward, layer, x):
    """Output and gradients of x, A and B by name."""
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x, a.grad, b.grad = x.detach().clone().requires_grad_(), None, None
    y = forward(x)
    y.backward(pull(y))
    return {"y": y.detach(), "x": x.grad, "A": a.grad, "B": b.grad}


def by_peft(layer, x):
    return results(lambda given: Linear.forward(layer, given), layer, x)


def exact(layer, x, scaling):
    """In float64, with the gradients of a product written out."""
    base, a, b = (
        each.weight.detach().double() for each in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"])
    )
    x = x.detach().double()
    bias = 0 if layer.base_layer.bias is None else layer.base_layer.bias.detach().double()
    y = x @ base.T + bias + scaling * (x @ a.T) @ b.T
    grad = pull(y)
    flat_grad, flat_x = grad.reshape(-1, OUT), x.reshape(-1, WIDTH)
    return {
        "y": y,
        "x": grad @ (base + scaling * b @ a),
        "A": scaling * b.T @ flat_grad.T @ flat_x,
        "B": scaling * flat_grad.T @ flat_x @ a.T,
    }


def largest_relative(got, wanted):
    assert got.shape == wanted.shape
    return float((got - wanted).detach().abs().max() / wanted.detach().abs().max())


@pytest.fixture
def peft_calls(monkeypatch):
    """The layers that PEFT's own forward was called of."""
    calls, forward = [], Linear.forward

    def noted(self, *given, **options):
        calls.append(self)
        return forward(self, *given, **options)

    monkeypatch.setattr(Linear, "forward", noted)
    return calls


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (33,), (3, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize(
    ("bias", "settings", "scaling"),
    [(False, {}, 1.5), (True, {}, 1.5), (True, {"use_rslora": True}, 3.0), (False, {"r": 1, "lora_alpha": 0.3}, 0.3)],
    ids=["plain", "with a bias", "rank-stabilised", "of rank 1"],
)
def test_output_and_gradients_are_those_of_peft(shape, bias, settings, scaling, peft_calls):
    layer, x = layer_of(fused(bias, **settings)), rows(*shape)
    got = results(layer, layer, x)
    assert not peft_calls
    peft, wanted = by_peft(layer, x), exact(layer, x, scaling)
    assert all(largest_relative(got[name], peft[name]) < RELATIVE for name in peft)
    assert all(largest_relative(got[name], wanted[name]) < RELATIVE for name in wanted)


def test_a_layer_as_wide_as_those_of_a_model_gives_what_peft_gives():
    torch.manual_seed(4)
    layer = Linear(nn.Linear(448, 1216), "default", config_of(r=16), r=16, lora_alpha=32)
    layer.base_layer.requires_grad_(False)
    nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    assert fuse(nn.ModuleList([layer])) == 1
    x = torch.randn(3, 84, 448)
    got, peft = results(layer, layer, x), by_peft(layer, x)
    assert all(largest_relative(got[name], peft[name]) < RELATIVE for name in peft)


def test_rows_that_are_not_contiguous_are_multiplied_as_they_stand():
    layer = layer_of(fused())
    x = torch.randn(WIDTH, 6, 3).transpose(0, 2)
    got = layer(x)
    got.sum().backward()  # its gradient is one number, expanded
    wanted = torch.ones(18, OUT).double().T @ (
        x.reshape(18, WIDTH).double() @ layer.lora_A["default"].weight.double().T
    )
    assert largest_relative(got, exact(layer, x, 1.5)["y"]) < RELATIVE
    assert largest_relative(layer.lora_B["default"].weight.grad, 1.5 * wanted) < RELATIVE


def test_no_rows_give_no_rows():
    assert layer_of(fused())(torch.zeros(2, 0, WIDTH)).shape == (2, 0, OUT)


def test_only_what_needs_a_gradient_gets_one():
    layer = layer_of(fused())
    x, a, b = rows(5).detach(), layer.lora_A["default"].weight, layer.lora_B["default"].weight
    a.requires_grad_(False)
    layer(x).sum().backward()
    assert x.grad is None and a.grad is None and layer.base_layer.weight.grad is None and b.grad is not None
    with torch.no_grad():
        assert not layer(x).requires_grad


@pytest.mark.parametrize("of_x", [True, False])
def test_the_wide_product_of_the_backward_is_made_only_for_an_input_that_needs_it(of_x, monkeypatch):
    layer, x, factors = layer_of(fused()), rows(5).detach().requires_grad_(of_x), []

    def noted(x, weight, *bias):
        factors.append(tuple(weight.shape))
        return product(x, weight, *bias)

    y = layer(x)
    monkeypatch.setattr(fused_lora, "product", noted)
    y.sum().backward()
    assert factors == [(RANK, OUT), (WIDTH, OUT)] if of_x else factors == [(RANK, OUT)]


def test_what_is_kept_for_the_gradients_is_the_input_the_narrow_product_and_weights():
    layer, kept = layer_of(fused()), []

    def keep(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(rows(7, 9))
    assert sorted(kept) == sorted([(63, WIDTH), (63, RANK), (OUT, WIDTH), (RANK, WIDTH), (OUT, RANK)])


def test_the_output_may_be_changed_in_place():
    layer, x = layer_of(fused()), rows(3, 5)
    y = layer(x)
    y *= 2
    y.sum().backward()
    gradient = x.grad
    x.grad = None
    (2 * Linear.forward(layer, x)).sum().backward()
    assert largest_relative(gradient, x.grad) < RELATIVE


def test_a_gradient_of_a_gradient_is_refused():
    x = rows(3)
    (first,) = torch.autograd.grad(layer_of(fused())(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# --- fewer bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_formats_are_those_of_peft_and_errors_no_larger(low, of_x, of_weight, peft_calls):
    layer, x = layer_of(fused(True)), rows(16, 8, dtype=of_x)
    layer.base_layer.to(of_weight)
    with torch.autocast("cpu", low):
        got = results(layer, layer, x)
        assert not peft_calls
        peft = by_peft(layer, x)
    assert {name: each.dtype for name, each in got.items()} == {
        "y": low,
        "x": of_x,
        "A": torch.float32,
        "B": torch.float32,
    }
    assert all(got[name].dtype == peft[name].dtype for name in peft)
    for name, wanted in exact(layer, x, 1.5).items():
        assert (got[name].double() - wanted).norm() <= 2 * (peft[name].double() - wanted).norm(), name


def test_the_gradient_may_be_computed_under_an_autocast_that_the_output_was_not():
    layer, x = layer_of(fused()), rows(6)
    y = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y.backward(pull(y))
    wanted = exact(layer, x, 1.5)
    got = {"x": x.grad, "A": layer.lora_A["default"].weight.grad, "B": layer.lora_B["default"].weight.grad}
    assert all(largest_relative(got[name], wanted[name]) < RELATIVE for name in got)


def test_layers_in_bfloat16_throughout_are_fused_and_those_with_adapters_in_float32_are_not(peft_calls):
    layer, x = layer_of(fused()), rows(6, dtype=torch.bfloat16)
    layer.base_layer.to(torch.bfloat16)
    assert torch.equal(layer(x), Linear.forward(layer, x)) and len(peft_calls) == 2
    peft_calls.clear()
    layer.to(torch.bfloat16)
    y = layer(x)
    assert y.dtype == torch.bfloat16 and not peft_calls
    wanted, peft = exact(layer, x, 1.5)["y"], Linear.forward(layer, x)
    assert (y.double() - wanted).norm() <= 2 * (peft.double() - wanted).norm()


def double_in_place(weight):
    with torch.no_grad():
        weight.mul_(2)


def double_by_a_swap(weight):
    weight.data = weight.data * 2


@pytest.mark.parametrize("change", [double_in_place, double_by_a_swap])
def test_the_weight_in_fewer_bits_is_made_once_and_follows_one_that_changes(change):
    layer, x = layer_of(fused()), rows(64)
    weight = layer.base_layer.weight
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
        made = layer.low_weight.of(weight, torch.bfloat16)
        layer(x)
        assert layer.low_weight.of(weight, torch.bfloat16) is made
        change(weight)
        y = layer(x)
    assert torch.equal(layer.low_weight.of(weight, torch.bfloat16), weight.to(torch.bfloat16))
    assert largest_relative(y, exact(layer, x, 1.5)["y"]) < 2**-7


def test_a_weight_that_comes_to_lie_where_another_was_is_not_taken_for_it():
    weight, low = nn.Parameter(torch.zeros(OUT, WIDTH), requires_grad=False), LowWeight()
    for number in range(5):  # what is freed is given out again at once
        weight.data = torch.full((OUT, WIDTH), float(number))
        assert low.of(weight, torch.bfloat16).unique().tolist() == [number]
        weight.data = torch.zeros(0)


def test_a_weight_that_was_made_in_inference_mode_goes_pefts_way(peft_calls):
    model = fused()
    with torch.inference_mode():
        layer_of(model).base_layer.weight = nn.Parameter(torch.ones(OUT, WIDTH), requires_grad=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(rows(3)), Linear.forward(layer_of(model), rows(3)))
    assert peft_calls == [layer_of(model)] * 2


def test_the_weight_in_fewer_bits_follows_a_merge_that_is_taken_back():
    model = fused()
    layer, x = layer_of(model), rows(64)
    layer.lora_B["default"].weight.data *= 1e5  # so that taking it out again leaves a weight that differs in 8 bits too
    before = layer.base_layer.weight.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
        model.merge_adapter()
        merged = layer(x)
        assert largest_relative(merged, exact(layer, x, 0)["y"]) < 2**-7
        model.unmerge_adapter()
        layer(x)
    after = layer.base_layer.weight.to(torch.bfloat16)
    assert not torch.equal(after, before)
    assert torch.equal(layer.low_weight.of(layer.base_layer.weight, torch.bfloat16), after)


def test_the_weight_in_fewer_bits_is_freed_without_autocast_and_neither_saved_nor_copied():
    model = fused()
    layer, names, x = layer_of(model), list(model.state_dict()), rows(3)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)
    assert list(model.state_dict()) == names
    tensors = [
        each for each in vars(layer_of(copy.deepcopy(model)).low_weight).values() if isinstance(each, torch.Tensor)
    ]
    assert tensors == []
    assert any(isinstance(each, torch.Tensor) for each in vars(layer.low_weight).values())
    layer(x)
    assert not any(isinstance(each, torch.Tensor) for each in vars(layer.low_weight).values())


def test_a_weight_that_was_converted_in_inference_mode_serves_in_training():
    layer, x = layer_of(fused()), rows(3)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.inference_mode():
            layer(x.detach())
        layer(x).sum().backward()
    assert x.grad is not None


# --- PEFT's way -------------------------------------------------------------------------------------------------------

NEVER = {
    "dropout": {"lora_dropout": 0.5},
    "DoRA": {"use_dora": True},
    "a bias of B": {"lora_bias": True},
    "a bias that is trained": {"bias": "all"},
}


@pytest.mark.parametrize("case", NEVER)
def test_layers_of_another_kind_are_left_as_they_are(case):
    model = adapted(True, **NEVER[case])
    assert fuse(model) == 0 and type(layer_of(model)) is Linear


def merge(model):
    model.merge_adapter()


def disable(model):
    model.base_model.disable_adapter_layers()


def activate_two(model):
    model.add_adapter("second", config_of(r=2))
    stir(model)
    model.base_model.set_adapter(["default", "second"])


def activate_dropout(model):
    model.add_adapter("second", config_of(lora_dropout=0.5))
    stir(model)
    model.set_adapter("second")


def train_base(model):
    layer_of(model).base_layer.weight.requires_grad_(True)


def hook(module):
    module.register_forward_hook(lambda module, given, output: 3 * output)


def own_forward(model):
    base = layer_of(model).base_layer
    base.forward = lambda x: 2 * functional.linear(x, base.weight)


class Sharded(nn.Parameter):
    """A weight of a class of its own, as those that are quantised or distributed have."""


def weight_of_another_class(model):
    base = layer_of(model).base_layer
    base.weight = Sharded(base.weight.data, requires_grad=False)


LATER = {
    "merged": merge,
    "disabled": disable,
    "two adapters": activate_two,
    "another adapter, with dropout": activate_dropout,
    "a base weight that is trained": train_base,
    "a hook of the base": lambda model: hook(layer_of(model).base_layer),
    "a hook of A": lambda model: hook(layer_of(model).lora_A["default"]),
    "a hook of no dropout": lambda model: hook(layer_of(model).lora_dropout["default"]),
    "a forward of the base's own": own_forward,
    "a weight of another class": weight_of_another_class,
}


@pytest.mark.parametrize("case", LATER)
def test_a_layer_that_becomes_another_goes_pefts_way_from_then_on(case, peft_calls):
    model, unfused, x = fused(), adapted(), rows(3, 5)
    for each in (model, unfused):
        torch.manual_seed(5)
        LATER[case](each)
    got, wanted = [], []
    for each, found in ((model, got), (unfused, wanted)):
        torch.manual_seed(6)  # for dropout
        found.append(each(x).detach())
    assert torch.equal(got[0], wanted[0])
    assert peft_calls == [layer_of(model), layer_of(unfused)]
    assert fuse(unfused) == 0 and type(layer_of(unfused)) is Linear


def test_merged_and_disabled_layers_come_back(peft_calls):
    model, x = fused(), rows(4)
    base = functional.linear(x, layer_of(model).base_layer.weight)
    before = model(x)
    with model.disable_adapter():
        assert torch.equal(model(x), base)
    model.merge_adapter()
    assert largest_relative(model(x), before) < RELATIVE
    model.unmerge_adapter()
    peft_calls.clear()
    assert largest_relative(model(x), before) < RELATIVE and not peft_calls


def test_adapters_that_are_named_for_each_row_go_pefts_way():
    model = fused()
    model.eval()
    x = rows(2)
    got = layer_of(model)(x, adapter_names=["__base__", "default"])
    assert torch.equal(got[0], functional.linear(x, layer_of(model).base_layer.weight)[0])
    assert largest_relative(got[1], exact(layer_of(model), x, 1.5)["y"][1]) < RELATIVE


def test_another_plain_adapter_is_fused_once_it_is_the_active_one(peft_calls):
    model, x = fused(), rows(4)
    model.add_adapter("second", config_of(r=2, lora_alpha=1))
    stir(model)
    model.set_adapter("second")
    got = model(x)
    assert not peft_calls
    assert largest_relative(got, Linear.forward(layer_of(model), x)) < RELATIVE


def test_float64_under_autocast_and_rows_of_another_width_get_pefts_answer():
    layer = layer_of(fused())
    with pytest.raises(RuntimeError, match=f"3x7 and {WIDTH}x{OUT}"):
        layer(torch.zeros(3, 7))
    layer.double()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(rows(3).double()).dtype == torch.float64


def test_on_a_device_without_numbers_shapes_are_pefts(peft_calls):
    model = fused().to("meta")
    assert model(torch.zeros(3, WIDTH, device="meta")).shape == (3, OUT) and peft_calls == [layer_of(model)]


# --- the product ------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked_anew():
    fused_lora._onednn.cache_clear()
    yield
    fused_lora._onednn.cache_clear()


@pytest.mark.parametrize(("count", "width", "out"), [(1, 3, 2), (8, 448, 1216), (504, 100, 16), (130, 16, 448)])
@pytest.mark.parametrize("biased", [False, True])
def test_both_ways_to_multiply_give_the_same(count, width, out, biased):
    torch.manual_seed(7)
    x, weight, bias = torch.randn(count, width), torch.randn(out, width), torch.randn(out) if biased else None
    wanted = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for turned in (weight, weight.t().contiguous().t()):
        got, plain = product(x, turned, bias), functional.linear(x, turned, bias)
        assert largest_relative(got, plain) < RELATIVE and largest_relative(got, wanted) < RELATIVE


def failing(*given):
    raise RuntimeError("could not create a primitive")


def wrong(x, weight, *given):
    return torch.zeros(len(x), len(weight))


@pytest.mark.parametrize("operator", [failing, wrong])
def test_without_an_operator_that_works_the_plain_product_is_taken_and_it_is_tried_once(
    operator, asked_anew, monkeypatch
):
    tries = []

    def tried(*given):
        tries.append(operator)
        return operator(*given)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", tried)
    x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0], [-1.0, 0.0]])
    for _ in range(3):
        assert product(x, weight).tolist() == [[11.0, 17.0, -1.0]]
    assert tries == [operator]


# --- a model ----------------------------------------------------------------------------------------------------------


def policy_of(folder, *, fusing):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(8)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = stir(get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=names)))
    if fusing:
        assert fuse(model) == len(names) * model.config.num_hidden_layers
        assert fuse(model) == len(names) * model.config.num_hidden_layers  # those that are so already
    return model


def trained_three_steps(model, **options):
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS, **options).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "checkpointing", [None, False, True], ids=["plain", "checkpointing", "reentrant checkpointing"]
)
def test_three_steps_of_training_are_those_of_peft(tiny_model, checkpointing):
    models = [policy_of(tiny_model, fusing=fusing) for fusing in (True, False)]
    start = {name: each.clone() for name, each in models[0].named_parameters()}
    for model in models:
        model.train()
        if checkpointing is not None:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    got, wanted = (trained_three_steps(model, use_cache=False) for model in models)
    assert all(math.isclose(*pair, rel_tol=RELATIVE) for pair in zip(got, wanted, strict=True))
    for (name, mine), (_, other) in zip(models[0].named_parameters(), models[1].named_parameters(), strict=True):
        assert largest_relative(mine, other) < RELATIVE, name
        assert torch.equal(mine, start[name]) == (not mine.requires_grad), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_step_under_autocast_with_checkpointing_is_the_one_without(tiny_model, reentrant):
    plain, checkpointed = (policy_of(tiny_model, fusing=True) for _ in range(2))
    checkpointed.train()
    checkpointed.enable_input_require_grads()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for model in (plain, checkpointed):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
    pairs = zip(plain.named_parameters(), checkpointed.parameters(), strict=True)
    gradients = [(name, one.grad, other.grad) for (name, one), other in pairs if one.requires_grad]
    assert gradients and all(largest_relative(one, other) < RELATIVE for _, one, other in gradients)


def test_a_saved_adapter_is_that_of_pefts_layers_byte_for_byte(tiny_model, tmp_path):
    for name, fusing in (("fused", True), ("peft", False)):
        policy_of(tiny_model, fusing=fusing).save_pretrained(tmp_path / name)
    names = sorted(path.name for path in (tmp_path / "peft").iterdir())
    assert (
        names == sorted(path.name for path in (tmp_path / "fused").iterdir()) and "adapter_model.safetensors" in names
    )
    for name in names:
        assert (tmp_path / "fused" / name).read_bytes() == (tmp_path / "peft" / name).read_bytes(), name


@pytest.mark.parametrize(("precision", "tolerance"), [("own", RELATIVE), ("bfloat16", 0.05)])
def test_a_sampling_model_over_a_fused_policy_samples_as_the_policy_does(tiny_model, precision, tolerance):
    model = policy_of(tiny_model, fusing=True)
    model.eval()
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
        with torch.autocast("cpu", torch.bfloat16):
            model(input_ids=IDS)  # leaves weights in fewer bits behind
        model.merge_adapter(safe_merge=True)
        sampling = SamplingModel(model.base_model.model, precision)
        assert not any(isinstance(each, FusedLinear | LowWeight) for each in sampling.model.modules())
        got = sampling.model(input_ids=IDS).logits
        model.unmerge_adapter()
        assert largest_relative(model(input_ids=IDS).logits, wanted) < RELATIVE
    assert largest_relative(got, wanted) < tolerance


def test_a_copy_of_a_fused_model_is_fused_and_its_own(tiny_model):
    model = policy_of(tiny_model, fusing=True)
    twin = copy.deepcopy(model)
    assert fuse(twin) == fuse(model) > 0
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
        wanted = policy_of(tiny_model, fusing=False)(input_ids=IDS).logits
        assert largest_relative(twin(input_ids=IDS).logits, wanted) < RELATIVE


def test_merging_for_good_gives_the_model_that_the_adapter_made(tiny_model):
    model = policy_of(tiny_model, fusing=True)
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
        merged = model.merge_and_unload()
        assert not any(isinstance(each, Linear) for each in merged.modules())
        assert largest_relative(merged(input_ids=IDS).logits, wanted) < RELATIVE
