import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton's kernels are made: they then run on the CPU
# some virtual machines announce AMX and then refuse it: a bfloat16 product would end the process
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
