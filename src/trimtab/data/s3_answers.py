"""Asks an S3-compatible store, and makes of its errors what a user can act upon.

No message ever holds a credential: errors carry the store's error code, never its text or the request.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from trimtab.data import s3_copy
from trimtab.errors import RequestError

T = TypeVar("T")

_KEY_CODES = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidClientTokenId",
    "ExpiredToken",
    "InvalidToken",
}
# Those that s3fs does not know for a PermissionError by itself.
_DENIED_CODES = {"Forbidden", "Unauthorized", "401"}
# Answers of a store that is busy or stumbles, and may be well a moment later.
_PASSING = {"InternalError", "ServiceUnavailable", "SlowDown", "RequestTimeout", "500", "502", "503", "504"}
_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


class Changed(Exception):
    """The object is no longer the one that was listed."""


@dataclass(frozen=True)
class Place:
    """What every error names: the setting, the address and the endpoint; never a credential."""

    setting: str
    address: str
    endpoint: str | None

    @property
    def bucket(self) -> str:
        return self.address.removeprefix("s3://").partition("/")[0]

    @property
    def store(self) -> str:
        return self.endpoint or "AWS S3"

    def error(self, found: str, why: str, change: str) -> RequestError:
        return RequestError.of(f"{self.setting}={self.address} at {self.store}: {found}", why, change)


def ask(call: Callable[[], T], place: Place, while_read: bool = False) -> T:
    """Run a call to the store. PermissionError and FileNotFoundError pass; the rest becomes a clear error.

    `while_read`: the call writes an object into a file. Then a connection that breaks is s3_copy.Broken, an object that
    is no longer what was listed Changed, and an error of this machine's disk passes.

    `from None` everywhere: botocore's texts may quote the request, and with it a key id or a signed URL.
    """
    from aiohttp import ClientError as ConnectionCut
    from botocore import exceptions as boto

    try:
        return call()
    except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError):
        raise place.error(
            "no credentials found",
            "the source is remote, and neither the environment nor the AWS configuration holds a key pair",
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN for temporary ones)",
        ) from None
    except boto.ParamValidationError:
        raise place.error(
            f"`{place.bucket}` is not a valid bucket name",
            "names have 3 to 63 letters, digits, dots and hyphens",
            f"correct {place.setting}",
        ) from None
    except (boto.ProfileNotFound, boto.ConfigParseError):
        raise place.error(
            "the AWS configuration cannot be used",
            "AWS_PROFILE names a profile that is not there, or ~/.aws/config cannot be parsed",
            "correct AWS_PROFILE or the file",
        ) from None
    except (
        boto.HTTPClientError,
        boto.ConnectionError,
        boto.IncompleteReadError,
        boto.ResponseStreamingError,
        boto.FlexibleChecksumError,
        ConnectionCut,
        ConnectionError,
        TimeoutError,
    ) as error:
        if while_read:
            raise s3_copy.Broken(f"the connection failed ({type(error).__name__})") from None
        raise place.error(
            "the store cannot be reached",
            f"the connection failed ({type(error).__name__})",
            "check data.endpoint_url (or AWS_ENDPOINT_URL), the network and the proxy settings",
        ) from None
    except (boto.BotoCoreError, boto.ClientError, OSError) as error:
        code = _code(error)
        if while_read and isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            raise
        if while_read and code in ("PreconditionFailed", "412"):
            raise Changed from None
        if while_read and code in _PASSING:
            raise s3_copy.Broken(f"the store answered {code}") from None
        if code in _KEY_CODES:
            raise denied(code, place) from None
        if code in _DENIED_CODES or isinstance(error, PermissionError):
            raise PermissionError(code) from None
        if isinstance(error, FileNotFoundError):
            raise FileNotFoundError(code) from None
        raise place.error(
            f"the store refused the request ({code})",
            "it answered with an error that is neither about the credentials nor about a missing object",
            "check the bucket's name, its region (AWS_REGION) and data.endpoint_url",
        ) from None


def _code(error: BaseException) -> str:
    """The store's error code, from the botocore error at the bottom of the chain; else the error's kind."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code") or type(seen).__name__)
        seen = seen.__cause__ or seen.__context__
    return type(error).__name__


def denied(code: str, place: Place) -> RequestError:
    if code in _KEY_CODES:
        return place.error(
            f"the credentials were refused ({code})",
            "the store does not know this key, the secret does not belong to it, or it has expired",
            "correct AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN; they must be for this store",
        )
    return place.error(
        f"access was denied ({code})",
        "the credentials may be wrong, or may not read this bucket",
        "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and that they allow GetObject and ListBucket on "
        f"`{place.bucket}`",
    )
