"""The page that follows a study: for whoever has its token, on this machine, of what is on disk now."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
from pathlib import Path

import pytest

import workbench as wb
from tests.helpers.workloads import small_workload
from workbench.cli import main
from workbench.studies.session import open_session
from workbench.views import watch_page
from workbench.views.watch_page import WatchServer, serving, study_body, study_curves


def get(server: WatchServer, path: str, **headers: str) -> tuple[int, str]:
    line = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    line.request("GET", path, headers={"Host": f"127.0.0.1:{server.server_port}", **headers})
    answer = line.getresponse()
    said = answer.read().decode()
    assert "default-src 'none'" in str(answer.getheader("Content-Security-Policy"))
    assert answer.getheader("Cache-Control") == "no-store"
    line.close()
    return answer.status, said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    record = wb.lr_sweep.Study(lrs=[0.01, 0.1]).run(small_workload(), out=tmp_path / "sweep")
    return record.path


def test_only_who_has_the_token_and_asks_this_machine_sees_anything(folder: Path) -> None:
    with serving(folder) as server:
        assert server.server_address[0] == "127.0.0.1"
        key = f"token={server.token}"
        for path, headers in (
            ("/", {}),
            ("/?token=", {}),
            ("/now?token=wrong", {}),
            (f"/now?{key}", {"Host": "evil.example"}),
            (f"/now?{key}x", {}),
        ):
            status, said = get(server, path, **headers)
            assert (status, "sweep" in said) == (403, False), path
        assert get(server, f"/../../etc/passwd?{key}")[0] == 404
        status, page = get(server, f"/?{key}")
        assert status == 200
        assert "src=" not in page
        assert server.token not in page, "the page takes it from its own address"
        assert server.address == f"http://127.0.0.1:{server.server_port}/?{key}"


def test_it_shows_what_is_on_disk_now(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr(watch_page, "study_body", lambda path: drawn.append(path) or study_body(path))
    with serving(folder) as server:
        where = f"/now?token={server.token}"
        first = get(server, where)[1]
        assert "<p>Lowest validation/loss" in first, "the curves above count the trials"
        assert "<svg" in first
        assert "lr.best" in first
        assert get(server, where)[1] == first
        assert len(drawn) == 1, "drawn again only where the study has changed"
        wb.lr_sweep.Study(lrs=[0.01, 0.1, 0.3]).run(small_workload(), out=folder.parent / "longer")
        shutil.copytree(folder.parent / "longer", folder, dirs_exist_ok=True)
        assert "in trial 2 at lr 0.3" in get(server, where)[1]
        shutil.rmtree(folder)
        status, said = get(server, where)
        assert (status, "there is no folder" in said) == (200, True)


def test_it_says_how_far_a_study_is_and_that_it_stopped(tmp_path: Path) -> None:
    folder, workload = tmp_path / "s", small_workload()

    def told() -> tuple[bool, str, int, bool]:
        content, _ = json.loads(study_curves(folder))
        status = content["status"]
        return content["still"], status["plan"], status["planned"], (status["rate"] or 0.0) > 0.0

    def stop_early() -> None:
        with open_session(workload, stem="lr_sweep", settings={}, out=folder) as session:
            session.plan(4.0, ("before training", "baseline", "search", "proof"))
            session.stage("baseline")
            session.trial(session.config, stage="baseline")
            assert told() == (False, "2 of 4: baseline", planned, True)
            raise RuntimeError

    planned = 4 * workload.config.total_steps
    with pytest.raises(RuntimeError):
        stop_early()
    assert told() == (True, "2 of 4: baseline", planned, True)
    assert re.search(
        r"Training stopped at \d\d:\d\d before its end; the same command or cell resumes it", study_body(folder)
    )
    with open_session(workload, stem="lr_sweep", settings={}, out=folder):
        pass
    assert told() == (True, "baseline", 0, False)
    assert "stopped" not in study_body(folder)


@pytest.mark.parametrize("looks", [0, 1])
def test_a_file_that_vanishes_while_it_is_looked_at_drops_no_request(
    looks: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "leaving.tmp").write_text("")
    stat, seen = Path.stat, []

    def gone(path: Path, **options: bool) -> os.stat_result:
        if path.name == "leaving.tmp":
            seen.append(path)
            if len(seen) > looks:
                path.unlink(missing_ok=True)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", gone)
    with serving(folder) as server:
        status, said = get(server, f"/now?token={server.token}")
    assert (status, "Lowest validation/loss" in said, bool(seen)) == (200, True, True)


def test_a_folder_that_is_not_there_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "runs/nowhere"]) == 2
    assert "there is no folder runs/nowhere" in capsys.readouterr().err
