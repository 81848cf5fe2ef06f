"""Data that the tests of training share."""

from pathlib import Path

import pytest
from training_runs import write_conversations


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("data") / "talks.jsonl")
