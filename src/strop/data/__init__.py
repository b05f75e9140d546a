"""Data: rows of TRL's formats from files, lists and `datasets`, their token ids, and training batches of them."""
