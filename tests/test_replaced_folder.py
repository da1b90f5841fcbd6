"""A folder that takes the place of another: old or new, whenever it is cut short."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from skipless import files
from skipless.errors import UserError
from skipless.outputs import replaced_folder, set_aside

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links, locks and signals of POSIX")


def write(path: Path, text: str) -> None:
    with replaced_folder(path) as made:
        (made / "config.json").write_text(text)
        (made / "more").mkdir()
        (made / "more" / text).write_text(text * 1000)


def read(path: Path) -> str:
    """The text of a whole folder."""
    text = (path / "config.json").read_text()
    assert [file.name for file in (path / "more").iterdir()] == [text]
    assert (path / "more" / text).read_text() == text * 1000
    return text


def cannot(first, second) -> bool:
    return False


@pytest.fixture(params=["exchange", "two renames"])
def way(request, monkeypatch):
    if request.param == "two renames":
        monkeypatch.setattr(files, "_exchange", cannot)
    return request.param


def test_new_replaced_filled_and_linked(way, tmp_path):
    write(tmp_path / "a", "one")
    write(tmp_path / "a", "two")
    assert read(tmp_path / "a") == "two"
    (tmp_path / "empty").mkdir()
    inode = (tmp_path / "empty").stat().st_ino
    write(tmp_path / "empty", "one")
    assert read(tmp_path / "empty") == "one" and (tmp_path / "empty").stat().st_ino == inode
    (tmp_path / "link").symlink_to("a")
    write(tmp_path / "link", "three")
    assert (tmp_path / "link").is_symlink() and read(tmp_path / "a") == "three"
    assert sorted(os.listdir(tmp_path)) == ["a", "empty", "link"]


def test_others_may_read_what_they_may_read_of_any_new_file(way, tmp_path):
    """safetensors writes files that only their owner reads."""
    import torch  # here, so that the processes that are killed need not load it
    from safetensors.torch import save_file

    before = os.umask(0o027)
    try:
        with replaced_folder(tmp_path / "a") as made:
            save_file({"w": torch.zeros(2)}, made / "model.safetensors")
            (made / "run.sh").write_text("")
            (made / "run.sh").chmod(0o700)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "a").iterdir()}
    assert modes == {"model.safetensors": 0o640, "run.sh": 0o740}


def test_what_fails_leaves_the_old_one(way, tmp_path, monkeypatch):
    write(tmp_path / "a", "one")
    with pytest.raises(KeyboardInterrupt), replaced_folder(tmp_path / "a") as made:
        (made / "half").write_text("x")
        raise KeyboardInterrupt

    def refuse(path):
        if calls.append(path) or len(calls) == 2:  # another process put something there
            raise UserError(f"{path} must stay")

    calls: list[Path] = []
    with pytest.raises(UserError, match="a must stay"):  # noqa: SIM117
        with replaced_folder(tmp_path / "a", refuse) as made:
            (made / "config.json").write_text("two")
    real = os.rename

    def full(source, target):
        if str(source).endswith("new"):
            raise OSError(28, "No space left on device")
        real(source, target)

    if way == "two renames":
        monkeypatch.setattr(os, "rename", full)
        with pytest.raises(UserError, match=r"cannot write .*a: No space left"):
            write(tmp_path / "a", "two")
    assert read(tmp_path / "a") == "one" and os.listdir(tmp_path) == ["a"]


KILLED = """
import os, signal, sys
from pathlib import Path
from skipless import files
from tests.test_replaced_folder import cannot, write
path, way, at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
left = [at]
def dying(call):
    def run(*arguments, **options):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return call(*arguments, **options)
    return run
files._exchange = dying(files._exchange) if way == "exchange" else cannot
os.rename, os.fsync = dying(os.rename), dying(os.fsync)
files.shutil.rmtree = dying(files.shutil.rmtree)
write(path, "two")
"""


@pytest.mark.parametrize("kind", ["exchange", "two renames"])
def test_killed_at_any_step(kind, tmp_path):
    """SIGKILL before each call that touches names: the old or the new folder is whole, and the next
    save tidies up."""
    seen = set()
    for at in range(8):
        home = tmp_path / str(at)
        home.mkdir()
        write(home / "a", "one")
        command = [sys.executable, "-c", KILLED, str(home / "a"), kind, str(at)]
        done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        if (home / "a").exists():
            seen.add(read(home / "a"))
            assert set_aside(home / "a") is None
        else:  # between two renames
            old = set_aside(home / "a")
            assert kind == "two renames" and old is not None and read(old) == "one"
            old.rename(home / "a")
        write(home / "a", "three")
        assert read(home / "a") == "three"
        assert [name for name in os.listdir(home) if name.endswith(".tmp")] == []
    else:
        pytest.fail("more steps than expected")
    assert seen == {"one", "two"}


def test_writers_and_a_reader_at_once(tmp_path):
    """With one step there is no moment without a whole folder."""
    path = tmp_path / "a"
    write(path, "zero")
    if not files._exchange(path, path):
        pytest.skip("this disk cannot exchange names")
    wrong: list[str] = []

    def work(text: str) -> None:
        try:
            for _ in range(40):
                write(path, text)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(text,)) for text in ("one", "two")]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if not (path / "config.json").exists():
            wrong.append("nothing there")
    for thread in threads:
        thread.join()
    assert not wrong and read(path) in ("one", "two") and os.listdir(tmp_path) == ["a"]
