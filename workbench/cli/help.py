"""The words of the `workbench` command: what each of its commands takes and answers, examples, and where to go next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Option = tuple[tuple[str, ...], dict[str, Any]]
"""Names and further arguments of `ArgumentParser.add_argument`."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """Options and help of one command; options in the order of the help, a list of them excludes each other, a text heads those below it."""

    line: str
    options: tuple[Option | list[Option] | str, ...]
    description: str
    epilog: str


def _option(name: str, metavar: Any, help: str, *, long: str | None = None, **more: Any) -> Option:
    known = {"metavar": metavar} if metavar else {}
    return (name, long) if long else (name,), {**known, "help": help, **more}


AT_OR_ABOVE = {"fail": ("fail",), "warn": ("fail", "warn")}
"""The verdicts that `--fail-on` makes an exit code of 3."""
_FAIL_ON = _option("--fail-on", None, "exit with 3 on this verdict or a worse one", choices=tuple(AT_OR_ABOVE))


FOR_WORKLOAD, FOR_COMMAND = "for a workload", "for a command after --"
"""Headings of options that one kind of training has; the other refuses them."""

MAIN_HELP = """\
Is this training healthy, and what should I try next?
Points the deep-learning tuning playbook at a workload: verdicts with evidence, and the config to train with.

start here:
  workbench diagnose digits_cnn        a bundled workload: verdict, report and config, in minutes
  workbench diagnose mine.py:workload  your own model, data and config
  workbench lab                        the same, step by step, in notebooks"""

EXIT_CODES = """\
exit codes:
  0  it ran, whatever the verdict   1  it could not finish   2  wrong usage, or a name that is not there
  3  the verdict reached --fail-on                           130  interrupted; the same command resumes

`workbench COMMAND --help` shows examples. WORKBENCH_DEBUG=1 shows the traceback of an error."""

# fmt: off
HELP = {
    "diagnose": Command(
        line="is this workload's training healthy, and which config is better?",
        options=(
            _option("workload", "WORKLOAD", "bundled name, package.module:attribute or file.py:attribute; or a command after --", nargs="?"),
            _option("rest", "ARG", "arguments of a command after --", nargs="*"),
            "what it may cost",
            _option("--budget", "B", "3x (baseline runs), 45m, 2h, none; 0.5x is a first look (default: 10x, and 6x with --seeds 1)"),
            _option("--steps", "N", "updates of a trial (default: the workload's own)", type=int),
            _option("--seeds", "N", "trials that prove a better config (default: 3)", type=int, default=3),
            "what is kept and shown",
            _option("--out", "DIR", "folder of the study (default: a new one in runs/)"),
            _option("--study", "NAME", "name of the study (default: that of its folder)"),
            _option("--note", "TEXT", "why this was run; kept with the study (default: generated)"),
            _option("--open", None, "open the report in a browser at the end", action="store_true"),
            _FAIL_ON,
            "where it is trained",
            _option("--executor", "E", "local or ray (default: local)", default="local"),
            _option("--address", "A", "host:port of a Ray cluster (default: one on this machine)"),
            FOR_WORKLOAD,
            _option("--device", "D", "auto, cpu, cuda, cuda:1, mps (default: auto)", default="auto"),
            _option("--trainer", "T", "local, parameter_server (default: local)", default="local", choices=("local", "parameter_server")),
            FOR_COMMAND,
            _option("--metric", "M", "'val loss ([0-9.]+)' in its output, a name given to wb.log, or train_loss"),
            _option("--metric-mode", "D", "min or max (default: by the metric's name)", choices=("min", "max")),
            _option("--redirect", "PATH", "what it writes to; each run gets an empty one", action="append", default=[]),
            _option("--copy", None, "run each trial in a copy of this folder", action="store_true"),
            _option("--seed-arg", "ARG", "its own argument for the seed, as --seed"),
            _option("--jobs", "N", "runs at a time (default: 1)", type=int, default=1),
            _option("--threads", "N", "threads of each run (default: its own)", type=int),
            _option("--timeout", "S", "seconds that a run may take", type=float),
        ),
        description="""\
Walks the playbook: checks before training, a learning-rate sweep, instability above the best learning rate,
a probe evaluated at every step, then the fixes that the symptoms suggest, compared with your baseline.
Writes diagnosis.json, report.html and figures/ into the study's folder and prints a config to paste.""",
        epilog="""\
examples:
  workbench diagnose -- python train.py --epochs 3    # your script as it is, nothing changed
  workbench diagnose --metric 'val loss ([0-9.]+)' -- torchrun --nproc-per-node 2 train.py
  workbench diagnose digits_cnn
  workbench diagnose mine.py:workload --steps 2000 --note "after the new augmentation"
  workbench diagnose package.module:workload --device cuda --fail-on fail    # in CI: 3 when it fails
  workbench diagnose mine.py:workload --executor ray --address 127.0.0.1:6379    # trials on a Ray cluster

After the colon: the name of a Workload in that file, or of a function without arguments that returns one. The same
command again resumes.
next: open the report; `workbench studies` puts it beside the others.""",
    ),
    "plan": Command(
        line="what would a diagnosis train, what would it tell, and what would it cost?",
        options=(
            _option("workload", "WORKLOAD", "as for diagnose; or a command after --", nargs="?"),
            _option("rest", "ARG", "arguments of a command after --", nargs="*"),
            _option("--budget", "B", "as for diagnose"),
            _option("--steps", "N", "updates of a trial (default: the workload's own)", type=int),
            _option("--seeds", "N", "trials that prove a better config (default: 3)", type=int, default=3),
            _option("--device", "D", "auto, cpu, cuda, cuda:1, mps (default: auto)", default="auto"),
        ),
        description="""\
Prints the parts of a diagnosis in their order with what each costs, in baseline runs, updates and time, and what would
stay not measured. A few updates of the workload are timed for it; nothing is kept.""",
        epilog="""\
examples:
  workbench plan digits_cnn
  workbench plan mine.py:workload --budget 3x
  workbench plan mine.py:workload --budget 0.5x    # a first look, in runs a fraction of the baseline's length

next: workbench diagnose with the same arguments.""",
    ),
    "judge": Command(
        line="what do the logs of a training made elsewhere show?",
        options=(
            _option("path", "PATH", "a log, or a folder with one or several; several are trials of one sweep", nargs="+"),
            _option("--loss", "NAME", "column of the training loss (default: by its usual names)"),
            _option("--lr", "NAME", "column of the learning rate, or the learning rate where it was constant"),
            _option("--step", "NAME", "column of the step"),
            _option("--grad-norm", "NAME", "column of the gradient's norm before clipping"),
            _option("--validation", "NAME", "column of the validation loss"),
            _option("--max-grad-norm", "X", "norm at which gradients were clipped", type=float),
            _option("--steps", "N", "planned updates of a run (default: the log's own)", type=int),
            _option("--out", "DIR", "new folder for a study with diagnosis.json and report.html"),
            _FAIL_ON,
        ),
        description="""\
Reads CSV files, JSON lines, TensorBoard event files, offline runs of W&B, Lightning's metrics.csv and Hugging Face's
trainer_state.json. Judges what loss, learning rate, gradient norm and validation values show: instability, the
schedule, clipping, overfitting, and from several runs the best learning rate. What they cannot show is not measured.""",
        epilog="""\
examples:
  workbench judge lightning_logs/version_0
  workbench judge outputs/checkpoint-500 --fail-on fail    # in CI: 3 when it fails
  workbench judge runs/lr_0.01 runs/lr_0.03 runs/lr_0.1    # three event files: a sweep
  workbench judge metrics.csv --loss ce --lr 0.001 --out runs/judged

next: workbench diagnose, which trains a workload, measures what no log holds.""",
    ),
    "input": Command(
        line="does training wait for its data, why, and what would help?",
        options=(
            _option("target", "TARGET", "a workload, or a DataLoader as module:name or file.py:name"),
            [
                _option("--step", "NAME", "for a loader: a function of one batch, as module:name or file.py:name"),
                _option("--step-s", "S", "for a loader: seconds that your step takes", type=float),
            ],
            _option("--out", "DIR", "folder for diagnosis.json, trace.json and figures/"),
            _option("--device", "D", "of a workload's step (default: auto)", default="auto"),
            _option("--seconds", "S", "seconds to measure, about (default: 20)", type=float, default=20.0),
            _option("--max-workers", "N", "worker processes to try (default: 8)", type=int, default=8),
            _option("--timeout", "S", "seconds that a batch may take (default: 60)", type=float, default=60.0),
            _FAIL_ON,
        ),
        description="""\
Times a loader and its step, splits the time into waiting and computing, and finds the cause by short ablations:
latency, preprocessing, collating, synchronisation, workers that restart, too few workers, features nobody reads.
The change that should help is tried, and its predicted gain is compared with the measured one.""",
        epilog="""\
examples:
  workbench input digits_mlp    # a workload: its own loader and step
  workbench input train.py:loader --step train.py:step    # your DataLoader, and a function that trains on one batch
  workbench input train.py:loader --step-s 0.05 --out runs/input    # a step of 50 ms; a trace for ui.perfetto.dev
  workbench input package.module:make_loader --step-s 0.05 --fail-on warn    # in CI: 3 when training waits

Without a step it is unknown whether a loader is too slow; where its time goes is measured all the same.
The step runs several hundred times: pass a throw-away copy of the model.
next: change what the advice names, and run it again""",
    ),
    "list": Command(
        line="what can be diagnosed or run here?",
        options=(),
        description="Shows the bundled workloads and the notebooks in ./notebooks.",
        epilog="next: workbench diagnose WORKLOAD, or workbench describe NOTEBOOK",
    ),
    "describe": Command(
        line="what does a notebook answer, and what can be set in it?",
        options=(_option("notebook", "NOTEBOOK", "path, or a name in ./notebooks"),),
        description="Shows a notebook's question and its parameters with type, default and help, without running it.",
        epilog="""\
examples:
  workbench describe lr_sweep
  workbench describe notebooks/01_lr_sweep.ipynb

next: workbench run NOTEBOOK -p name=value""",
    ),
    "run": Command(
        line="run a notebook, once or over a grid of its parameters, and read the verdicts",
        options=(
            _option("notebook", "NOTEBOOK", "path, or a name in ./notebooks"),
            _option("-p", "NAME=VALUE", "may be repeated", long="--parameter", action="append", default=[]),
            _option("--sweep", "NAME=V1,V2,...", action="append", default=[],
                help="one run per value; repeated: every combination; lists in brackets, 'lrs=[0.1],[0.1,0.2]'"),
            _option("--out", "PATH", "a file.ipynb for the executed copy, or a folder for copies and summary "
                "(default: a new one in runs/notebooks/)"),
            _FAIL_ON,
        ),
        description="""\
Runs a notebook from top to bottom in this folder, keeps the executed copy and a page of it, and prints the verdicts.
--sweep runs it many times, one after the other, and puts all verdicts into one table. Names, types and values are
checked before anything runs. A name is looked up in ./notebooks, so it works in the folder that holds notebooks/
only; the path of an .ipynb file works anywhere.""",
        epilog="""\
examples:
  workbench run quickstart
  workbench run lr_sweep -p workload=digits_mlp -p seeds=3 --out sweep.ipynb
  workbench run quickstart -p workload=mine.py:workload --fail-on fail    # in CI: 3 when it fails, 1 when it crashes
  workbench run lr_sweep --sweep workload=digits_mlp,digits_cnn --sweep steps=300,1000    # four runs, one table
  workbench run lr_sweep --sweep 'lrs=[0.1],[0.1,0.2]' --out runs/notebooks/lists         # a list stands in brackets

A run that crashes stops none of the others; the exit code is 1 then, and 3 where all ran and a verdict reached --fail-on.
Ctrl-C lets the cell that runs save what it has; the same command with the same --out folder keeps what is complete.
next: open summary.html or a copy in JupyterLab, or `workbench studies`""",
    ),
    "report": Command(
        line="write a study's report again from what is on disk",
        options=(_option("dir", "DIR", "folder of a study"),),
        description="""\
Writes report.html, and its figures as SVG files in figures/, of a finished, running or interrupted study.""",
        epilog="example:\n  workbench report runs/digits_cnn",
    ),
    "watch": Command(
        line="a page that follows a study while it trains",
        options=(
            _option("dir", "DIR", "folder of a study"),
            _option("--port", "N", "port on this machine (default: a free one)", type=int, default=0),
            _option("--open", None, "open the page in a browser", action="store_true"),
        ),
        description="""\
Serves a page with the curves, verdict and trials of a study, on this machine only and behind a token. The page follows a
study that any process writes, and survives a restart of that process, of a notebook and of the browser. Ctrl-C ends it.""",
        epilog="example:\n  workbench watch runs/digits_cnn\nfrom another machine: ssh -L 8000:127.0.0.1:8000 HOST, and --port 8000",
    ),
    "studies": Command(
        line="what was run here, and what came out?",
        options=(
            _option("dir", "DIR", "folder of studies (default: the project's runs)", nargs="?"),
            _option("--verbose", None, "where each config is, and the command that reproduces the study", action="store_true"),
            _option("--tag", "TAG", "only studies whose note has the word #TAG"),
            _option("--compare", "STUDY", "two or more studies beside each other: what differs, values, noise of the seeds", nargs="+"),
            _option("--columns", "A,B", "further columns, such as workload,failed,created", default=""),
            _option("--export", "FILE", "write the table as .csv or .xlsx"),
            _option("--push", "URL", "copy the studies to a database that optuna-dashboard shows"),
            _option("--note", ("STUDY", "TEXT"), "write another note to a study, and list", nargs=2),
        ),
        description="""\
One row per study: name, number of trials, the value of its best config (the mean over its seeds) with the metric and the learning rate, then lr.best
and lr.unstable of its diagnosis; below it the verdict and the note. Where there is a verdict, the value is that of the config that it ends with. Words of a note that begin with # are tags.""",
        epilog="""\
examples:
  workbench studies
  workbench studies --verbose     # the commands that reproduce them
  workbench studies --compare digits_cnn-diagnosis-20260801-120000 digits_cnn-diagnosis-20260802-090000
  workbench studies --columns workload,failed,created --export studies.xlsx
  workbench studies --note digits_cnn-lr_sweep-20260801-120000 "warmup did not help #warmup"    # a folder, or a name in runs/
  workbench studies --tag warmup
  workbench studies --push sqlite:///runs/studies.db    # or postgresql://user@host/name; then: optuna-dashboard URL

The folders are the truth; a copy in a database can always be made again.""",
    ),
    "hosts": Command(
        line="is this training right on many hosts? A rehearsal on this machine",
        options=(
            _option("rest", "WORKLOAD", "as for diagnose; with --script, after --, the script's own arguments",
                nargs="*"),
            _option("--script", "FILE", "a training script of your own, as torchrun would start it"),
            _option("--hosts", "N", "processes that train together, 2 or more (default: 4)", type=int, default=4),
            _option("--steps", "N", "updates (default: 50; a script runs to its end)", type=int),
            _option("--out", "DIR", "folder of the study (default: runs/<name>-hosts-<time>)"),
            _option("--port", "P", "port where the ranks meet (default: a free one)", type=int),
            _option("--timeout", "S", "seconds without any progress, then it is ended (default: 60)",
                type=float, default=60.0),
            _FAIL_ON,
        ),
        description="""\
Trains a workload, or runs a training script of your own as it is, on several processes of this machine, and observes
every one of them. Says whether logs, evaluations, random numbers, checkpoints and shares of the data are right, whether
one model is trained, and which rank makes the others wait. Writes what each rank did and diagnosis.json into the folder.""",
        epilog="""\
examples:
  workbench hosts digits_cnn
  workbench hosts mine.py:workload --hosts 8 --steps 100
  workbench hosts --script train.py --hosts 4 -- --epochs 1 --data small    # behind --: the script's own arguments
  workbench hosts --script train.py --steps 50 --fail-on fail    # in CI; without --steps the script runs to its end

A script is started as torchrun would start it. In a job on real machines, workbench.hosts.audit() near the top of the
script does the same.
next: fix what fails, and run it again""",
    ),
    "ps": Command(
        line="training on parameter servers, a process for each task, on one machine or many",
        options=(
            _option("rest", "WORKLOAD", "what the chief trains; with --script, after --, its own arguments",
                nargs="*"),
            _option("--script", "FILE", "a program of your own, for chief and evaluator"),
            _option("--role", "R",
                "chief, worker, ps, evaluator; auto: as the cluster's description says (default: auto)", default="auto"),
            _option("--index", "N", "among the tasks of that role, from 0", type=int),
            _option("--cluster", "C", "its description, JSON or a file (default: WORKBENCH_CLUSTER or TF_CONFIG)"),
            _option("--out", "DIR", "folder of the trial, the same for chief and evaluator"),
            _option("--steps", "N", "updates (default: the workload's own)", type=int),
            _option("--wait", "S", "seconds for the other tasks to come (default: 300)", type=float, default=300.0),
        ),
        description="""\
The one program for all tasks of a cluster: start it on every machine with the same description of the cluster. A worker
or ps serves until the chief is done; the chief trains; an evaluator follows its checkpoints. Any order will do. It takes
half a minute until all have met, more on a busy machine. Ctrl-C or SIGTERM on the chief keeps what was trained.""",
        epilog="""\
examples, on one machine, with cluster.json
{"cluster": {"chief": ["127.0.0.1:2220"], "worker": ["127.0.0.1:2221", "127.0.0.1:2222"], "ps": ["127.0.0.1:2223"]}}

  workbench ps --cluster cluster.json --role ps --index 0 &
  workbench ps --cluster cluster.json --role worker --index 0 &
  workbench ps --cluster cluster.json --role worker --index 1 &
  workbench ps --cluster cluster.json --role evaluator --out runs/ps digits_mlp &    # not in the cluster
  workbench ps --cluster cluster.json --role chief digits_mlp --out runs/ps

  workbench ps digits_mlp                         # everywhere: the task is in WORKBENCH_CLUSTER or TF_CONFIG
  workbench ps --script train.py -- --epochs 3    # train.py calls workbench.ps.connect_to_cluster()

On several machines Ray's token is needed on each: `ray get-auth-token --generate`, then RAY_AUTH_TOKEN_PATH.
next: workbench report DIR""",
    ),
    "lab": Command(
        line="open the notebooks in JupyterLab, on this machine only",
        options=(
            _option("--no-browser", None, "print the address only", action="store_true"),
            _option("--port", "P", "(default: 8888, or the next free one)", type=int),
        ),
        description="Starts JupyterLab on 127.0.0.1 in my_notebooks, a working copy of ./notebooks; the address that it prints holds its token.",
        epilog="""\
examples:
  workbench lab
  workbench lab --no-browser --port 9000    # then, from elsewhere: ssh -L 9000:127.0.0.1:9000 thismachine

Ctrl-C twice stops it.""",
    ),
}
# fmt: on
