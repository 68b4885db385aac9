"""Log-probabilities, entropies and gradients at the head are those of the plain computation."""

import pytest
import torch
from torch import nn

from praison_agent_rl.training import head_scores
from praison_agent_rl.training.fused_lora import LowWeight
from praison_agent_rl.training.head_scores import is_frozen, scores_of


def head_of(width: int, vocabulary: int, *, bias: bool) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(width, vocabulary, bias=bias).requires_grad_(False)


def plainly(states, head, targets, temperature):
    """In float64, from the definition."""
    bias = 0 if head.bias is None else head.bias.double()
    logits = (states.double() @ head.weight.double().t() + bias) / temperature
    log_shares = logits.log_softmax(-1)
    entropy = -(log_shares.exp() * log_shares).sum(-1)
    return log_shares.gather(1, targets[:, None])[:, 0], entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("at_once", [2**24, 100, 1])
def test_scores_and_gradients_are_those_of_the_definition(temperature, bias, at_once, monkeypatch):
    monkeypatch.setattr(head_scores, "_LOGITS_AT_ONCE", at_once)
    head = head_of(12, 40, bias=bias)
    torch.manual_seed(2)
    states, targets, moved = 3 * torch.randn(9, 12), torch.randint(40, (9,)), torch.randn(9)
    ours, reference = states.clone().requires_grad_(), states.double().requires_grad_()
    log_probs, entropy = scores_of(ours, head, targets, temperature=temperature, low=LowWeight())
    wanted, wanted_entropy = plainly(reference, head, targets, temperature)
    assert torch.allclose(log_probs.double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.allclose(entropy.double(), wanted_entropy, rtol=1e-5, atol=1e-5)
    assert not entropy.requires_grad
    (log_probs * moved).sum().backward()
    (wanted * moved.double()).sum().backward()
    assert torch.allclose(ours.grad.double(), reference.grad, rtol=1e-4, atol=1e-6)


def test_one_token_by_hand():
    # logits 0 and ln 3, so shares 1/4 and 3/4: log-probability ln(3/4), entropy ln 4 - 3/4 ln 3,
    # and the gradient by the state (1, 0) is W[1] - (W[0] + 3 W[1]) / 4
    head = nn.Linear(2, 2, bias=False)
    weight = torch.tensor([[0.0, 4.0], [1.0986123, 8.0]])
    head.weight = nn.Parameter(weight, requires_grad=False)
    states = torch.tensor([[1.0, 0.0]], requires_grad=True)
    log_probs, entropy = scores_of(states, head, torch.tensor([1]), temperature=1.0, low=LowWeight())
    assert log_probs.item() == pytest.approx(-0.2876821, abs=1e-6)
    assert entropy.item() == pytest.approx(1.3862944 - 0.75 * 1.0986123, abs=1e-6)
    log_probs.sum().backward()
    assert states.grad.tolist()[0] == pytest.approx([0.25 * 1.0986123, 1.0], abs=1e-6)


def test_far_apart_logits_make_no_infinity():
    head = head_of(4, 6, bias=False)
    states = (1e4 * torch.randn(3, 4, generator=torch.Generator().manual_seed(0))).requires_grad_()
    log_probs, entropy = scores_of(states, head, torch.tensor([0, 1, 2]), temperature=1.0, low=LowWeight())
    log_probs.sum().backward()
    assert log_probs.isfinite().all() and entropy.isfinite().all() and states.grad.isfinite().all()
    assert (entropy >= -1e-6).all()


def test_in_bfloat16_it_errs_no_more_than_the_plain_computation_in_bfloat16():
    head = head_of(64, 300, bias=False)
    torch.manual_seed(4)
    states, targets = torch.randn(50, 64), torch.randint(300, (50,))
    exact, _ = plainly(states, head, targets, 1.0)
    low = LowWeight()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = states.clone().requires_grad_()
        log_probs, _ = scores_of(ours, head, targets, temperature=1.0, low=low)
        theirs = states.clone().requires_grad_()
        plain = head(theirs).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert log_probs.dtype == torch.float32
    assert (log_probs - exact).abs().mean() <= 1.5 * (plain - exact).abs().mean()
    log_probs.sum().backward()
    plain.sum().backward()
    reference = states.double().requires_grad_()
    plainly(reference, head, targets, 1.0)[0].sum().backward()
    assert (ours.grad - reference.grad).abs().mean() <= 1.5 * (theirs.grad - reference.grad).abs().mean()


def test_a_head_that_is_trained_or_no_linear_layer_is_left_to_trl():
    assert is_frozen(head_of(4, 6, bias=True))
    assert not is_frozen(nn.Linear(4, 6)) and not is_frozen(nn.Identity())
