"""Tokens per second of ours beside those of transformers, OpenVINO GenAI and llama.cpp, on real sizes, in one run.

    python -m eval.peers --output eval/results/peers --work WORK

Each peer is a script with an environment of its own (`scripts/`), which loads a model and then answers prompts that it
reads as lines of JSON. All systems of a size take turns, round after round, with the same token ids and threads.
"""
