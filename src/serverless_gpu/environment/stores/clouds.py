"""How S3, Google Cloud Storage and Azure are reached: which variables count, and what to check when they refuse.

Credentials come from the variables that the tools of each cloud read, or from the machine itself when it belongs to the
cloud; they are handed to obstore and kept nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from serverless_gpu.errors import InvalidValue, StoreUnavailable

if TYPE_CHECKING:
    from obstore.store import AzureStore, ClientConfig, GCSStore, RetryConfig, S3Store

    Client = S3Store | GCSStore | AzureStore

_CONNECT_S = 10.0
_READ_S = 30.0
"""How long a connection may be silent while something is read."""


class Cloud(NamedTuple):
    """One kind of object store."""

    variables: tuple[str, ...]  # what may say where it is and who we are
    endpoint: tuple[str, ...]
    check: str  # what to look at when it refuses


CLOUDS: Mapping[str, Cloud] = {
    "s3": Cloud(
        variables=(
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "AWS_REGION",
            "AWS_DEFAULT_REGION",
            "AWS_ENDPOINT_URL",
            "AWS_ENDPOINT_URL_S3",
            "AWS_ROLE_ARN",
            "AWS_ROLE_SESSION_NAME",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_STS_ENDPOINT",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
            "AWS_METADATA_ENDPOINT",
            "AWS_IMDSV1_FALLBACK",
            "AWS_SKIP_SIGNATURE",
            "AWS_REQUEST_PAYER",
            "AWS_SERVER_SIDE_ENCRYPTION",
            "AWS_SSE_KMS_KEY_ID",
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
            "AWS_DISABLE_BULK_DELETE",
        ),
        endpoint=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        check="AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL",
    ),
    "gs": Cloud(
        variables=(
            "GOOGLE_APPLICATION_CREDENTIALS",
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_SERVICE_ACCOUNT_PATH",
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            "GOOGLE_BASE_URL",
            "GOOGLE_SKIP_SIGNATURE",
        ),
        endpoint=("GOOGLE_BASE_URL",),
        check="GOOGLE_APPLICATION_CREDENTIALS",
    ),
    "az": Cloud(
        variables=(
            "AZURE_STORAGE_ACCOUNT_NAME",
            "AZURE_STORAGE_ACCOUNT_KEY",
            "AZURE_STORAGE_SAS_TOKEN",
            "AZURE_STORAGE_ENDPOINT",
            "AZURE_CLIENT_ID",
            "AZURE_CLIENT_SECRET",
            "AZURE_TENANT_ID",
            "AZURE_AUTHORITY_HOST",
            "AZURE_FEDERATED_TOKEN_FILE",
            "AZURE_IDENTITY_ENDPOINT",
            "AZURE_SKIP_SIGNATURE",
        ),
        endpoint=("AZURE_STORAGE_ENDPOINT",),
        check="AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN)",
    ),
}

Connect = Callable[[float, bool], "Client"]


def connector(scheme: str, bucket: str, prefix: str, environ: Mapping[str, str]) -> Connect:
    """Return what makes a client: of the seconds that its requests may take, and whether it only reads.

    Args:
        scheme: one of `CLOUDS`.
        bucket: or container.
        prefix: what the names of all objects start with, or "".
        environ: where the variables are looked up.

    Raises:
        StoreUnavailable: obstore is not installed.
        InvalidValue: a variable has a value that cannot be.
    """
    try:
        import obstore.store as kinds
        from obstore.exceptions import BaseError
    except ImportError:
        raise StoreUnavailable(
            f"{scheme}://{bucket} cannot be reached: object stores need the package obstore",
            hint="pip install 'serverless-gpu[store]'",
        ) from None
    cloud = CLOUDS[scheme]
    config = {name.lower(): environ[name] for name in cloud.variables if environ.get(name)}
    if scheme == "s3":
        config.setdefault("aws_region", config.pop("aws_default_region", "us-east-1"))
    plain = any(value.startswith("http://") for name, value in config.items() if name.upper() in cloud.endpoint)
    kind = {"s3": kinds.S3Store, "gs": kinds.GCSStore, "az": kinds.AzureStore}[scheme]

    def connect(timeout_s: float, reads: bool) -> Client:
        options: ClientConfig = {
            "allow_http": plain,
            "connect_timeout": timedelta(seconds=min(_CONNECT_S, timeout_s)),
            "timeout": timedelta(seconds=timeout_s),
        }
        if reads:  # who sends much hears nothing for long, and rightly so
            options["read_timeout"] = timedelta(seconds=min(_READ_S, timeout_s))
        retries: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)}
        client: Client = kind(
            bucket, prefix=prefix or None, config=config, client_options=options, retry_config=retries
        )
        return client

    try:
        connect(1.0, False)
    except (BaseError, ValueError, TypeError) as error:  # their texts may show the value
        raise InvalidValue(
            f"{scheme}://{bucket} cannot be reached with the variables that are set ({type(error).__name__})",
            hint=f"look at {', '.join(name for name in cloud.variables if environ.get(name)) or cloud.check}",
        ) from None
    return connect


def endpoint_of(scheme: str, environ: Mapping[str, str]) -> str:
    """Return where the store is, without what may be secret in it; "" where the cloud itself knows."""
    for name in CLOUDS[scheme].endpoint:
        if value := environ.get(name):
            parts = urlsplit(value)
            return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return ""
