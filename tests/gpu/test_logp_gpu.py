"""logp on a GPU: the values of the CPU's float64, and what differs there by contract."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from strop.ops import logp, registry  # noqa: E402 (after the skip)

pytestmark = pytest.mark.gpu


@pytest.fixture(params=registry.backends("logp"))
def backend(request):
    with registry.use_backend(logp=request.param):
        yield request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_float64(backend, dtype):
    torch.manual_seed(0)
    logits = (torch.randn(64, 8003, device="cuda") * 3).to(dtype).requires_grad_()
    ids = torch.randint(0, 8003, (64,), device="cuda")
    exact = logits.detach().double().cpu().requires_grad_()
    found, entropy = logp(logits, ids, entropy=True)
    with registry.use_backend(logp="torch"):
        expected, expected_entropy = logp(exact, ids.cpu(), entropy=True)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(entropy.double().cpu(), expected_entropy, rtol=1e-6, atol=1e-5)
    (found.sum() + 0.1 * entropy.sum()).backward()
    (expected.sum() + 0.1 * expected_entropy.sum()).backward()
    # the gradient is rounded to the dtype once: at most to the neighbour of the exact one
    torch.testing.assert_close(
        logits.grad.cpu(), exact.grad.to(dtype), rtol=max(1e-5, torch.finfo(dtype).eps), atol=1e-6
    )


def test_an_id_outside_the_vocabulary_is_nan_or_raises(backend):
    logits = torch.zeros(3, 8, device="cuda", requires_grad=True)
    ids = torch.tensor([1, 8, -100], device="cuda")
    found = logp(logits, ids, completion_mask=torch.tensor([1, 1, 0], device="cuda"))
    assert found.isnan().tolist() == [False, True, False]
    with pytest.raises(ValueError, match=r"ids must be from 0 to 7, found 8 at index \[1\]"):
        logp(logits, ids, completion_mask=torch.tensor([1, 1, 0], device="cuda"), validate=True)
