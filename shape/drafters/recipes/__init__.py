"""Recipe packs: what the target writes again and again on a task, looked up without a model."""
