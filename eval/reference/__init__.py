"""Reference implementations, run in environments of their own: what they compute is kept for the tests."""
