"""Every answer the target's own, in fixed batches, through SIGKILL and by several processes."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock
from regenerated import Echo, conversation_of, many, messages_by_id
from training_runs import extraction_trainer

from shape import files
from shape.data.backends import Answer
from shape.data.conversations import Conversation
from shape.data.encoding import encode
from shape.data.journal import AnswerJournal
from shape.data.options import AnswerOptions
from shape.data.reading import load_conversations
from shape.data.regeneration import Share, Summary, answers_file, own_answers, regenerate
from shape.errors import ConfigError, DataError
from shape.target.chat import Message


def test_answers_replace_turns_in_order_and_feed_the_next(tmp_path):
    conversations = [
        Conversation("s", (Message("system", "S"), *conversation_of("", "one", "two").messages)),
        Conversation("asked only", (Message("user", "one"), Message("user", "two"))),
        Conversation("pair", (Message("user", "prompt"), Message("assistant", "x")), "completion"),
        Conversation("begins with an answer", (Message("assistant", "hi"), Message("user", "one"))),
    ]
    backend = Echo()
    done = regenerate(conversations, backend, tmp_path / "out.jsonl", AnswerOptions(sampled_share=0.0), progress=False)
    rows = {c.id: c for c in load_conversations(tmp_path / "out.jsonl")}
    assert list(rows) == [c.id for c in conversations]
    assert [m.role for m in rows["s"].messages] == ["system", "user", "assistant", "user", "assistant"]
    assert rows["s"].messages[2].content.startswith("2:one:False:")
    assert rows["s"].messages[4].content.startswith("4:two:False:")
    assert [m.role for m in rows["asked only"].messages] == ["user", "assistant", "user", "assistant"]
    assert rows["pair"].kind == "completion" and rows["pair"].messages[1].content.startswith("1:prompt:")
    assert [m.role for m in rows["begins with an answer"].messages] == ["user", "assistant"]
    assert any(request.prompt == "prompt" for batch in backend.batches for request in batch)
    assert (done.rows, done.questions, done.answers, done.unfinished, done.left_out) == (4, 6, 6, 0, 0)


def test_a_cut_answer_ends_its_conversation_and_is_marked(tmp_path, tiny_tokenizer):
    asked = {"a": ["one", "cut", "three"], "b": ["long"], "c": ["one", "long"]}
    conversations = [conversation_of(name, *questions) for name, questions in asked.items()]
    with pytest.warns(UserWarning, match=r"2 conversations end early or are left out \(the first: b: too long"):
        done = regenerate(conversations, Echo(), tmp_path / "out.jsonl", progress=False)
    assert (done.rows, done.left_out, done.questions, done.answers, done.unfinished) == (2, 1, 6, 3, 1)
    a, c = load_conversations(tmp_path / "out.jsonl")
    assert [m.finished for m in a.messages] == [True, True, True, False] and len(c.messages) == 2
    encoded = encode(a, tiny_tokenizer, None)
    kept = tiny_tokenizer.decode(encoded.input_ids[encoded.loss_mask])
    assert kept == f"{a.messages[1].content}<|im_end|>{a.messages[3].content}"  # no made-up end


def test_kind_and_noise_depend_on_seed_and_id_alone(tmp_path):
    def kinds(conversations, name, **options):
        regenerate(conversations, Echo(), tmp_path / name, AnswerOptions(**options), progress=False)
        return {key: texts[1].split(":")[2:] for key, texts in messages_by_id(tmp_path / name).items()}

    base = kinds(many(200), "a.jsonl")
    assert kinds(many(200)[::-2], "b.jsonl", batch_size=3).items() <= base.items()
    assert kinds(many(200), "c.jsonl", seed=1) != base
    sampled = sum(kind == "True" for kind, _ in base.values())
    assert 70 < sampled < 130 and len({noise for _, noise in base.values()}) == 200
    assert {kind for kind, _ in kinds(many(50), "d.jsonl", sampled_share=1.0).values()} == {"True"}


def test_batches_are_alike(tmp_path):
    backend = Echo()
    regenerate(many(64), backend, tmp_path / "out.jsonl", AnswerOptions(batch_size=4), progress=False)
    assert all(len({request.sampled for request in batch}) == 1 and len(batch) <= 4 for batch in backend.batches)
    first = [batch for batch in backend.batches if len(batch[0].prompt) == 1]
    spread = [max(w) - min(w) for w in ([len(r.prompt[0].content) for r in batch] for batch in first)]
    assert sum(spread) / len(spread) < 10  # of a range of 25


def test_answers_of_a_batch_end_at_about_the_same_time(tmp_path):
    """By those that the data has: where questions are alike, a batch is of answers alike in length."""
    lengths = {f"id-{number}": number * 37 % 64 for number in range(64)}
    asked = [
        Conversation(name, (Message("user", name.ljust(9)), Message("assistant", "x" * length)))
        for name, length in lengths.items()
    ]
    backend = Echo()
    options = AnswerOptions(batch_size=4, sampled_share=0.0)
    regenerate(asked, backend, tmp_path / "out.jsonl", options, progress=False)
    batches = [[lengths[request.prompt[0].content.strip()] for request in batch] for batch in backend.batches]
    assert all(max(batch) - min(batch) == 3 for batch in batches)


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from regenerated import Echo, many
from shape.data.options import AnswerOptions
from shape.data.regeneration import regenerate

class Fragile(Echo):
    def generate(self, requests):
        if len(self.batches) == {after}:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().generate(requests)

regenerate(many(60), Fragile(), {output!r}, AnswerOptions(batch_size=4), progress=False)
"""


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_killed_and_resumed_gives_the_same_bytes(tmp_path, name):
    straight, output = tmp_path / f"straight-{name}", tmp_path / name
    whole = Echo()
    regenerate(many(60), whole, straight, AnswerOptions(batch_size=4), progress=False)
    tests = os.path.dirname(os.path.dirname(__file__))
    code = KILLED.format(tests=tests, after=17, output=str(output))
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(tests)}
    killed = subprocess.run([sys.executable, "-c", code], env=environment, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert not output.exists()
    partial = tmp_path / f"{name}.partial"
    with open(partial, "ab") as file:
        file.write(b'[[0, {"id": "half a line')
    rest = Echo()
    regenerate(many(60), rest, output, AnswerOptions(batch_size=4), progress=False)
    assert output.read_bytes() == straight.read_bytes()
    assert 0 < len(rest.batches) < len(whole.batches)  # it went on where it was
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, f"straight-{name}"])


@pytest.mark.parametrize("after", [b"", b'{"data": "half a header'])
def test_killed_before_the_first_line(tmp_path, after):
    (tmp_path / "out.jsonl.partial").write_bytes(after)
    assert regenerate(many(3), Echo(), tmp_path / "out.jsonl", progress=False).rows == 3


class Stopping(Echo):
    def generate(self, requests):
        if len(self.batches) == 2:
            raise KeyboardInterrupt
        return super().generate(requests)


def test_resuming_with_other_options_is_refused(tmp_path):
    output = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        regenerate(many(30), Stopping(), output, AnswerOptions(batch_size=4), progress=False)
    with pytest.raises(ConfigError, match="begun with other conversations; give the same again"):
        regenerate(many(29), Echo(), output, AnswerOptions(batch_size=4), progress=False)
    seeded = AnswerOptions(batch_size=4, seed=1)
    with pytest.raises(ConfigError, match=r"begun with seed 0 \(now 1\), another target; give the same"):
        regenerate(many(30), Echo("other"), output, seeded, progress=False)
    with pytest.raises(ConfigError, match="begun with another target;"):
        regenerate(many(30), Echo("other"), output, AnswerOptions(batch_size=4), progress=False)
    assert regenerate(many(30), Echo(), output, AnswerOptions(batch_size=4), progress=False).rows == 30
    with pytest.raises(ConfigError, match="exists already; delete it or name another"):
        regenerate(many(30), Echo(), output, AnswerOptions(batch_size=4), progress=False)


def test_what_was_begun_otherwise_and_has_no_answer_is_begun_anew(tmp_path):
    class Refusing(Echo):
        def generate(self, requests):
            raise DataError("nobody answers")

    output = tmp_path / "out.jsonl"
    with pytest.raises(DataError, match="nobody answers"):
        regenerate(many(3), Refusing("other"), output, progress=False)
    assert regenerate(many(3), Echo(), output, progress=False).rows == 3


@pytest.mark.parametrize("size", [2, 7])
def test_another_batch_size_goes_on(tmp_path, size):
    """As after running out of memory: nothing that was answered is asked for again."""
    straight, output, rest = tmp_path / "straight.jsonl", tmp_path / "out.jsonl", Echo()
    regenerate(many(30), Echo(), straight, AnswerOptions(batch_size=4), progress=False)
    with pytest.raises(KeyboardInterrupt):
        regenerate(many(30), Stopping(), output, AnswerOptions(batch_size=4), progress=False)
    lines = Path(f"{output}.partial").read_text().splitlines()[1:]
    done = {entry[0] for line in lines for entry in json.loads(line)}
    regenerate(many(30), rest, output, AnswerOptions(batch_size=size), progress=False)
    assert output.read_bytes() == straight.read_bytes()
    first = [request.prompt for batch in rest.batches for request in batch if len(request.prompt) == 1]
    assert done and len(first) == 30 - len(done) and max(map(len, rest.batches)) <= size
    files = [answers_file(many(3), Echo(), tmp_path, AnswerOptions(batch_size=each)) for each in (4, size)]
    assert files[0] == files[1]


def test_bad_input(tmp_path):
    text = Conversation("t", (Message("assistant", "text"),), "text")
    with pytest.raises(DataError, match="conversation t is plain text, which has no prompt"):
        regenerate([text], Echo(), tmp_path / "a.jsonl", progress=False)
    with pytest.raises(DataError, match="none of the 1 conversations has a user message that could"):
        regenerate([Conversation("x", (Message("assistant", "a"),))], Echo(), tmp_path / "b.jsonl", progress=False)
    with pytest.raises(ConfigError, match=r"let its name end in \.jsonl or \.jsonl\.gz"):
        regenerate(many(1), Echo(), tmp_path / "c.json", progress=False)
    with pytest.raises(ConfigError, match=r"sampled_share is 2\.0; give a number from 0 to 1"):
        regenerate(many(1), Echo(), tmp_path / "d.jsonl", AnswerOptions(sampled_share=2.0), progress=False)


# Several processes -----------------------------------------------------------------------------------


def test_processes_share_the_batches(tmp_path):
    straight, output, barrier = tmp_path / "straight.jsonl", tmp_path / "out.jsonl", threading.Barrier(3)
    whole, parts = Echo(), [Echo() for _ in range(3)]
    expected = regenerate(many(60), whole, straight, AnswerOptions(batch_size=4), progress=False)

    def work(rank: int) -> Summary | None:
        share = Share(rank, 3, barrier.wait)
        return regenerate(many(60), parts[rank], output, AnswerOptions(batch_size=4), progress=False, share=share)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(work, range(3))) == [expected, None, None]
    assert output.read_bytes() == straight.read_bytes()
    asked = [len(part.batches) for part in parts]
    assert sum(asked) == len(whole.batches) and max(asked) - min(asked) <= 6  # batches have up to three turns
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "straight.jsonl"]


def test_another_number_of_processes_goes_on(tmp_path):
    straight, output, whole, rest = tmp_path / "straight.jsonl", tmp_path / "out.jsonl", Echo(), Echo()
    regenerate(many(60), whole, straight, AnswerOptions(batch_size=4), progress=False)
    for rank in (1, 2):  # and the first is lost at once
        part = Echo()
        share = Share(rank, 3)
        assert regenerate(many(60), part, output, AnswerOptions(batch_size=4), progress=False, share=share) is None
    with open(tmp_path / "out.jsonl.partial.2", "ab") as file:
        file.write(b'[[0, {"id": "half a line')
    assert regenerate(many(60), Echo(), output, AnswerOptions(batch_size=4), progress=False, share=Share(1, 2)) is None
    regenerate(many(60), rest, output, AnswerOptions(batch_size=4), progress=False)
    assert output.read_bytes() == straight.read_bytes() and 0 < len(rest.batches) < len(whole.batches) / 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "straight.jsonl"]


FAILING = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from regenerated import Echo, many
from shape.data.options import AnswerOptions
from shape.data.regeneration import own_answers
from shape.errors import DataError, exit_on_error
from shape.features.trainer import TrainerOptions

rank, failing = map(int, sys.argv[1:])

class Failing(Echo):
    def generate(self, requests):
        if rank == failing and len(self.batches) == 2:
            raise DataError("this process fails")
        return super().generate(requests)

with exit_on_error():
    trainer = TrainerOptions(accelerator="cpu", devices=2, strategy="ddp", enable_progress_bar=False).for_extraction()
    answers = own_answers(
        many(60), Failing(), Path({output!r}), AnswerOptions(batch_size=4), trainer, progress=False
    )
    print(len(answers), "answered")
"""


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_process_that_fails_ends_the_others(tmp_path, failing):
    """Under a launcher that leaves the others alone, as SLURM's does; of two processes number 2 is none."""
    tests, output = os.path.dirname(os.path.dirname(__file__)), tmp_path / "out.jsonl"
    code = FAILING.format(tests=tests, output=str(output))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(failing)],
            env={**os.environ, **place, "PYTHONPATH": os.path.dirname(tests), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == ([0, 0] if failing == 2 else [2, 2]), said
    for rank in (0, 1):
        ended = "this process fails" if rank == failing else f"rank {rank} has lost a process beside it"
        assert ("60 answered" if failing == 2 else ended) in said[rank]
    assert output.exists() == (failing == 2)


def test_what_no_other_process_shows_is_waited_for_with_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_SECONDS_TO_APPEAR", 0.2)
    with pytest.raises(DataError, match=r"written for .*out\.jsonl is not to be seen by this one; give an output on"):
        regenerate(many(60), Echo(), tmp_path / "out.jsonl", progress=False, share=Share(0, 2))


@dataclass
class Wordy(Echo):
    """Answers of 10,000 token ids."""

    def _answer(self, request):
        return Answer(super()._answer(request).text, True, tokens=([0], list(range(1000, 11_000))))


@pytest.mark.parametrize("name", [pytest.param("out.jsonl", marks=pytest.mark.slow), "out.jsonl.gz"])
def test_memory_does_not_grow_with_the_answers(tmp_path, name):
    """Neither while they are written, nor where they are resumed, nor in the end."""
    output, conversations = tmp_path / name, [conversation_of(f"id-{number}", "q") for number in range(30)]
    for share in (Share(1, 2), Share(0, 2)):
        tracemalloc.start()
        regenerate(conversations, Wordy(), output, AnswerOptions(batch_size=2), progress=False, share=share)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 8e6, f"{most:,} bytes for 30 answers, of which two are a tenth of that"
    rows = load_conversations(output)
    assert [row.id for row in rows] == [each.id for each in conversations] and len(rows[0].texts[0].input_ids) == 10_001


def test_answers_that_are_written_are_only_read(tmp_path):
    trainer = extraction_trainer()
    output = answers_file(many(4), Echo(), tmp_path, AnswerOptions())
    first = own_answers(many(4), Echo(), output, AnswerOptions(), trainer, progress=False)
    for lock in tmp_path.glob("*.lock"):
        lock.unlink()
    before = tmp_path.stat().st_mtime_ns
    assert own_answers(many(4), Echo(), output, AnswerOptions(), trainer, progress=False) == first
    assert tmp_path.stat().st_mtime_ns == before


def test_a_second_command_waits_for_the_answers_of_the_first(tmp_path):
    output, backend, found = answers_file(many(4), Echo(), tmp_path, AnswerOptions()), Echo(), []
    regenerate(many(4), Echo(), tmp_path / "first.jsonl", AnswerOptions(), progress=False)

    def second() -> None:
        trainer = extraction_trainer()
        found.append(own_answers(many(4), backend, output, AnswerOptions(), trainer, progress=False))

    with FileLock(output.with_suffix(".lock")):
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(0.7)
        assert waiting.is_alive() and not backend.batches
        os.replace(tmp_path / "first.jsonl", output)
    waiting.join(60)
    assert len(found[0]) == 4 and not backend.batches, "they are read, and nothing is asked again"


def test_half_a_line_on_a_full_disk_spoils_no_answers(tmp_path, monkeypatch):
    """Those of other threads are written behind it."""
    journal, entry = AnswerJournal(tmp_path / "a.partial", {"a": 1}), {"text": "x"}
    journal.append([(0, entry, 1, None)])

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(os, "fsync", full)
        journal.append([(1, entry, 1, None)])
    journal.append([(2, entry, 1, None)])
    assert [found[0] for found in AnswerJournal(tmp_path / "a.partial", {"a": 1}).entries()] == [0, 2]
