"""Reading from a real S3 server that checks signatures: files, prefixes, the cache, and every refusal."""

from __future__ import annotations

import json
import logging
import socket
import sys
import traceback
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trimtab.config.schema import DataSettings
from trimtab.data.sources import Loaded, load_rows
from trimtab.errors import RequestError

boto3 = pytest.importorskip("boto3")
moto_server = pytest.importorskip("moto.server")
pytest.importorskip("s3fs")

WRONG_SECRET = "wrongSecret/0123456789abcdefghij"
POLICY = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}


class Store:
    """A moto server with one user, whose key pair alone is let in once `lock` is called."""

    def __init__(self, url: str) -> None:
        self.url = url
        admin = {"endpoint_url": url, "region_name": "us-east-1"}
        admin |= {"aws_access_key_id": "admin", "aws_secret_access_key": "admin"}
        self.auth("inf")
        iam = boto3.client("iam", **admin)
        iam.create_user(UserName="reader")
        iam.put_user_policy(UserName="reader", PolicyName="all", PolicyDocument=json.dumps(POLICY))
        pair = iam.create_access_key(UserName="reader")["AccessKey"]
        self.key, self.secret = pair["AccessKeyId"], pair["SecretAccessKey"]
        user = {**admin, "aws_access_key_id": self.key, "aws_secret_access_key": self.secret}
        self.client = boto3.client("s3", **user)
        self.client.create_bucket(Bucket="sets")
        self.auth("0")

    def auth(self, free_requests: str) -> None:
        """After this many requests the server checks every signature."""
        plain = {"Content-Type": "text/plain"}
        data = free_requests.encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/moto-api/reset-auth", data, plain))

    def put(self, key: str, *texts: str) -> None:
        body = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        self.client.put_object(Bucket="sets", Key=key, Body=body.encode())


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def store(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    urllib.request.urlopen(urllib.request.Request(f"{server}/moto-api/reset", method="POST"))
    store = Store(server)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", store.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", store.secret)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    yield store
    store.auth("inf")


def load(source: str, endpoint: str | None, **settings: Any) -> Loaded:
    return load_rows(source, DataSettings(source=source, endpoint_url=endpoint, **settings))


def texts(loaded: Loaded) -> list[str]:
    return [row.values["text"] for row in loaded.rows]


def test_one_file_then_the_cache_then_a_changed_object(store: Store, tmp_path: Path) -> None:
    store.put("a.jsonl", "one", "two")
    first = load("s3://sets/a.jsonl", store.url)
    assert (texts(first), first.cache) == (["one", "two"], "downloaded")
    assert first.rows[1].where == "s3://sets/a.jsonl, line 2"

    # The same file of the same time shows that the second read takes it and downloads nothing.
    (cached,) = (tmp_path / "cache" / "data" / "s3").rglob("a.jsonl")
    before = cached.stat()
    second = load("s3://sets/a.jsonl", store.url)
    assert (texts(second), second.cache) == (
        ["one", "two"],
        "from the cache (etag unchanged, checksum verified)",
    )
    assert (cached.stat().st_ino, cached.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)

    store.put("a.jsonl", "three")
    third = load("s3://sets/a.jsonl", store.url)
    assert (texts(third), third.cache) == (["three"], "downloaded")


def test_a_prefix_of_several_files(store: Store) -> None:
    for key in (
        "set/train-0.jsonl",
        "set/train-1.jsonl",
        "set/test.jsonl",
        "set/README.md",
        "settle/x.jsonl",
    ):
        store.put(key, key)
    for source in ("s3://sets/set", "s3://sets/set/"):
        loaded = load(source, store.url)
        assert texts(loaded) == ["set/train-0.jsonl", "set/train-1.jsonl"]
    assert loaded.notes == ["data.split=train left out test.jsonl"]
    store.put("set/train-1.jsonl", "changed")
    assert (
        load("s3://sets/set", store.url).cache
        == "1 of 2 files from the cache (etag unchanged, checksum verified), the others downloaded"
    )


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_the_endpoint_from_the_environment(
    store: Store, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    store.put("a.jsonl", "one")
    monkeypatch.setenv(variable, store.url)
    assert texts(load("s3://sets/a.jsonl", None)) == ["one"]


@pytest.mark.parametrize("wrong", ["secret", "key"])
@pytest.mark.parametrize("source", ["s3://sets/a.jsonl", "s3://sets/folder/"])
def test_wrong_credentials_are_refused_without_telling_them(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: str, source: str
) -> None:
    store.put("a.jsonl", "one")
    store.put("folder/b.jsonl", "one")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", WRONG_SECRET)
    if wrong == "key":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAWRONGWRONGWRONG0")
    caplog.set_level(logging.DEBUG)
    with pytest.raises(
        RequestError, match=r"the credentials were refused \((SignatureDoesNotMatch|InvalidAccessKeyId)\)"
    ) as raised:
        load(source, store.url)
    whole = "".join(traceback.format_exception(raised.value))
    assert "AWS_SECRET_ACCESS_KEY" in str(raised.value)
    assert WRONG_SECRET not in whole
    assert "AKIAWRONG" not in whole
    assert caplog.text, "nothing was logged, so this proves nothing"
    assert WRONG_SECRET not in caplog.text


def test_good_credentials_are_not_logged_either(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.put("a.jsonl", "one")
    caplog.set_level(logging.DEBUG)
    load("s3://sets/a.jsonl", store.url)
    assert store.secret not in caplog.text


def test_no_credentials(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(RequestError, match="no credentials found"):
        load("s3://sets/a.jsonl", store.url)


def test_a_user_who_may_not_read(store: Store) -> None:
    store.put("a.jsonl", "one")
    store.client.put_bucket_policy(
        Bucket="sets",
        Policy=json.dumps(
            {
                "Version": "2012-10-17",
                "Statement": [
                    {
                        "Effect": "Deny",
                        "Principal": "*",
                        "Action": "s3:*",
                        "Resource": ["arn:aws:s3:::sets*"],
                    },
                ],
            }
        ),
    )
    with pytest.raises(RequestError, match=r"access was denied .*\n.*\n.*GetObject and ListBucket on `sets`"):
        load("s3://sets/a.jsonl", store.url)


def test_a_missing_bucket(store: Store) -> None:
    with pytest.raises(RequestError, match="there is no bucket `stes`"):
        load("s3://stes/a.jsonl", store.url)


def test_a_missing_key_names_what_is_near(store: Store) -> None:
    store.put("data/train.jsonl", "one")
    with pytest.raises(
        RequestError, match=r"holds nothing at `data/tarin.jsonl`\n.*\n.*s3://sets/data/train.jsonl"
    ):
        load("s3://sets/data/tarin.jsonl", store.url)


def test_an_unreachable_endpoint(store: Store) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening: a connection is refused at once
        with pytest.raises(RequestError, match="the store cannot be reached") as raised:
            load("s3://sets/a.jsonl", f"http://127.0.0.1:{free.getsockname()[1]}")
    assert "data.endpoint_url" in str(raised.value)


@pytest.mark.parametrize("source", ["s3://", "s3:///key"])
def test_no_bucket(store: Store, source: str) -> None:
    with pytest.raises(RequestError, match="no bucket"):
        load(source, store.url)


def test_an_endpoint_that_is_no_url(store: Store) -> None:
    with pytest.raises(RequestError, match="not a valid URL"):
        load("s3://sets/a.jsonl", "127.0.0.1:9000")


def test_credentials_inside_an_address_are_refused_unseen(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with_endpoint = store.url.replace("http://", f"http://me:{WRONG_SECRET.replace('/', '')}@")
    for source, endpoint in (
        ("s3://sets/a.jsonl", with_endpoint),
        ("s3://me:hushHush@sets/a.jsonl", store.url),
    ):
        with pytest.raises(RequestError, match="has credentials in it") as raised:
            load(source, endpoint)
        assert "hushHush" not in str(raised.value) + caplog.text
        assert WRONG_SECRET.replace("/", "") not in str(raised.value) + caplog.text


def test_without_s3fs_the_extra_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # what an absent package looks like to `import`
    with pytest.raises(RequestError, match=r"pip install trimtab\[s3\]"):
        load("s3://sets/a.jsonl", store.url)
