"""What tells data sets apart."""

from regenerated import chat

from shape.data.conversations import Conversation, fingerprint
from shape.target.chat import Message


def test_fingerprint_sees_every_part():
    base = chat("q", "a")
    others = [
        chat("q", "b"),
        chat("qa", ""),
        Conversation("d", base.messages),
        Conversation("c", base.messages, "completion"),
        Conversation("c", (base.messages[0], Message("assistant", "a", finished=False))),
    ]
    prints = [fingerprint([c]) for c in [base, *others]] + [fingerprint([base, base]), fingerprint([])]
    assert len(set(prints)) == len(prints)
    assert fingerprint([base, others[0]]) != fingerprint([others[0], base])
    assert fingerprint([base]) == fingerprint([chat("q", "a")])
