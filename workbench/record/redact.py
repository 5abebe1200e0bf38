"""The one place that knows what a secret looks like: in what is stored, shown or logged it is `***`."""

from __future__ import annotations

import re

_DATABASE = r"\b(?:postgres(?:ql)?|mysql|mariadb|mssql|oracle|redis|mongodb)[\w+]*"
_WORD = r"[\w-]*(?:token(?!s|i[sz])|password|passwd|secret|(?:api|access)[_-]?key|credentials?)[\w-]*"
"""A name of a secret; "max_tokens" and "tokenizer" are none."""
_VALUE = r"(?:'[^']*'|\"[^\"]*\"|[^\s&'\"]+)"
_SECRETS = (  # up to the last @ of a word: a password may hold one that nobody wrote as %40
    re.compile(rf"(?P<keep>(?P<quote>['\"]){_DATABASE}:/*)[^\s:/@]*:(?:(?!(?P=quote)).)*(?=@)", re.I),
    re.compile(rf"(?P<keep>{_DATABASE}:/*)[^\s:/@]*:\S*(?=@)", re.I),
    re.compile(r"(?P<keep>\b[\w+.-]+://)[^\s/]+(?=@)"),
    re.compile(rf"(?P<keep>[?&]pwd=|{_WORD}['\"]?\s*[=:]\s*){_VALUE}", re.I),
    re.compile(rf"(?P<keep>(?<!\w)--?{_WORD}\s+)(?!-){_VALUE}", re.I),
)


def redact(text: object) -> str:
    """Return a text with what may be a secret as `***`.

    That is whoever is named before the @ of an address, with their password; the value of a password, token, key or credential, as
    `name=value`, `name: value` or `--name value`.
    """
    line = str(text)
    for pattern in _SECRETS:
        line = pattern.sub(r"\g<keep>***", line)
    return line
