"""An index of packages, as pip reads it and twine sends to it."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import requests
from packaging.metadata import RawMetadata, parse_email
from packaging.version import InvalidVersion, Version
from pypi_simple import (
    PYPI_SIMPLE_ENDPOINT,
    DigestMismatchError,
    DistributionPackage,
    NoMetadataError,
    NoSuchProjectError,
    PyPISimple,
    UnsupportedContentTypeError,
    UnsupportedRepoVersionError,
)
from repository import Refused
from twine.commands.upload import upload
from twine.exceptions import InvalidDistribution, TwineException
from twine.package import PackageFile
from twine.settings import Settings
from twine.utils import DEFAULT_REPOSITORY

TIMEOUT_SECONDS = 60


class Index:
    """An index, as pip reads it and, where it has a URL of its own, as twine sends to it."""

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.address = re.sub(r"legacy/$", "", url.rstrip("/") + "/") + "simple/" if url else public_index()
        with self.answering():
            self.settings = twine_settings(url) if url else None
            session = self.settings.create_repository().session if self.settings else None
        self.client = PyPISimple(self.address, session=session)

    def __str__(self) -> str:
        return re.sub("//[^/@]*@", "//", self.url or self.address)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Whatever goes wrong between here and the index, told in one line."""
        try:
            yield
        except requests.HTTPError as error:
            answer = error.response
            said = f"{answer.status_code} {answer.reason}" if answer is not None else "with an error"
            raise Refused(f"{self} answers {said}") from error
        except requests.RequestException as error:
            raise Refused(f"{self} cannot be reached ({type(error).__name__})") from error
        except (UnsupportedContentTypeError, UnsupportedRepoVersionError, DigestMismatchError) as error:
            raise Refused(f"{self} is no index that pip could read ({type(error).__name__})") from error
        except TwineException as error:
            raise Refused(f"{self}: twine says: {str(error).strip().splitlines()[0]}") from error

    def files(self, name: str) -> list[DistributionPackage]:
        """What the index holds under a name, the newest version last."""
        with self.answering():
            try:
                page = self.client.get_project_page(name, timeout=TIMEOUT_SECONDS)
            except NoSuchProjectError:
                return []
        return sorted(page.packages, key=version_of)

    def metadata(self, file: DistributionPackage) -> RawMetadata:
        """The metadata of a file, from the file itself where the index does not keep it apart."""
        with self.answering():
            try:
                kept = self.client.get_package_metadata_bytes(file, verify=False, timeout=TIMEOUT_SECONDS)
                return parse_email(kept)[0]
            except NoMetadataError:
                pass
            with tempfile.TemporaryDirectory() as scratch:
                path = Path(scratch, file.filename)
                self.client.download_package(file, path, verify=bool(file.digests), timeout=TIMEOUT_SECONDS)
                try:
                    return PackageFile.from_filename(str(path), None).metadata
                except InvalidDistribution:
                    return {}

    def require_upload_rights(self) -> None:
        """Send an upload without a file, which no index keeps, to learn of a wrong password before the tag is set."""
        if self.settings is None:
            return
        with self.answering():
            form = {":action": "file_upload", "protocol_version": "1"}
            answer = self.client.s.post(str(self.url), data=form, allow_redirects=False, timeout=TIMEOUT_SECONDS)
            if answer.is_redirect or answer.status_code in (401, 403, 404, 405):
                raise requests.HTTPError(response=answer)

    def send(self, file: Path) -> None:
        if self.settings is not None:
            with self.answering():
                upload(self.settings, [str(file)])


def public_index() -> str:
    """The public index, or what pip is configured to ask in its place."""
    configured = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    return os.environ.get("PIP_INDEX_URL") or configured.stdout.strip() or PYPI_SIMPLE_ENDPOINT


def twine_settings(url: str) -> Settings:
    """twine's own reading of its command line, its variables and its configuration."""
    if urlsplit(url).hostname in {urlsplit(known).hostname for known in (DEFAULT_REPOSITORY, PYPI_SIMPLE_ENDPOINT)}:
        raise Refused("only the workflow publishes to the public index: leave --index out, and push the tag")
    parser = argparse.ArgumentParser()
    Settings.register_argparse_arguments(parser)
    options = ["--repository-url", url, "--non-interactive", "--disable-progress-bar"]
    return Settings.from_argparse(parser.parse_args(options))


def version_of(file: DistributionPackage) -> Version:
    try:
        return Version(file.version or "")
    except InvalidVersion:
        return Version("0.dev0")
