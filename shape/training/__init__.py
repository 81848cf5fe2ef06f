"""Training a drafter: options, batches, losses, the Lightning module, validation by decoding, the run."""
