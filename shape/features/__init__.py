"""The hidden states that a drafter learns from: extracted, stored, read back, and what that costs."""
