"""The Hugging Face Hub: what is fetched of a repository, and what is said when it cannot be."""

import errno
from types import SimpleNamespace

import pytest

from slotline.config import EngineConfig
from slotline.errors import DownloadError, ModelNotFound
from slotline.plugins.models import hub
from slotline.plugins.models.progress import Quiet


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """No hub: whoever calls it fails the test."""
    from huggingface_hub import constants

    def called(*args, **kwargs):
        pytest.fail("a network call")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", called)
    return tmp_path / "hub"


def test_offline_and_not_cached(offline, open_model):
    with pytest.raises(DownloadError, match=r"cannot fetch org/name: HF_HUB_OFFLINE is set.*not in the cache.*path"):
        open_model("org/name")


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    """A hub with one repository; what is asked of it is recorded."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    names = {"config.json": 5, "model.safetensors": 100, "consolidated.safetensors": 100, "README.md": 1, "x/a.json": 1}
    asked = SimpleNamespace(names=names, error=None, download_error=None, patterns=None, revision=None)

    def model_info(self, repo, *, revision, files_metadata, timeout):
        if asked.error is not None:
            raise asked.error
        siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in asked.names.items()]
        return SimpleNamespace(siblings=siblings, sha="c0ffee")

    def snapshot_download(repo, *, revision, allow_patterns=None, local_files_only=False, **options):
        from huggingface_hub.errors import LocalEntryNotFoundError

        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        if asked.download_error is not None:
            raise asked.download_error
        asked.patterns, asked.revision = allow_patterns, revision
        with options["tqdm_class"](total=10, unit="B") as bar:
            bar.update(10)
        folder = tmp_path / revision
        folder.mkdir(exist_ok=True)
        for name in allow_patterns:
            (folder / name).write_bytes(b"")
        return str(folder)

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


def fetch(name, progress=None, **options):
    return hub.HubSource().resolve(name, EngineConfig.of(**options), progress or Quiet())


def test_only_needed_files_are_fetched(fake_hub):
    located = fetch("org/name")
    assert fake_hub.patterns == ["config.json", "model.safetensors"]
    assert located.source == "hf:org/name@c0ffee"


def test_progress_of_the_hub(fake_hub, capfd, recorder):
    seen = recorder
    fetch("org/name", seen)
    assert seen.steps == {"fetching org/name": [105, 10]}
    assert capfd.readouterr() == ("", "")


def test_choosing_a_file(fake_hub):
    fake_hub.names.update({"m-Q4.gguf": 1, "m-Q8.gguf": 1})
    assert fetch("hf:org/name@main:m-Q8.gguf").path.name == "m-Q8.gguf"
    with pytest.raises(ModelNotFound, match=r"no file x\.gguf; it has m-Q4\.gguf, m-Q8\.gguf"):
        fetch("hf:org/name:x.gguf")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a.gguf", "b.gguf"], "choose one as hf:org/name:FILE from a.gguf, b.gguf"),
        (["README.md"], "no safetensors or GGUF weights"),
        (["pytorch_model.bin"], "pickled weights .*trust_pickle allows"),
    ],
)
def test_nothing_to_choose_from(fake_hub, names, words):
    fake_hub.names = dict.fromkeys(names, 1)
    with pytest.raises(ModelNotFound, match=words):
        fetch("org/name")


def test_other_weights(fake_hub):
    fake_hub.names = {"only.gguf": 1, "tokenizer.model": 1}
    fetch("org/name")
    assert fake_hub.patterns == ["tokenizer.model", "only.gguf"]
    fake_hub.names = {"pytorch_model.bin": 1, "config.json": 1}
    fetch("org/name", trust_pickle=True)
    assert fake_hub.patterns == ["config.json", "pytorch_model.bin"]


def hub_error(kind: str):
    import httpx
    from huggingface_hub import errors

    return getattr(errors, kind)("no", response=httpx.Response(404, request=httpx.Request("GET", "https://hub.test")))


@pytest.mark.parametrize(
    ("kind", "expected", "words"),
    [
        ("RepositoryNotFoundError", ModelNotFound, "the hub has no model 'org/name'"),
        ("RevisionNotFoundError", ModelNotFound, "at revision 'v9'"),
        ("GatedRepoError", DownloadError, "HF_TOKEN"),
    ],
)
def test_the_hub_says_no(fake_hub, kind, expected, words):
    fake_hub.error = hub_error(kind)
    with pytest.raises(expected, match=words):
        fetch("hf:org/name@v9")


def test_the_hub_cannot_be_reached(fake_hub):
    fake_hub.error = ConnectionError("no route\nto host")
    with pytest.raises(DownloadError, match=r"cannot be reached: no route, .*HF_ENDPOINT"):
        fetch("org/name")
    fake_hub.error, fake_hub.download_error = None, OSError("reset")
    with pytest.raises(DownloadError, match=r"cannot fetch org/name: reset; try again"):
        fetch("org/name")
    fake_hub.download_error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(DownloadError, match=r"cannot fetch org/name: no space is left on the disk; .* set HF_HOME"):
        fetch("org/name")


def test_a_malformed_hub_name(fake_hub):
    with pytest.raises(ModelNotFound, match="not of the form hf:"):
        fetch("hf:name")
    assert fetch("name") is None


def test_the_hubs_cache(offline, tmp_path):
    source = hub.HubSource()
    assert source.list_cached() == [] and not source.remove("org/name")
    snapshot = offline / "models--org--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"1234")
    (offline / "models--org--name" / "refs").mkdir()
    (offline / "models--org--name" / "refs" / "main").write_text("a" * 40)
    assert fetch("org/name").path == snapshot
    with pytest.raises(ModelNotFound, match=r"no file m\.gguf"):
        fetch("hf:org/name:m.gguf")
    (model,) = source.list_cached()
    assert (model.name, model.format, model.bytes) == ("org/name", "safetensors", 4)
    assert source.remove("hf:org/name") and source.list_cached() == []


def test_all_parts_of_a_model_are_fetched(fake_hub):
    parts = [f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    fake_hub.names = dict.fromkeys([*parts, "config.json"], 1)
    fetch("org/name")
    assert fake_hub.patterns == ["config.json", *parts]
    fake_hub.names["other.gguf"] = 1
    fetch(f"hf:org/name:{parts[1]}")
    assert fake_hub.patterns == parts
    with pytest.raises(ModelNotFound, match=r"choose one as hf:org/name:FILE from m-00001-of-00002\.gguf, other\.gguf"):
        fetch("org/name")
