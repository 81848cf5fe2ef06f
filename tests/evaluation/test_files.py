"""Figures as text."""

import json

import pytest

from shape.evaluation.files import json_by_line


@pytest.mark.parametrize("records", [[], [{"a": [1, 2]}, {"a": [], "b": {"c": None}}]])
def test_json_with_a_record_on_each_line(records):
    head = {"label": "two\nlines", "of": {"x": 1.5}}
    text = json_by_line(head, "records", iter(records))
    assert json.loads(text) == {**head, "records": records}
    assert text.splitlines().count("]}") == 1 and all(json.dumps(one) in text for one in records)
