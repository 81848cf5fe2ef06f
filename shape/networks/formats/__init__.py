"""Checkpoints of other packages: one file for each family of drafters, `table` lists the formats."""
