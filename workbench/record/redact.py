"""The one place that knows what a secret looks like: in what is stored, shown or logged it is `***`."""

from __future__ import annotations

import re

_DATABASE = r"\b(?:postgres(?:ql)?|mysql|mariadb|mssql|oracle|redis|mongodb)[\w+]*"
_WORD = r"[\w-]*(?:token(?!s|i[sz])|password|passwd|secret|(?:api|access)[_-]?key|credentials?)[\w-]*"
"""A name of a secret; "max_tokens" and "tokenizer" are none."""
_VALUE = r"(?:'[^']*'|\"[^\"]*\"|[^\s&'\"]+)"
_KNOWN = r"\b(?:(?:hf_|gh[opsu]_|github_pat_|glpat-|sk-(?:proj-)?|AKIA)[A-Za-z0-9]{16,}\w*|xox[abp]-\d{8,}[\w-]*)"
"""How the tokens of Hugging Face, GitHub, GitLab, OpenAI, Slack and AWS begin."""
_SECRETS = (  # up to the last @ of a word: a password may hold one that nobody wrote as %40
    re.compile(rf"(?P<keep>(?P<quote>['\"]){_DATABASE}:/*)[^\s:/@]*:(?:(?!(?P=quote)).)*(?=@)", re.I),
    re.compile(rf"(?P<keep>{_DATABASE}:/*)[^\s:/@]*:\S*(?=@)", re.I),
    re.compile(r"(?P<keep>\b[\w+.-]+://)[^\s/]+(?=@)"),
    re.compile(rf"(?P<keep>){_KNOWN}"),
    re.compile(rf"(?P<keep>\bBearer\s+){_VALUE}", re.I),
    re.compile(rf"(?P<keep>[?&](?:pwd|key|sig|X-Amz-Signature)=|{_WORD}['\"]?\s*[=:]\s*){_VALUE}", re.I),
    re.compile(rf"(?P<keep>(?<!\w)--?(?:{_WORD}\s+|(?:auth|key|pass|passphrase|pwd)(?:=|\s+)))(?!-){_VALUE}", re.I),
)


def redact(text: object) -> str:
    """Return a text with what may be a secret as `***`.

    That is whoever is named before the @ of an address, with their password; the value of a password, token, key or credential, as
    `name=value`, `name: value` or `--name value`; what follows "Bearer"; and tokens that are known by how they begin.
    """
    line = str(text)
    for pattern in _SECRETS:
        line = pattern.sub(r"\g<keep>***", line)
    return line
