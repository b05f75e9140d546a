"""Kernels as a Hopper GPU would run them, compiled without one: which instructions, and of `exact` in which order.

What makes bits equal there cannot be seen through the interpreter: that every tile multiplies by wgmma, and that attention over
slots and over rows of q, k and v is the same arithmetic. Without asynchronous copies a product would be slow, and so
would kernels on aligned rows that move one number at a time.
"""

import os
import re
import subprocess
import sys

import pytest

COMPILE = """
import json
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from strop.models import exact as attention
from strop.models.layer_kernels import gate_bwd_kernel
from strop.ops import exact as products
from strop.ops.rows.divergence_kernel import divergence_kernel

def ptx(launcher, pointers, numbers, num_warps, constants, aligned=False):
    names = launcher.jitted.arg_names
    kinds = dict(zip(names, ["*" + kind for kind in pointers])) | numbers | dict.fromkeys(constants, "constexpr")
    attrs = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))} if aligned else {}
    signature = {name: kinds[name] for name in names}
    source = ASTSource(fn=launcher.jitted, signature=signature, constexprs=constants, attrs=attrs)
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": num_warps, "enable_fp_fusion": True}
    return triton.compile(source, target=target, options=options).asm["ptx"]

found = {"products": [], "attention": [], "rows": []}
found["rows"].append(ptx(gate_bwd_kernel, ["bf16"] * 3, {}, 4, dict(F=4864, BLOCK=1024), aligned=True))
numbers = dict.fromkeys(("cooled", "beta", "log_beta", "log_rest"), "fp32")
constants = dict(V=32768, FORWARD=False, REVERSE=True, GRADIENT=True, LANES=512, PER=8)
found["rows"].append(ptx(divergence_kernel, ["bf16", "bf16", "fp32", "fp32"], numbers, 16, constants, aligned=True))
block_k, tiles = products.TILES[None]
for block_m, block_n, warps, stages in tiles:
    constants = dict(K=896, N=1152, Y_STRIDE=1152, BIAS=True, ONTO=False, PRECISION="tf32", GROUP=8, BLOCK_M=block_m,
                     BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages)
    found["products"].append(ptx(products.product_kernel, ["bf16"] * 5, {"M": "i32"}, warps, constants))
numbers = {"num_sequences": "i32", "layer": "i32", "window": "i32", "scale": "fp32"}
for table in (False, True):
    constants = dict(TABLE=table, Q_STRIDE=1152, KV_STRIDE=128 if table else 1152, HEADS=2, R=7, D=64, WINDOW=False,
                     PRECISION="tf32", BLOCK_M=attention.BLOCK_M, BLOCK_S=attention.BLOCK_S, BLOCK_D=64)
    pointers = ["bf16"] * 4 + ["i64" if table else "i32"] + ["i32"] * 6
    found["attention"].append(ptx(attention.attend_kernel, pointers, numbers, attention.WARPS, constants))
json.dump(found, sys.stdout)
"""


@pytest.mark.slow
def test_one_kind_of_product_one_arithmetic_of_attention_and_16_bytes_at_a_time(tmp_path):
    import json

    triton = pytest.importorskip("triton")
    if not (triton.knobs.nvidia.ptxas and triton.knobs.nvidia.ptxas.path):
        pytest.skip("needs ptxas")
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    (tmp_path / "compile.py").write_text(COMPILE, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, tmp_path / "compile.py"], env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    for ptx in (*found["products"], *found["attention"]):
        products = set(re.findall(r"(?:wgmma\.)?mma(?:_async)?\.sync[\w.]*", ptx))
        assert products
        assert all(
            re.fullmatch(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16", one) for one in products
        )
        assert "cp.async.cg.shared.global" in ptx
    for ptx in found["rows"]:
        assert "ld.global.v4" in ptx
        assert "st.global.v4" in ptx
        assert not re.search(r"(?:ld|st)\.global\.b16", ptx)
    kinds = r"\b(?:wgmma\.mma|ex2|fma|mul\.f32|add\.f32|sub\.f32|max\.f32|div|shfl|mul\.rn|add\.rn|sub\.rn)"
    arithmetic = [
        [re.sub(r"%\w+", "r", line) for line in ptx.splitlines() if re.search(kinds, line)]
        for ptx in found["attention"]
    ]
    assert len(arithmetic[0]) > 100
    assert arithmetic[0] == arithmetic[1]
