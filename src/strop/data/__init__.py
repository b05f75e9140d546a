"""Data: rows in TRL's formats from files, lists and `datasets`, their token ids, and training batches."""
