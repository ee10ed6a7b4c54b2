"""Where the copy of a remote repository is."""

import hashlib
import os
import re
from pathlib import Path

_PASSWORD = re.compile(r"[^:]+://[^/@]*:[^/]*@")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+", re.DOTALL)


def is_url(text: object) -> bool:
    """Whether a repository's address is a URL, and no directory."""
    return isinstance(text, str) and _URL.fullmatch(text) is not None


def has_password(text: object) -> bool:
    """Whether it is a URL with a password, as in https://user:password@host/path."""
    return is_url(text) and _PASSWORD.match(str(text)) is not None


def copy_of(url: str, cache: Path | None) -> Path:
    """The directory for the copy of a repository: in `models.cache`, or in the user's directory for caches."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "greenlane")
    named = re.sub(r"[^A-Za-z0-9]+", "-", url)[:60].strip("-")
    return (cache or own) / "repositories" / f"{named}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
