"""What reproduces the paper and our tables: run from the root of the repository, as `python -m eval.NAME`."""
