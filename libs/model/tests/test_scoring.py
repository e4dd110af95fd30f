"""Log-probs and entropies in chunks against all logits at once."""

import pytest
import torch
from torch import Tensor

from reflux_model import scoring
from reflux_model.scoring import chunked_scores

TOKENS, WIDTH, VOCABULARY = 37, 8, 101


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return hidden, weight, targets, torch.randn(TOKENS, generator=generator)


@pytest.mark.parametrize("kept", [0, 5 * VOCABULARY, 1 << 20])
@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_size_of_chunk_gives_scores_and_gradients_of_the_plain_formula(
    kept: int, rows: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", rows * VOCABULARY)
    monkeypatch.setattr(scoring, "KEPT_LOGITS", kept)
    hidden, weight, targets, slopes = _inputs()
    scores = chunked_scores(hidden, weight, targets, temperature)
    (scores.logprobs_T * slopes).sum().backward()
    got = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    plain = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    chosen = plain.gather(-1, targets[:, None])[:, 0]
    (chosen * slopes).sum().backward()
    torch.testing.assert_close(scores.logprobs_T, chosen, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropies_T, -(plain.exp() * plain).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[0], hidden.grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got[1], weight.grad, atol=1e-5, rtol=1e-4)
    assert not scores.entropies_T.requires_grad


def test_only_what_wants_a_gradient_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", 4 * VOCABULARY)
    hidden, weight, targets, slopes = _inputs()
    (chunked_scores(hidden, weight.detach(), targets).logprobs_T * slopes).sum().backward()
    (chunked_scores(hidden.detach(), weight, targets).logprobs_T * slopes).sum().backward()
    frozen = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    (chunked_scores(hidden, weight, targets).logprobs_T * slopes).sum().backward()
    assert torch.equal(frozen[0], hidden.grad)  # type: ignore[arg-type]
    assert torch.equal(frozen[1], weight.grad)  # type: ignore[arg-type]


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, targets, _ = _inputs()
    scores = chunked_scores(1e4 * hidden.detach(), weight.detach(), targets)
    assert torch.isfinite(scores.logprobs_T).all()
    assert (scores.entropies_T >= -1e-3).all()


def test_bfloat16_reduces_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, slopes = _inputs(torch.bfloat16)
    whole = chunked_scores(hidden, weight, targets)
    assert whole.logprobs_T.dtype == torch.float32
    (whole.logprobs_T * slopes).sum().backward()
    expected = weight.grad
    weight.grad = None
    monkeypatch.setattr(scoring, "CHUNK_LOGITS", VOCABULARY)
    (chunked_scores(hidden, weight, targets).logprobs_T * slopes).sum().backward()
    torch.testing.assert_close(weight.grad, expected, atol=2e-2, rtol=2e-2)
