"""The algorithms, one small file each: `strop.algorithms.dpo.DPO` and so on. `strop.training.trainer.Trainer` is what they share."""
