"""A program for each peer, run as `python -m eval.peers.scripts.NAME` by the Python of its own environment."""
