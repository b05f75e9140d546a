import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton's kernels are made: they then run on the CPU
