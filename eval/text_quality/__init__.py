"""What `eval.quality` is made of: running code, comparing texts, right answers, results."""
