"""The registry on operators made for the test: which backend runs, and what is said when none can."""

import concurrent.futures
import copy
import pickle

import numpy as np
import pytest
import torch

from strop.ops import registry


@pytest.fixture
def double(monkeypatch):
    """An operator of its own with a reference and a backend for positive numbers."""
    monkeypatch.setattr(registry, "_ops", dict(registry._ops))
    monkeypatch.delenv("STROP_BACKEND", raising=False)

    @registry.op
    def double(x, *, bias=0):
        """Twice x."""
        return "torch", 2 * x + bias

    @double.backend("fast", when=lambda x, *, bias=0: x > 0 or f"x must be positive, found {x}")
    def _(x, *, bias=0):
        return "fast", 2 * x + bias

    return double


def test_every_call_chooses_by_its_arguments(double):
    assert double(3) == ("fast", 6)
    assert double(-3) == ("torch", -6)
    assert double(-3, bias=1) == ("torch", -5)
    assert registry.get_op("double") is double
    assert registry.backends("double") == ["fast", "torch"]


def test_an_operator_looks_like_its_reference(double):
    assert double.__doc__ == "Twice x."
    assert double.__name__ == "double"
    assert repr(double) == "<operator double: fast, torch>"


def test_use_backend_nests_and_ends(double):
    with registry.use_backend("torch"):
        assert double(3) == ("torch", 6)
        with registry.use_backend(double="fast"):
            assert double(3) == ("fast", 6)
        assert double(3) == ("torch", 6)
    assert double(3) == ("fast", 6)
    with pytest.raises(ZeroDivisionError), registry.use_backend("torch"):
        raise ZeroDivisionError
    assert double(3) == ("fast", 6)


def test_an_inner_use_backend_overrides_an_outer_one(double):
    with registry.use_backend(double="fast"), registry.use_backend("torch"):
        assert double(3) == ("torch", 6)


def test_use_backend_holds_for_its_own_thread_only(double):
    with registry.use_backend("torch"), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(double, 3).result() == ("fast", 6)


def test_environment(double, monkeypatch):
    monkeypatch.setenv("STROP_BACKEND", "torch")
    assert double(3) == ("torch", 6)
    with registry.use_backend(double="fast"):
        assert double(3) == ("fast", 6)
    monkeypatch.setenv("STROP_BACKEND", "logp=torch, double=fast")
    assert double(3) == ("fast", 6)
    with pytest.raises(
        RuntimeError, match="STROP_BACKEND asks for backend 'fast' of double, which cannot run: x must be"
    ):
        double(-3)
    monkeypatch.setenv("STROP_BACKEND", "cuda")
    with pytest.raises(ValueError, match="STROP_BACKEND asks for backend 'cuda'; double has fast, torch"):
        double(3)
    monkeypatch.setenv("STROP_BACKEND", "duoble=torch")
    with pytest.raises(ValueError, match="STROP_BACKEND names an unknown operator 'duoble'; there are double, grpo"):
        double(3)


def test_a_backend_asked_for_by_name_runs_or_raises(double):
    with (
        registry.use_backend("fast"),
        pytest.raises(RuntimeError, match="use_backend asks for backend 'fast' of double, which cannot run: x must be"),
    ):
        double(-3)
    with (
        pytest.raises(ValueError, match="unknown backend 'fsat'; there are chunked, exact, fast, torch, triton"),
        registry.use_backend("fsat"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="unknown backend 'x'; double has fast, torch"),
        registry.use_backend(double="x"),
    ):
        pass
    with pytest.raises(ValueError, match="unknown operator 'nope'; there are double, grpo_loss"):
        registry.get_op("nope")


def test_an_error_in_a_kernel_is_not_hidden_by_a_fallback(double):
    def broken(x, *, bias=0):
        raise ArithmeticError("the kernel failed")

    registry.register("double", "broken", broken)
    with pytest.raises(ArithmeticError, match="the kernel failed"):
        double(3)


def test_explain(double):
    assert str(registry.explain("double", 3)) == (
        "double: fast\n  fast   chosen: the first that can run\n  torch  not chosen: fast comes first"
    )
    found = registry.explain("double", -3)
    assert found.chosen == "torch"
    assert found.reasons["fast"] == "cannot run: x must be positive, found -3"
    with registry.use_backend("torch"):
        found = registry.explain("double", 3)
    assert found.reasons == {
        "fast": "not chosen: use_backend asks for torch",
        "torch": "chosen: asked for by use_backend",
    }


def test_registration_is_checked(double):
    with pytest.raises(ValueError, match="double has a backend 'fast' already"):
        registry.register("double", "fast", lambda x, *, bias=0: x)
    with pytest.raises(ValueError, match=r"a backend of double must take \(x, \*, bias=0\), found \(y\)"):
        registry.register("double", "other", lambda y: y)
    registry.register("double", "fast", lambda x, *, bias=0: "replaced", replace=True)
    assert double(3) == "replaced"
    with pytest.raises(ValueError, match="an operator 'double' exists already"):
        registry.op(double._backends["torch"].function)


def test_a_backend_keeps_kinds_and_defaults(double):
    with pytest.raises(ValueError, match=r"must take \(x, \*, bias=0\), found \(x, \*, bias=9\)"):
        registry.register("double", "other", lambda x, *, bias=9: x)
    with pytest.raises(ValueError, match="the reference 'torch' of double is what others are tested against and stays"):
        registry.register("double", "torch", lambda x, *, bias=0: x, replace=True)


@pytest.mark.parametrize("true", [1, np.bool_(True), torch.tensor(True)])
def test_a_condition_may_return_any_true_value(double, true):
    registry.register("double", "newest", lambda x, *, bias=0: "newest", when=lambda x, *, bias=0: true)
    assert double(3) == "newest"


def test_a_call_with_wrong_arguments_is_a_type_error(double):
    with pytest.raises(TypeError, match=r"^double: missing a required argument: 'x'"):
        double()
    with pytest.raises(TypeError, match=r"^double: got an unexpected keyword argument 'bais'"):
        double(3, bais=1)
    for name, option in (("grpo_loss", "bta"), ("linear_dpo_loss", "label_smothing")):
        with pytest.raises(TypeError, match=rf"^{name}: got an unexpected keyword argument '{option}'"):
            registry.get_op(name)(*[None] * (6 if name == "grpo_loss" else 4), **{option: 0.1})


def test_copies_and_pickles_are_the_operator_itself():
    assert pickle.loads(pickle.dumps(registry.get_op("logp"))) is registry.get_op("logp")
    assert copy.deepcopy(registry.get_op("logp")) is registry.get_op("logp")


@pytest.mark.parametrize("setting", ["logp=", "torch,mine", "logp=torch,logp=mine", "=torch"])
def test_invalid_settings_are_refused(double, monkeypatch, setting):
    monkeypatch.setenv("STROP_BACKEND", setting)
    with pytest.raises(ValueError, match=r"STROP_BACKEND must be a backend or op=backend"):
        double(3)
