"""The algorithms, one small file each: `strop.algorithms.dpo.DPO` and so on.

They share `strop.training.trainer.Trainer`.
"""
