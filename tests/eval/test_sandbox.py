"""What a program that a model wrote can do, and what it cannot: real programs, in real processes."""

import pytest

from eval.text_quality import sandbox
from eval.text_quality.sandbox import Isolation, Limits
from shape.errors import ConfigError

BARE = Isolation(network=False, files=False)


def test_a_program_passes_only_by_coming_to_its_end():
    assert sandbox.run("assert 1 + 1 == 2") is None
    assert sandbox.run("assert 1 + 1 == 3") == "AssertionError"
    assert sandbox.run("def f(:") == "SyntaxError"
    assert sandbox.run("raise SystemExit(0)") == "SystemExit"
    assert sandbox.run("import os; os._exit(0)") == "killed"
    assert sandbox.run("print('noise'); import sys; sys.stdout.close()") is None


def test_endless_programs_are_killed(monkeypatch):
    monkeypatch.setattr(sandbox, "_STARTING_SECONDS", 0.5)
    assert sandbox.run("while True: pass", Limits(seconds=1)) in ("killed", "timeout")
    assert sandbox.run("import time; time.sleep(60)", Limits(seconds=1)) == "timeout"


@pytest.mark.parametrize("isolation", [None, BARE], ids=["as isolated as can be", "limits alone"])
def test_nothing_is_to_be_had(isolation):
    def ends(code: str) -> str | None:
        return sandbox.run(code, Limits(seconds=5, megabytes=256), isolation)

    assert ends("block = bytearray(1 << 29)") == "MemoryError"
    assert ends("import os\nfor _ in range(8): os.fork()") == "PermissionError"  # a bomb, of 256 processes at most
    assert ends("import subprocess; subprocess.run(['true'])") == "PermissionError"
    assert ends("import socket; socket.create_connection(('127.0.0.1', 9))") == "PermissionError"
    assert ends("open('large', 'w').write('x' * (1 << 21))") == "OSError"
    assert ends("import os; assert not os.listdir('.') and 'SHAPE_SHARED' not in os.environ") is None
    assert ends("open('small', 'w').write('x'); assert open('small').read() == 'x'") is None


def test_files_outside_are_out_of_reach(tmp_path):
    if not sandbox.available().files:
        pytest.skip("this system has no Landlock, or an old one")
    there, secret = tmp_path / "written", tmp_path / "secret"
    secret.write_text("mine")
    tmp_path.chmod(0o777)
    assert sandbox.run(f"open({str(there)!r}, 'w').write('x')") == "PermissionError"
    assert sandbox.run(f"import os; os.remove({str(secret)!r})") == "PermissionError"
    assert sandbox.run(f"open({str(secret)!r}).read()") == "PermissionError"
    assert sandbox.run(f"import os; os.truncate({str(secret)!r}, 0)") == "PermissionError"
    by_call = f"import ctypes; ctypes.CDLL(None).truncate({str(secret)!r}.encode(), 0)"  # the system refuses it too
    assert sandbox.run(by_call) is None
    assert not there.exists() and secret.read_text() == "mine"


def test_there_is_no_network_to_begin_with():
    if not sandbox.available().network:
        pytest.skip("this system gives no namespaces")
    code = "import socket; names = [name for _, name in socket.if_nameindex()]; assert names == ['lo'], names"
    assert sandbox.run(code) is None


def test_what_cannot_be_cut_off_is_said(monkeypatch):
    assert "not cut off from: network, files outside its folder" in str(BARE)
    assert "not" not in str(Isolation(True, True))
    monkeypatch.setattr(sandbox, "_confiner", lambda: "raise SystemExit(1)")
    with pytest.raises(ConfigError, match="cannot be run with limits on this machine"):
        sandbox.require()
