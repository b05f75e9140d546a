"""The suites by name. A suite module has `cases() -> list[Case]`."""

SUITES = {"primitives": "advantages, KL and packing on the CPU against NumPy, torch and rlox"}
