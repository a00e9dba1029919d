"""What a registry says about an image: taken only where digests and caps hold it to it."""

import json

import pytest

from untax.core.errors import StageFailed
from untax.layers.sources import _manifest
from untax.layers.sources._reference import Platform

AMD64 = Platform("amd64")
SHA = "sha256:" + "a" * 64
OCI = "application/vnd.oci.image"
CONFIG = {"mediaType": f"{OCI}.config.v1+json", "digest": SHA, "size": 10}
LAYER = {"mediaType": f"{OCI}.layer.v1.tar+gzip", "digest": SHA, "size": 7}


def document(**changes):
    return {"schemaVersion": 2, "mediaType": f"{OCI}.manifest.v1+json", "config": CONFIG, "layers": [LAYER], **changes}


def entry(letter, architecture, variant="", system="linux", kind=f"{OCI}.manifest.v1+json"):
    platform = {"architecture": architecture, "os": system, **({"variant": variant} if variant else {})}
    return {"mediaType": kind, "digest": "sha256:" + letter * 64, "size": 1, "platform": platform}


def chosen(*entries, here=AMD64):
    return _manifest.choose({"manifests": list(entries)}, here, "x")[7]


def test_an_image_is_its_config_and_its_layers():
    found = _manifest.read(document(), "x")
    assert (found.config.digest, [layer.size for layer in found.layers], found.bytes) == (SHA, [7], 7)


def test_a_layer_that_is_there_twice_is_counted_once():
    assert _manifest.read(document(layers=[LAYER, LAYER]), "x").bytes == 7


def test_docker_s_own_types_are_an_image_too():
    docker = "application/vnd.docker"
    config = {**CONFIG, "mediaType": f"{docker}.container.image.v1+json"}
    layer = {**LAYER, "mediaType": f"{docker}.image.rootfs.diff.tar.gzip"}
    assert len(_manifest.read(document(config=config, layers=[layer]), "x").layers) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"config": None},
        {"config": {**CONFIG, "mediaType": "application/vnd.example.chart+json"}},
        {"config": {**CONFIG, "digest": "sha256:../../x"}},
        {"config": {**CONFIG, "digest": "md5:" + "a" * 32}},
        {"config": {**CONFIG, "size": 1 << 40}},
        {"config": {**CONFIG, "size": True}},
        {"layers": None},
        {"layers": [LAYER] * 513},
        {"layers": ["text"]},
        {"layers": [{**LAYER, "size": -1}]},
        {"layers": [{**LAYER, "size": 1.5}]},
        {"layers": [LAYER, {**LAYER, "size": 8}]},
        {"layers": [{**LAYER, "size": 1 << 60}]},
        {"layers": [{**LAYER, "digest": None}]},
        {"layers": [{**LAYER, "mediaType": "text/html"}]},
        {"layers": [{**LAYER, "mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "urls": ["http://x.test/"]}]},
        {"layers": [{**LAYER, "mediaType": f"{OCI}.layer.nondistributable.v1.tar"}]},
    ],
)
def test_t22_what_is_no_image_or_beyond_the_caps_is_refused(changes):
    with pytest.raises(StageFailed):
        _manifest.read(document(**changes), "x")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"<html>",
        b"\xff",
        b"[" * 100_000,
        json.dumps({"schemaVersion": 1, "fsLayers": []}).encode(),
        json.dumps({**document(), "manifests": []}).encode(),
    ],
)
def test_t22_a_manifest_that_readers_could_take_for_different_things_is_refused(body):
    with pytest.raises(StageFailed):
        _manifest.parse(body, "x")


@pytest.mark.parametrize(
    "refuse",
    [
        lambda: _manifest.parse(b"[]", "oci:/layout"),
        lambda: _manifest.read(document(config=None), "oci:/layout"),
        lambda: _manifest.read(
            document(layers=[{**LAYER, "mediaType": f"{OCI}.layer.nondistributable.v1.tar"}]),
            "oci:/layout",
        ),
    ],
)
def test_a_refusal_is_true_of_a_layout_in_a_file_too(refuse):
    with pytest.raises(StageFailed) as told:
        refuse()
    assert "oci:/layout" in told.value.message
    assert "registry" not in told.value.message


def test_the_entry_for_this_machine_is_taken_from_a_list():
    assert chosen(entry("a", "arm64"), entry("b", "amd64"), entry("c", "amd64")) == "b"
    assert chosen(entry("a", "amd64", "v3"), entry("b", "amd64", system="windows"), entry("c", "amd64")) == "c"
    assert chosen(entry("a", "arm", "v6"), entry("b", "arm", "v7"), here=Platform("arm", "v7")) == "b"


def test_what_is_listed_and_is_no_image_is_passed_over():
    attestation = entry("a", "unknown", system="unknown")
    assert (
        chosen(
            attestation,
            "text",
            {"digest": SHA},
            {**entry("b", "amd64"), "digest": 7},
            entry("c", "amd64", kind="text/html"),
            entry("d", "amd64"),
        )
        == "d"
    )


def test_an_entry_that_does_not_say_for_whom_it_is_comes_last():
    unnamed = {key: value for key, value in entry("a", "").items() if key != "platform"}
    assert chosen(unnamed, entry("b", "amd64")) == "b"
    assert chosen(entry("b", "arm64"), unnamed) == "a"
    with pytest.raises(StageFailed, match="none for"):  # nobody could say which of the two
        chosen(unnamed, unnamed)


def test_a_list_without_this_platform_says_which_it_has():
    with pytest.raises(StageFailed, match="none for linux/amd64, only for linux/arm64"):
        chosen(entry("a", "arm64"))
    with pytest.raises(StageFailed, match="nothing that is an image"):
        _manifest.choose({"manifests": "text"}, Platform("amd64"), "x")


def test_bytes_are_held_to_their_digest():
    _manifest.require_digest(b"", "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", "x")
    with pytest.raises(StageFailed, match="not those of"):
        _manifest.require_digest(b"", SHA, "x")
