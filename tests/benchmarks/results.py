"""Results made by hand, with what every result has."""

COMMON = {
    "schema": 1, "command": "strop bench x", "created": "2026-11-15T00:00:00+00:00",
    "commit": {"id": "0123456789abcdef", "clean": True}, "versions": {"numpy": "2.4"},
    "machine": {"cpu": "A CPU", "cores": 2, "instruction_set": "avx2"},
    "threads": {"usable_cpus": 2, "strop": 2, "torch": 2, "blas": 1}, "method": {"rounds": 21, "confidence": 0.95},
    "load_by_others": 0.04,
}  # fmt: skip
RATIO = {"value": 6.5, "low": 6.0, "high": 7.0, "verdict": "faster"}


def result_of(*cases, **more):
    return {**COMMON, "cases": list(cases), **more}
