"""What renders the tables and figures of this repository's documents from `results/`; no part of the installed package."""
