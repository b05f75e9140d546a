"""The algorithms, one small file each: `strop.algorithms.dpo.DPO` and so on. `trainer.Trainer` is what they share."""
