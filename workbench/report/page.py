"""`write_report`: a diagnosis and its record as one HTML file that needs nothing else, not even a network.

The page asks for nothing from outside (its content policy forbids it) and works without JavaScript; every text that
comes from a record, a workload or a command line is escaped.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from workbench.findings.advice import ADVICE
from workbench.findings.causes import and_more, listed
from workbench.findings.diagnosis import MEASUREMENTS, Diagnosis, Finding
from workbench.plots.words import counted
from workbench.record.json_values import to_json
from workbench.record.parts import write_atomic
from workbench.report.drawn_figures import draw_figures, figures_section, write_figures
from workbench.report.html import STATUS, badge, card, folded, redact, table, text
from workbench.report.summary import summary
from workbench.topics.recommendation.next_steps import next_steps

__all__ = ["write_report"]


_SCRIPT = """
for (const button of document.querySelectorAll("button[data-copy]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copy);
    try { await navigator.clipboard.writeText(source.textContent); }
    catch { getSelection().selectAllChildren(source); document.execCommand("copy"); }
    button.textContent = "Copied";
  });
}
// Paper cannot be clicked: what is folded is printed open, but for evidence, which can be longer than all the rest.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not(.screen):not([open])")];
  for (const part of closed) part.open = true;
});
addEventListener("afterprint", () => { for (const part of closed) part.open = false; });
"""

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src '$script_hash'">
<title>$workload: $verdict</title>
<style>
$css
</style>
</head>
<body>
<main>
$body
</main>
<script>$script</script>
</body>
</html>
""")


def write_report(record: Any, diagnosis: Diagnosis, path: str | Path) -> Path:
    """Write the report, and its figures as SVG files into `figures/` beside it; return the report's path.

    Args:
        record: a `StudyRecord` or `TrialRecord`.
        diagnosis: what was found in it.
        path: the HTML file, or a folder, in which it becomes `report.html`.

    Raises:
        RecordError: a file cannot be written.
    """
    target = Path(path)
    if target.is_dir():
        target /= "report.html"
    figures = draw_figures(record, diagnosis)
    parts = (
        _head(record, diagnosis),
        _findings(diagnosis),
        _recommendation(record, diagnosis),
        _advice(record, diagnosis),
        figures_section(figures),
        _reproduce(record, diagnosis),
        _trials(record),
    )
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    page = _PAGE.substitute(
        script_hash=f"sha256-{digest}",
        workload=text(diagnosis.workload or record.workload),
        verdict=STATUS[diagnosis.verdict][1].lower(),
        css=resources.files("workbench.report").joinpath("report.css").read_text(encoding="utf-8"),
        body="\n".join(part for part in parts if part),
        script=_SCRIPT,
    )
    write_atomic(target, page.encode("utf-8"))
    write_figures(figures, target.parent / "figures")
    return target


def _head(record: Any, diagnosis: Diagnosis) -> str:
    """Title, verdict, what a colleague has to know who was not there, and what it cost."""
    counts = {s: sum(f.status == s for f, _ in listed(diagnosis.findings)) for s in STATUS}
    tally = ", ".join(f"{n} {STATUS[s][1].lower()}" for s, n in counts.items() if n) or "nothing was looked at"
    meaning = {
        "fail": "Something keeps this training from working as it could.",
        "warn": "It trains, but something deserves a look.",
        "not_measured": "No trouble was found, but part of it could not be measured.",
        "ok": "Everything that was looked for is absent.",
    }[diagnosis.verdict]
    if not diagnosis.findings:
        meaning = "This is no clean bill: there is no finding."
    return f"""<h1>{text(diagnosis.workload or record.workload)}</h1>
<p class="soft">{text(redact(_origin(record)))}</p>
<section class="verdict {diagnosis.verdict}" aria-label="Verdict">
{badge(diagnosis.verdict)}
<p>{meaning} Findings: {tally}{and_more(diagnosis.findings)}.</p>
{summary(record, diagnosis)}
{_cost(diagnosis)}
</section>"""


def _origin(record: Any) -> str:
    """What this page is, of which study, from which day."""
    study = getattr(record, "study", {})
    name = f" Study {study['name']}" if study.get("name") else ""
    day = f", {str(study['created'])[:10]}" if study.get("created") else ""
    note = f" Note: {str(study['note']).rstrip('.')}." if study.get("note") else ""
    return f"Training diagnosis.{name}{day}{'.' if name or day else ''}{note}"


def _cost(diagnosis: Diagnosis) -> str:
    cost = diagnosis.cost
    known = [
        f"{cost['steps']:,} training steps" if cost.get("steps") is not None else "",
        f"{cost['seconds']:,.1f} s" if cost.get("seconds") is not None else "",
        f"{cost['baseline_runs']:.1f} baseline runs" if cost.get("baseline_runs") is not None else "",
    ]
    shown = " · ".join(part for part in known if part)
    return f'<p class="soft small">Cost of this diagnosis: {shown}.</p>' if shown else ""


def _findings(diagnosis: Diagnosis) -> str:
    """One card a finding, causes first and what follows from them folded below; what was not measured is folded under its names, what is ok behind the measurements."""
    after = {f.code: then for f, then in listed(diagnosis.findings)}
    ranked = [f for f, _ in listed(diagnosis.findings)]
    unknown = [f for f in ranked if f.status == "not_measured"]
    fine = [f for f in ranked if f.status == "ok"]
    measured = [[f.code, f.value, f.unit or "", f.summary] for f in fine if f.code in MEASUREMENTS]
    parts = ["<h2>Findings</h2>", *(_alarm(f, after[f.code]) for f in ranked if f.status in ("fail", "warn"))]
    if unknown:
        title = f"{len(unknown)} not measured, with the reason: {', '.join(f.code for f in unknown)}"
        parts.append(folded(title, "\n".join(card(f, advice=False) for f in unknown)))
    if not ranked:
        parts.append("<p>Nothing was looked at.</p>")
    elif all(f.status == "ok" for f in ranked):
        parts.append("<p>No alarm.</p>")
    if measured:
        parts.append(f"<h2>Measured</h2>\n{table(('what', 'value', 'unit', 'in words'), measured)}")
    if fine:
        title = f"{counted(len(fine), 'finding')} without trouble, with evidence"
        parts.append(folded(title, "\n".join(card(f) for f in fine), kind="screen"))
    if ranked:
        parts.append(f'<p class="paper soft small">{_NOT_PRINTED}</p>')
    return "\n".join(parts)


def _alarm(finding: Finding, followers: Sequence[Finding]) -> str:
    """The card of an alarm, with the cards of what follows from it folded under their names."""
    if not followers:
        return card(finding, advice=False)
    title = f"From this {'follow' if len(followers) > 1 else 'follows'}: {', '.join(f.code for f in followers)}"
    return card(finding, advice=False, below=folded(title, "\n".join(card(f, advice=False) for f in followers)))


_NOT_PRINTED = (
    "Not printed: the evidence of each finding, and the findings without trouble. Both unfold in the page itself, "
    "and stand in diagnosis.json beside it."
)


_DONE = {
    str(ADVICE[name]): said
    for name, said in (("warmup", "warmup"), ("clipping", "clipping"), ("lower_lr", "a lower learning rate"))
}


def _advice(record: Any, diagnosis: Diagnosis) -> str:
    """What to try next: the advice of what stands for itself, causes first; above it what is done, and what was tried in vain."""
    steps = next_steps(record, diagnosis)
    said = {
        "The recommended config does this already": [step for step in steps if step.done],
        "Tried in this study, and not better": [step for step in steps if step.tried and not step.done],
    }
    parts = [
        f"<p>{title}: {text('; '.join(_DONE.get(step.line, step.line.rstrip('.')) for step in those))}.</p>"
        for title, those in said.items()
        if those
    ]
    items = [
        f'<li>{text(redact(step.line))} <span class="soft small">({text(step.code)})</span></li>'
        for step in steps
        if not step.done and not step.tried
    ]
    parts += ["<ol>", *items, "</ol>"] if items else []
    return "\n".join(["<h2>What to try next</h2>", *parts]) if parts else ""


def _recommendation(record: Any, diagnosis: Diagnosis) -> str:
    """The config to paste, and how it did against the baseline."""
    found = diagnosis.recommendation
    if not found:
        return ""
    changed = [str(name) for name in found.get("changed", ())]
    if not found.get("adopted"):
        said = "No change was proven better than the baseline, so this is the baseline's own config."
    elif changed:
        said = f"It changes {', '.join(changed)}."
    else:
        said = "It is the baseline's own: nothing asks for a change."
    reason = redact(str(found.get("reason") or ""))
    columns = ("", "baseline", "recommended" if found.get("adopted") else "candidate, not adopted")
    rows = _comparison(record.config, found, changed) if found.get("candidate") else []
    return f"""<h2>Recommended config</h2>
<p>{text(said)} {text(reason)}</p>
<div class="paste"><pre tabindex="0"><code id="config">{text(_source(found))}</code></pre>
<button type="button" data-copy="config" hidden>Copy</button></div>
{table(columns, rows) if rows else ""}"""


_SHOWN = {"noise": "noise between evaluations", "best_step": "step of the selected checkpoint"}


def _comparison(baseline: Mapping[str, Any], found: Mapping[str, Any], changed: list[str]) -> list[list[Any]]:
    """Rows of changed fields, then of results."""
    config, before, after = found.get("config") or {}, found.get("baseline") or {}, found.get("recommended") or {}
    rows = [[name, to_json(baseline.get(name)), to_json(config.get(name))] for name in changed]
    return rows + [
        [_SHOWN.get(name, name), to_json(before.get(name)), to_json(after.get(name))]
        for name in dict.fromkeys([*before, *after])
        if name != "noise_known"
    ]


def _source(found: Mapping[str, Any]) -> str:
    """Python that builds the config; where functions of the user's own are in it, it starts from the workload's."""
    paste = str(found.get("paste") or "")
    if paste.startswith("TrainConfig("):
        return f"from workbench import TrainConfig\n\nconfig = {paste}"
    if paste:
        return f"# workload is the one of this report: its config holds functions of its own, which stay.\nconfig = {paste}"
    return "# This diagnosis was kept without a config to paste; run the diagnosis again."


def _reproduce(record: Any, diagnosis: Diagnosis) -> str:
    """The exact command and what it ran on."""
    command = diagnosis.command or record.command
    study = getattr(record, "study", {})
    facts = [f"{name} {version}" for name, version in study.get("versions", {}).items()]
    if study.get("commit"):
        facts.append(f"commit {study['commit']}")
    line = text(redact(command)) if command else "(started from Python; the command was not recorded)"
    return f"""<h2>Reproduce</h2>
<div class="paste"><pre tabindex="0"><code id="command">{line}</code></pre>
<button type="button" data-copy="command" hidden>Copy</button></div>
{f'<p class="soft small">{text(" · ".join(facts))}</p>' if facts else ""}"""


_TRIAL_COLUMNS = {
    "trial": "trial",
    "stage": "stage",
    "state": "state",
    "peak_lr": "peak lr",
    "warmup_steps": "warmup steps",
    "max_grad_norm": "max grad norm",
    "optimizer": "optimizer",
    "seed": "seed",
    "steps_run": "steps run",
    "best_step": "best step",
    "best_value": "best value",
    "seconds": "seconds",
}


def _trials(record: Any) -> str:
    """The study table."""
    trials = record.trials
    columns = [name for name in _TRIAL_COLUMNS if name in trials]
    if trials.empty or not columns:
        return "<h2>Study</h2>\n<p>No trial was recorded.</p>"
    rows = [[to_json(value) for value in row] for row in trials[columns].itertuples(index=False)]
    shown = table([_TRIAL_COLUMNS[name] for name in columns], rows)
    return "<h2>Study</h2>\n" + folded(f"All {counted(len(rows), 'trial')}", shown)
