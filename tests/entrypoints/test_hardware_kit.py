"""The hardware kit's frame: processes that fail, privacy, archives of strangers, and the reader."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import pickle
import socket
import tarfile
import tempfile
import time

import pytest

from ascend_vllm.entrypoints import cli
from ascend_vllm.tools.doctor.kit import archive, reader
from ascend_vllm.tools.doctor.kit.private import KNOWN_VARIABLES, Redactor
from ascend_vllm.tools.doctor.kit.rows import Report, ReportError, Row, Status
from ascend_vllm.tools.doctor.kit.run import Kit
from ascend_vllm.tools.doctor.kit.table import STEPS, Step

FAULTS = Step("faults", "tests.entrypoints.kit_steps", "what goes wrong", 30, case_seconds=1, needs_device=False)
GOSSIP = Step("gossip", "tests.entrypoints.kit_gossip", "what is told", 30, needs_device=False)


def run_kit(*steps: Step) -> tuple[Report, Kit, list[str]]:
    lines: list[str] = []
    kit = Kit(steps, lines.append)
    return kit.run(), kit, lines


def test_a_fault_ends_one_case() -> None:
    report, kit, lines = run_kit(FAULTS, dataclasses.replace(FAULTS, name="gone", module="tests.entrypoints.nothing"))
    rows = {row.name: row for row in report.rows}
    assert {name: row.status for name, row in rows.items()} == {
        "faults: works": "ok",
        "faults: computes wrongly": "wrong",
        "faults: raises": "failed",
        "faults: dies": "crashed",
        "faults: hangs": "hung",
        "faults: has a variable": "ok",
        "faults: has it no more": "ok",
        "gone: start": "failed",
    }
    assert rows["faults: works"].numbers == {"time_us": 12.0}
    assert rows["faults: computes wrongly"].message == "the error is 0.5, 0.25 are allowed"
    assert rows["faults: raises"].message == "ValueError: no such operator\nin line 2"
    assert rows["faults: dies"].message.startswith("its process ended with SIGSEGV")
    assert "No module named" in rows["gone: start"].message
    # what a step wrote is kept if something failed in it
    assert "no such operator" in kit.logs["faults"]
    assert lines[0] == "[1/2] faults: what goes wrong" and "    ok       works" in lines


def test_variables_of_a_step_and_its_temporary_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables are those of its processes, and what is left in their temporary directory is removed."""
    # a place of its own, since other tests make and remove directories in the common one
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    step = Step("places", "tests.entrypoints.kit_places", "", 30, needs_device=False, variables={"INFER_MODE": "x"})
    report, _, _ = run_kit(step)
    (row,) = report.rows
    assert (row.status, row.facts["mode"]) == ("ok", "x")
    assert row.numbers["left"] == 1
    assert not list(tmp_path.rglob("left-by-the-kit.txt"))


def test_a_step_that_has_taken_its_time_leaves_the_rest() -> None:
    report, _, _ = run_kit(dataclasses.replace(FAULTS, seconds=0.0))
    assert [(row.case, row.status) for row in report.rows] == [("rest", "skipped")]


def test_twenty_minutes_are_enough() -> None:
    assert sum(step.seconds for step in STEPS) <= 1200
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_without_a_device_only_versions_are_told(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On this machine, by the command; the reader then names what is missing."""
    file = tmp_path / "report.tgz"
    assert cli.main(["doctor", "--report", str(file)]) == 0
    assert "[1/" in capsys.readouterr().out
    report = Report.from_json(archive.read_archive(file)[archive.REPORT])
    statuses = {row.name: row.status for row in report.rows}
    assert statuses["versions: packages"] == "ok"
    assert all(status == "skipped" for name, status in statuses.items() if name.endswith(": start"))
    assert sum(name.endswith(": start") for name in statuses) == sum(step.needs_device for step in STEPS)
    assert cli.main(["doctor", "--read", str(file)]) == 1
    assert "is not in the report" in capsys.readouterr().out


SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnop",
    "OPENAI_API_KEY": "plainwordkey",
    "DATABASE": "postgres://reader:quux@db.example.org/x",
    "HOME": "/home/mueller",
    "USER": "mueller",
    "HOSTNAME": "rechner7",
    "http_proxy": "http://10.1.2.3:3128",
    "MODEL_DIR": "/data/projects/geheim/model",
    "SESSION": "0123456789abcdef0123456789abcdef01",
}
# of the values above, whatever stands around them
PRIVATE = (
    "hf_abc",
    "plainwordkey",
    "quux",
    "db.example",
    "mueller",
    "rechner7",
    "10.1.2.3",
    "geheim",
    "89abcdef0123",
)


def test_nothing_private_is_in_a_report(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HCCL_BUFFSIZE", "64")
    report, kit, lines = run_kit(GOSSIP)
    assert [row.status for row in report.rows] == ["ok", "failed"]
    told = "\n".join([report.to_json(), reader.table(report.rows), *kit.logs.values(), *lines])
    assert "HCCL_BUFFSIZE=64" in told and "kit_gossip" not in told
    for word in (*PRIVATE, socket.gethostname(), "/tmp/", str(pathlib.Path(__file__).parent)):
        assert word not in told, word


def test_what_is_redacted_and_what_is_not() -> None:
    variables = {
        "HOME": "/home/anna",
        "MY_TOKEN": "drache",
        "ASCEND_HOME_PATH": "/usr/local/Ascend/cann",
        "A": "true",
    }
    text = Redactor(variables, ["anna", "host-3"]).text
    assert text("anna@host-3 in /home/anna/x: drache, host-30") == "<name>@<name> in <name><path>: <value>, host-30"
    assert text('File "/opt/a/site-packages/ascend_vllm/envs.py", line 3') == 'File ".../ascend_vllm/envs.py", line 3'
    assert text("fe80::1:2 192.168.0.1 aa:bb:cc:dd:ee:ff a.b@c.de") == "<address> <address> <address> <mail>"
    assert text("Authorization: Bearer abc.def") == "Authorization: Bearer <token>"
    for plain in (
        "CANN 9.1.0 in /usr/local/Ascend/cann, driver 25.5.1, code 561002, c10::Error, aten::add, true",
        "7.9.0.1.238 3e-05 aclnnFusedInferAttentionScoreV3 at 12:30:00",
    ):
        assert text(plain) == plain
    known = {"HCCL_BUFFSIZE": "64", "LD_PRELOAD": "x", "INFER_MODE": "/home/anna"}
    assert Redactor(variables, []).variables(known) == {"HCCL_BUFFSIZE": "64", "INFER_MODE": "<name>"}
    assert not {name for name in KNOWN_VARIABLES if "KEY" in name or "TOKEN" in name or "PATH" in name}


ROW = Row("memory", "swap", Status.OK, {"error": 0.5, "nan": float("nan")}, {"order": "low first"}, "as is")


def test_a_report_survives_the_archive(tmp_path: pathlib.Path) -> None:
    report = Report("1.2", True, 3.5, (ROW,))
    files = {archive.REPORT: report.to_json(), f"{archive.LOGS}/memory.txt": "grüße"}
    archive.write_archive(tmp_path / "a.tgz", files)
    assert archive.read_archive(tmp_path / "a.tgz") == files
    kept = dataclasses.replace(ROW, numbers={"error": 0.5})
    assert Report.from_json(files[archive.REPORT]) == dataclasses.replace(report, rows=(kept,))
    with tarfile.open(tmp_path / "a.tgz") as members:
        assert {(member.uname, member.uid, member.mtime) for member in members} == {("", 0, 0)}


def tar(path: pathlib.Path, *members: tuple[tarfile.TarInfo, bytes]) -> pathlib.Path:
    with tarfile.open(path, "w:gz") as file:
        for member, content in members:
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def link(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return member


@pytest.mark.parametrize(
    "name", ["../report.json", "/tmp/report.json", "logs/../../x.txt", "report.pkl", "logs/a.txt/b", "logs/A B.txt"]
)
def test_other_names_are_refused(name: str, tmp_path: pathlib.Path) -> None:
    file = tar(tmp_path / "a.tgz", (tarfile.TarInfo(name), b"{}"))
    with pytest.raises(ReportError, match="something else in it"):
        archive.read_archive(file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tgz"]


def test_archives_of_strangers(tmp_path: pathlib.Path) -> None:
    info = tarfile.TarInfo
    with pytest.raises(ReportError, match="something else"):
        archive.read_archive(tar(tmp_path / "link.tgz", (link("report.json"), b"")))
    with pytest.raises(ReportError, match="something else"):
        archive.read_archive(tar(tmp_path / "twice.tgz", (info("report.json"), b"1"), (info("report.json"), b"2")))
    with pytest.raises(ReportError, match=r"no report\.json"):
        archive.read_archive(tar(tmp_path / "none.tgz"))
    with pytest.raises(ReportError, match="archive of texts"):
        archive.read_archive(tar(tmp_path / "binary.tgz", (info("report.json"), b"\xff\xfe")))
    bomb = tar(tmp_path / "bomb.tgz", (info("report.json"), bytes(200 << 20)))
    assert bomb.stat().st_size < 1 << 20
    begin = time.monotonic()
    with pytest.raises(ReportError, match="32 MiB when it is unpacked"):
        archive.read_archive(bomb)
    assert time.monotonic() - begin < 2
    for name, content, text in (
        ("plain.tgz", b"hello", "not compressed"),
        ("large.tgz", bytes(9 << 20), "larger than 8 MiB"),
        ("cut.tgz", bomb.read_bytes()[:100], "cut off"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ReportError, match=text):
            archive.read_archive(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        json.dumps({"form": 2}),
        json.dumps({"form": 1, "version": "1", "seconds": 1, "rows": [{}]}),
        json.dumps({"form": 1, "version": "1", "seconds": "1", "rows": []}),
        json.dumps({"form": 1, "version": "1", "seconds": 1, "rows": [{}] * 5000}),
        json.dumps({"form": 1, "version": "x" * 30_000, "seconds": 1, "rows": []}),
        '{"form": 1, "version": "1", "seconds": 1' + "0" * 400 + ', "rows": []}',
        pickle.dumps(ROW, protocol=0).decode("latin-1"),
    ],
)
def test_reports_of_strangers(text: str) -> None:
    with pytest.raises(ReportError):
        Report.from_json(text)


def test_a_terminal_does_not_act_on_a_report(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = dataclasses.replace(ROW, case="\x1b[2J\x07case", message="\x9b31m\nsecond", status=Status.WRONG)
    file = tmp_path / "a.tgz"
    archive.write_archive(file, {archive.REPORT: Report("1\x1b]0;x", False, 1, (row,)).to_json()})
    assert cli.main(["doctor", "--read", str(file)]) == 1
    text = capsys.readouterr().out
    assert "?[2J?case" in text and not {"\x1b", "\x07", "\x9b"} & set(text)


def test_files_that_cannot_be_read_or_written(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.tgz").write_text("no archive")
    for words, text in (
        (["--read", str(tmp_path / "none.tgz")], "cannot be read: No such file"),
        (["--read", str(tmp_path / "a.tgz")], "is no report of the doctor: it is not compressed by gzip"),
        (["--report", str(tmp_path / "none" / "a.tgz")], "cannot be written: No such file"),
        (["--report", "a.tgz", "--read", "b.tgz"], "not allowed with"),
    ):
        try:
            assert cli.main(["doctor", *words]) == 2
        except SystemExit as ended:
            assert ended.code == 2
        assert text in capsys.readouterr().err


def test_the_reader_names_what_disagrees() -> None:
    def row(case: str, status: Status = Status.OK, step: str = "memory", **facts: str) -> Row:
        return Row(step, case, status, {"time_us": 1500.0, "taken_bytes": 1 << 21}, facts)

    expected = Report(
        "1", True, 1, (row("a"), row("b", order="low"), row("c"), row("v", step="versions", x="1"), row("only there"))
    )
    report = Report(
        "1",
        False,
        9,
        (
            row("a", Status.FAILED),
            row("b", order="high"),
            row("c", Status.SKIPPED),
            row("v", step="versions", x="2"),
            row("swap", Status.FAILED),
            row("fill at 0.9", Status.WRONG),
        ),
    )
    found = [(row.case, how) for row, how in reader.disagreements(report, expected)]
    assert found == [
        ("a", "failed, and ok on the simulator"),
        ("b", "order is high, and low on the simulator"),
        ("fill at 0.9", "the documentation says: --gpu-memory-utilization 0.9 of the card can be allocated"),
        ("only there", "is not in the report"),
    ]
    text = reader.describe(report, expected)
    assert "! memory: a " in text and "  memory: c " in text and "4 rows disagree:" in text
    assert "time 1500 us, taken 2 MiB" in text
    assert reader.describe(expected, expected).endswith("0 rows disagree\n")
