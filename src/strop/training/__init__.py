"""Training whatever the algorithm: trainer, run, optimiser, checkpoints, callbacks, loggers."""
