"""Secrets are cut out of what is stored and shown, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.study_folders import opened
from workbench.record.redact import redact


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("postgresql+psycopg://me:a/b:c@host:5432/db?x=1", "postgresql+psycopg://***@host:5432/db?x=1"),
        ("postgresql://me@host:5432/db", "postgresql://***@host:5432/db"),
        ("postgresql://host/db?user=me&password=pw&x=1", "postgresql://host/db?user=me&password=***&x=1"),
        ("train.py --ledger postgresql://me:pw@host/db --lr 1", "train.py --ledger postgresql://***@host/db --lr 1"),
        ("git clone https://ghp_abc@host/x", "git clone https://***@host/x"),
        ("mysql://me:p@a/b@host:5432/db", "mysql://***@host:5432/db"),
        ("python x.py 'postgresql://me:two words@host/db' --lr 1", "python x.py 'postgresql://***@host/db' --lr 1"),
        ("PGPASSWORD='two words' python train.py", "PGPASSWORD=*** python train.py"),
        ("DB_PASSWORD=pw train.py --db-password pw --lr 1", "DB_PASSWORD=*** train.py --db-password *** --lr 1"),
        ("run --hub-token='pw pw' --client_secret pw", "run --hub-token=*** --client_secret ***"),
        ("credentials: pw", "credentials: ***"),
        ("mysql://root:%40pw@h/d", "mysql://***@h/d"),
        ("postgresql://host/db?pwd=pw&sslpassword=pw", "postgresql://host/db?pwd=***&sslpassword=***"),
        ("https://me:to@ken@host/x", "https://***@host/x"),
        ("host=h password = pw user=me", "host=h password = *** user=me"),
        ("run --token pw --steps 5", "run --token *** --steps 5"),
        ("{'hf_token': 'pw', 'lr': 1}", "{'hf_token': ***, 'lr': 1}"),
        ('{"api_key": "pw"}', '{"api_key": ***}'),
        ("AWS_ACCESS_KEY_ID=pw train.py", "AWS_ACCESS_KEY_ID=*** train.py"),
        ("https://host/x?access_token=pw&y=1", "https://host/x?access_token=***&y=1"),
        ("API_KEY=pw workbench diagnose x", "API_KEY=*** workbench diagnose x"),
        ("train.py --auth me:pw --key=pw --pass pw -pwd pw", "train.py --auth *** --key=*** --pass *** -pwd ***"),
        ("curl -H 'Authorization: Bearer pw' x", "curl -H 'Authorization: Bearer ***' x"),
        ("train.py hf_abcdefghijklmnopqrst1 --lr 1", "train.py *** --lr 1"),
        ("ghp_0123456789abcdefABCDEF", "***"),
        ("https://host/x?sig=pw&key=pw&keyed=1", "https://host/x?sig=***&key=***&keyed=1"),
        *[(same, same) for same in (
            "train.py sk-learn-pipeline hf_text_generation_model", "the bearer", "--key-frames 5", "--passes 3 --author me",
            "train.py --password --lr 1", "https://host:8080/x@v1", "pip install git+https://host/x@v1",
            "workbench diagnose file.py:name --steps 120", "train.py --tokenizer bert --max-tokens 512 --n_tokens=8",
            "every token of the text", "password authentication failed",
        )],
    ],
)  # fmt: skip
def test_a_secret_is_cut_out_and_nothing_else(given: str, shown: str) -> None:
    assert redact(given) == shown


def test_a_note_keeps_no_secret_and_a_patch_is_its_owners_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.record.repro.git_state", lambda _: ("abc", b"patch"))
    opened(tmp_path / "s", note="run of train.py --api-key=pw").close()
    assert json.loads((tmp_path / "s" / "study.json").read_text())["note"] == "run of train.py --api-key=***"
    assert (tmp_path / "s" / "repro.patch").stat().st_mode & 0o777 == 0o600
