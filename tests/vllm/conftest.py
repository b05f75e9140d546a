"""These tests need a vLLM of their own, which `make test-vllm` sets up and names in STROP_VLLM; else they are not there."""

import os

collect_ignore_glob = [] if os.environ.get("STROP_VLLM") else ["test_*.py"]
