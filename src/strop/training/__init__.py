"""The parts of training that all algorithms share: trainer, run, optimiser, checkpoints, callbacks, loggers."""
