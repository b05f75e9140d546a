"""The benchmark harness, its suites, and the documents made from their results."""
