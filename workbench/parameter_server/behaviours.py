"""`BEHAVIOURS` and `LIMITS`: what TensorFlow's own tests assert of its parameter servers, its stated limits, and what becomes of them here."""

from __future__ import annotations

from typing import Literal, NamedTuple

import pandas as pd

Fate = Literal["kept", "lifted", "differs", "open"]


class Behaviour(NamedTuple):
    """A behaviour by its number, what TensorFlow does, what becomes of it, and how it is here where it is not the same."""

    number: int
    tensorflow: str
    fate: Fate = "kept"
    ours: str = "the same"


class Limit(NamedTuple):
    """A limitation by its clause, what TensorFlow cannot do, what becomes of it, and how it is here."""

    clause: str
    tensorflow: str
    fate: Fate
    ours: str


BEHAVIOURS = (
    Behaviour(1, "queue: put, get, put back and finish one closure"),
    Behaviour(2, "queue: a closure that is put back runs once more, none is lost"),
    Behaviour(3, "queue: wait returns where all ended before it was called"),
    Behaviour(4, "queue: a failing closure wakes wait, which raises its error"),
    Behaviour(5, "queue: the next put raises the error; what waited is cancelled"),
    Behaviour(6, "queue: wait raises it once; a second wait is clean"),
    Behaviour(7, "queue: done raises it, too"),
    Behaviour(8, "queue: it is raised when nothing runs any more, the first error only"),
    Behaviour(9, "queue: each closure fetches its own error, or that it was cancelled"),
    Behaviour(10, "queue: ten threads at once, no deadlock"),
    Behaviour(11, "queue: closures for one worker are apart, and wait ignores them"),
    Behaviour(12, "queue: bounded, schedule blocks where it is full"),
    Behaviour(13, "queue: nothing new comes in while somebody waits for the end"),
    Behaviour(14, "queue: put back after an error means cancelled"),
    Behaviour(15, "a second coordinator of a strategy is the first"),
    Behaviour(16, "results in nested tuples, lists and dicts are fetched as they are nested"),
    Behaviour(17, "join with nothing scheduled, and three joins in a row"),
    Behaviour(18, "five workers add to a variable, and no update is lost"),
    Behaviour(19, "a RemoteValue as an argument is refused"),
    Behaviour(20, "a plain Python function is refused", "lifted", "any function; what cannot be called or sent is refused"),
    Behaviour(21, "schedule inside and outside of the scope is the same"),
    Behaviour(22, "strategy.run on the coordinator works and warns"),
    Behaviour(23, "schedule returns at once; one closure a worker at a time"),
    Behaviour(24, "a staggered start by environment variables", "kept", "the same, under our names of the variables"),
    Behaviour(25, "code on a worker knows its index, elsewhere that is an error"),
    Behaviour(26, "a watchdog prints all stacks where nothing moves"),
    Behaviour(27, "counts of closures, fetches, failures, recoveries", "differs", "the same but for tracings: there are none"),
    Behaviour(28, "a coordinator that is deleted ends its threads"),
    Behaviour(29, "every worker builds its dataset and sees its own iterator"),
    Behaviour(30, "each iter begins anew"),
    Behaviour(31, "the dataset's function is traced once for all workers", "differs", "nothing is traced; called once on each worker"),
    Behaviour(32, "a dataset function that makes parameters is refused"),
    Behaviour(33, "unseeded shuffles differ from worker to worker"),
    Behaviour(34, "a dataset made on the coordinator and captured fails at join", "lifted", "a dataset may be given, and is copied; a live iterator is refused"),
    Behaviour(35, "several iterators in one closure, old and new ones"),
    Behaviour(36, "iterators that are made again and again leave nothing behind"),
    Behaviour(37, "a distributed dataset without the coordinator is refused"),
    Behaviour(38, "per-worker variables, and reading all of them"),
    Behaviour(39, "the datasets themselves as arguments"),
    Behaviour(40, "an error while building is told by the closure that needs it"),
    Behaviour(41, "iterators survive a user's error"),
    Behaviour(42, "join raises the user's error by its type"),
    Behaviour(43, "schedule raises it in the end, and the next join is clean"),
    Behaviour(44, "it is raised once and cleared"),
    Behaviour(45, "a long closure is cancelled where another fails"),
    Behaviour(46, "when an error is raised, nothing runs any more"),
    Behaviour(47, "a worker restarted between closures: the next ones run"),
    Behaviour(48, "a worker killed inside a closure: at least once", "lifted", "its writes count exactly once; exactly_once=False is the source's way"),
    Behaviour(49, "a user's error wins over a worker's death"),
    Behaviour(50, "datasets are built again for a worker that came back"),
    Behaviour(51, "all workers killed at once, and restarted: everything ends"),
    Behaviour(52, "the same worker killed twice"),
    Behaviour(53, "the others go on while one is away"),
    Behaviour(54, "results are fetchable after their worker died"),
    Behaviour(55, "reading a variable never fails because of a worker"),
    Behaviour(56, "errors name the task that failed"),
    Behaviour(57, "three transient errors of a healthy server are ignored"),
    Behaviour(58, "what a worker has to build again comes before closures"),
    Behaviour(59, "5,000 closures of one worker that is killed: all end"),
    Behaviour(60, "each task can be asked for its health"),
    Behaviour(61, "a killed server: join raises"),
    Behaviour(62, "a killed server: schedule raises"),
    Behaviour(63, "a server's death wins over a worker's recovery"),
    Behaviour(64, "a server that came back empty is noticed"),
    Behaviour(65, "a new coordinator goes on from the checkpoint", "lifted", "the same, also with other numbers of workers and servers"),
    Behaviour(66, "names and numbers of jobs are checked"),
    Behaviour(67, "an evaluator in the cluster: it hangs", "lifted", "refused, with what to do"),
    Behaviour(68, "variables in turn on the servers, inside of the scope"),
    Behaviour(69, "three partitioners and their numbers"),
    Behaviour(70, "rows are split in order, first shards the larger"),
    Behaviour(71, "a partitioner that returns nonsense is named"),
    Behaviour(72, "optimizer slots lie beside their shard"),
    Behaviour(73, "initial values made shard by shard"),
    Behaviour(74, "a sharded variable is used like a tensor"),
    Behaviour(75, "an embedding is looked up without reading the table"),
    Behaviour(76, "shards that do not fit are refused"),
    Behaviour(77, "weights are restored into other numbers of shards", "lifted", "weights and optimizer slots"),
    Behaviour(78, "a saved sharded model cannot be loaded back", "lifted", "parameters are stored whole, and load without a cluster"),
    Behaviour(79, "aggregation over a worker's GPUs; a scope that caches reads", "differs", "one replica a worker; reduction= of the workers' gradients; no caching scope"),
    Behaviour(80, "fit: every update counted; lookups, normalisation, arrays"),
    Behaviour(81, "fit without steps_per_epoch is refused", "lifted", "only where the length is not known"),
    Behaviour(82, "fit: no eager steps, no progress bar, no batch-level callbacks", "lifted", "all three"),
    Behaviour(83, "fit and a coordinator of the user's share one cluster"),
    Behaviour(84, "an epoch's metrics count each of its batches"),
    Behaviour(85, "evaluate and predict, outputs in order"),
    Behaviour(86, "exact evaluation, also with two workers killed"),
    Behaviour(87, "exact evaluation of an endless dataset is refused", "kept", "the same; a number of steps makes it possible"),
    Behaviour(88, "train, save, load, serve, with preprocessing"),
)  # fmt: skip
"""In the order of their numbers; the tests name these numbers in their docstrings."""

LIMITS = (
    Limit("T14.1", "fault tolerance needs an environment variable", "lifted", "tasks are asked for their health"),
    Limit("T14.2", "no synchronous training", "open", "asynchronous only; one worker is plain training, bit for bit"),
    Limit("T14.3", "steps are packed by hand", "lifted", 'steps_per_closure="auto"'),
    Limit("T14.4", "a sharded saved model does not load", "lifted", "exports hold whole parameters"),
    Limit("T14.5", "slots do not load into other shards", "lifted", "any number of shards"),
    Limit("T14.6", "no recovery from a server's death without a restart", "open", "told within a second; a restart goes on from the checkpoint"),
    Limit("T14.7", "lookup tables on the coordinator", "lifted", "tables travel to the workers, no requests"),
    Limit("T14.8", "steps_per_epoch is mandatory", "lifted", "taken from the data's length"),
    Limit("T14.9", "no batch-level callbacks", "lifted", "each step once, in order of completion"),
    Limit("T14.10", "no progress within an epoch", "lifted", "verbose=1"),
    Limit("T14.11", "input as DatasetCreator only", "lifted", "loaders, datasets, arrays, functions"),
    Limit("T14.12", "no eager mode", "lifted", "errors show the user's line"),
    Limit("T14.13", "no evaluation inside fit", "lifted", "validation_data"),
    Limit("T14.14", "no evaluate, no predict", "lifted", "both, each example exactly once"),
    Limit("T14.15", "schedule promises no visits", "lifted", "fit on indexed data: each example once an epoch"),
)  # fmt: skip


def behaviours_table() -> pd.DataFrame:
    """Return number, tensorflow, fate and ours of every behaviour."""
    return pd.DataFrame(BEHAVIOURS, columns=list(Behaviour._fields))


def limits_table() -> pd.DataFrame:
    """Return clause, tensorflow, fate and ours of every limitation that the tutorial states (T14)."""
    return pd.DataFrame(LIMITS, columns=list(Limit._fields))


def as_markdown(table: pd.DataFrame) -> str:
    """Return a table of text as Markdown, for a notebook."""
    rows = [list(table.columns), ["---"] * len(table.columns), *table.astype(str).to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
