"""Fetches files from an S3-compatible store (AWS, R2, MinIO) into a cache that is keyed by etag.

Credentials come from the environment or the usual AWS chain, and only when a source is remote. No message or log
line of this module ever holds one: errors carry the store's error code, never its text or the request.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.cache import cache_root
from trimtab.config.problems import has_key, has_login
from trimtab.data import s3_copy
from trimtab.data.s3_answers import Changed, Place, ask, denied
from trimtab.errors import RequestError

# Enough for a slow link; an address that nobody answers on should not hold a user for minutes.
_CONNECT_SECONDS = 10
_READ_SECONDS = 60
_ATTEMPTS = 2


@dataclass(frozen=True)
class RemoteFile:
    """An object in the store, and the file that holds its bytes here."""

    address: str
    path: Path
    from_cache: bool
    damaged: bool = False
    """The copy in the cache was not what had come, and was fetched anew."""


def fetch(
    address: str, endpoint_url: str | None, choose: Callable[[list[str]], list[str]], setting: str
) -> list[RemoteFile]:
    """Download `s3://bucket/key`, or what `choose` picks of the keys under `s3://bucket/prefix`.

    A file whose etag is already in the cache, with the bytes that came, is not downloaded again.
    """
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    endpoint = endpoint_url or next(filter(None, map(os.environ.get, names)), None)
    _refuse_embedded_credentials(address, endpoint, setting)
    place = Place(setting, address, endpoint)
    path = address.removeprefix("s3://").strip("/")
    if not path or address.startswith("s3:///"):
        raise place.error("no bucket", "an address is `s3://bucket/key`", f"name the bucket in {setting}")
    fs = _connect(place)
    entries = _list(fs, path, place)
    if list(entries) != [path]:
        entries = {name: entries[name] for name in choose(list(entries))}
    return [_download(fs, name, info, place) for name, info in entries.items()]


def _refuse_embedded_credentials(address: str, endpoint: str | None, setting: str) -> None:
    """`user:secret@host` would end up in saved configs and in the libraries' debug logs."""
    for name, url in ((setting, address), ("data.endpoint_url or AWS_ENDPOINT_URL", endpoint or "")):
        if has_login(url) or has_key(url):
            raise RequestError.of(
                f"{name}: the address has credentials in it",
                "addresses are logged and saved with the run",
                "remove them, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead",
            )


def _connect(place: Place) -> Any:
    try:
        import s3fs
    except ImportError:
        raise place.error(
            "the package s3fs is not installed",
            "reading from S3-compatible stores needs it",
            "run `pip install trimtab[s3]`",
        ) from None
    client: dict[str, Any] = {}
    config: dict[str, Any] = {
        "connect_timeout": _CONNECT_SECONDS,
        "read_timeout": _READ_SECONDS,
        "retries": {"max_attempts": _ATTEMPTS},
    }
    if place.endpoint:
        # Stores on one's own host rarely answer on bucket.host; the region is signed but ignored by them.
        config["s3"] = {"addressing_style": "path"}
        client["endpoint_url"] = place.endpoint
        if not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
            client["region_name"] = "us-east-1"
    try:
        # A cached instance would keep the credentials of an earlier call.
        fs = s3fs.S3FileSystem(client_kwargs=client, config_kwargs=config, skip_instance_cache=True)
        fs.retries = _ATTEMPTS
        fs.connect()
    except ValueError:
        raise place.error(
            "the endpoint is not a valid URL",
            "an endpoint is a full address such as https://ACCOUNT.r2.cloudflarestorage.com",
            "correct data.endpoint_url or AWS_ENDPOINT_URL",
        ) from None
    return fs


def _list(fs: Any, path: str, place: Place) -> dict[str, dict[str, Any]]:
    """The object itself, or all objects below it, by `bucket/key`."""
    try:
        info = ask(lambda: fs.info(path, refresh=True), place)
        if info["type"] == "file":
            return {path: info}
        below = ask(lambda: fs.find(path, detail=True), place)
    except PermissionError:
        # HEAD says only "403"; listing answers with a body that holds the code.
        with contextlib.suppress(PermissionError):
            _keys(fs, *path.split("/", 1), place=place, most=1)
        raise denied("403", place) from None
    except FileNotFoundError:
        raise _missing(fs, path, place) from None
    files = {name: info for name, info in below.items() if info["type"] == "file" and info["size"]}
    if not files:
        raise _missing(fs, path, place)
    return files


def _missing(fs: Any, path: str, place: Place) -> RequestError:
    bucket, _, key = path.partition("/")
    try:
        keys = _keys(fs, bucket, key.rpartition("/")[0], place=place, most=1000)
    except FileNotFoundError:
        return place.error(
            f"there is no bucket `{bucket}`",
            "the store answered, and does not know it",
            "check the bucket's name, the endpoint (data.endpoint_url) and the account of the credentials",
        )
    except PermissionError:
        return denied("AccessDenied", place)
    near = get_close_matches(key, keys, n=3, cutoff=0.5) or keys[:3]
    return place.error(
        f"bucket `{bucket}` holds nothing at `{key}`",
        "neither an object nor a prefix of that name is there",
        f"near it: {', '.join(f's3://{bucket}/{name}' for name in near)}" if near else "check the key",
    )


def _keys(fs: Any, bucket: str, prefix: str = "", *, place: Place, most: int) -> list[str]:
    page = ask(lambda: fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=most), place)
    return [item["Key"] for item in page.get("Contents", [])]


def _download(fs: Any, name: str, info: dict[str, Any], place: Place) -> RemoteFile:
    """Bring one object into the cache, or take it from there where its bytes are still those that came."""
    address = f"s3://{name}"
    for _ in range(s3_copy.TRIES):
        path = _path_in_cache(name, info, place)
        version = s3_copy.Version(str(info.get("ETag") or ""), int(info["size"]))
        try:
            whole = s3_copy.is_whole(path, version.size)
            if whole:
                return RemoteFile(address, path, from_cache=True)
            s3_copy.fetch_whole(path, version, partial(_get, fs, name, version.etag, place))
            return RemoteFile(address, path, from_cache=False, damaged=whole is False)
        except Changed:
            try:
                info = ask(lambda: fs.info(name, refresh=True), place)
            except FileNotFoundError:
                raise _went_away(address, place) from None
        except s3_copy.Broken as broken:
            raise place.error(
                f"{address} did not come whole in {s3_copy.TRIES} tries: {broken}",
                "the connection broke off each time, or the store does not send what it says; nothing was kept",
                "check the network and the store, and try again",
            ) from None
        except OSError as error:
            raise _no_cache(path, error) from None
    raise place.error(
        f"{address} changed {s3_copy.TRIES} times while it was fetched",
        "its parts would be of several versions",
        "try again when nobody writes to it, or copy it to a key of its own",
    )


def _path_in_cache(name: str, info: dict[str, Any], place: Place) -> Path:
    # A store without etags still changes the time or the size when it changes the bytes.
    version = str(info.get("ETag") or f"{info.get('LastModified')}-{info.get('size')}")
    key = hashlib.sha256(f"{place.endpoint or ''}\n{name}\n{version}".encode()).hexdigest()[:32]
    return cache_root() / "data" / "s3" / key / re.sub(r"[^\w.-]", "_", name.rpartition("/")[2])[-100:]


def _get(fs: Any, name: str, etag: str, place: Place, scratch: Path) -> None:
    """Write the object into a file; s3_copy.Broken where the connection broke off, Changed where it is another now."""
    # For every request of the download, also of its parts: all of one version.
    fs.req_kw = {"IfMatch": etag} if etag else {}
    try:
        ask(lambda: fs.get_file(name, str(scratch)), place, while_read=True)
    except PermissionError as error:
        if error.errno is not None:
            raise
        raise denied("AccessDenied", place) from None
    except FileNotFoundError:
        raise _went_away(f"s3://{name}", place) from None
    finally:
        fs.req_kw = {}


def _went_away(address: str, place: Place) -> RequestError:
    return place.error(f"{address} went away while it was read", "it was listed a moment ago", "try again")


def _no_cache(path: Path, error: OSError) -> RequestError:
    return RequestError.of(
        f"{path.parent} cannot be written to ({error.strerror or type(error).__name__})",
        "files from a store are kept there, and used from there",
        "make room, or set TRIMTAB_CACHE to a folder of yours",
    )
