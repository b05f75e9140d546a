"""Triton's interpreter in less time.

It replaces every function of its language before each call of a jitted function, also where a kernel calls one, and puts
them back after a launch: once per launch and module does the same. It makes its table of NumPy's types at every look at it.
And it computes for every sum of integers whether it overflows, which nobody reads without its debug mode.
"""

import dataclasses

import numpy as np


def sum_dots_in_one_order(monkeypatch):
    """Make every row of a tile's product the same sum, wherever the row stands in the tile, as it is on a GPU.

    NumPy's matrix product calls BLAS, and on some CPUs BLAS adds up the last rows of a tile in another order than the first.
    """
    from triton.runtime import interpreter

    def create_dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
        with np.errstate(invalid="ignore"):  # a masked row may hold anything
            products = np.multiply(a.data[..., :, :, None], b.data[..., None, :, :], dtype=d.data.dtype)
            return interpreter.TensorHandle(products.sum(-2) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def hasten():
    try:
        from triton.runtime import interpreter
    except ImportError:  # without torch there is nothing to run
        return
    patch, launch, np_dtype = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype
    patched, np_dtypes = set(), {}

    def patch_lang(function):
        if id(function.__globals__) in patched:
            return None  # a kernel's call, which leaves what it replaced to the launch
        patched.add(id(function.__globals__))
        return patch(function)

    def call(self, *arguments, **options):
        patched.clear()
        return launch(self, *arguments, **options)

    def get_np_dtype(dtype):
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = np_dtype(dtype)
        return np_dtypes[dtype.name]

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call
    interpreter._get_np_dtype = get_np_dtype
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
