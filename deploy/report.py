"""The end of a run on one page: report.html, self-contained, and summary.json beside it.

Invariant: everything on the page comes from the run's folder and its buffer, nothing from the network; the page opens
from disk, for years. The summary is written last: where it is, the run is finished.
"""

import json
from html import escape
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .paths import RunPaths, write_whole
from .progress import Progress, Record, summary
from .recipe import Recipe

TEMPLATE = Path(__file__).with_name("report.html")
SHOWN = 6  # transcripts before and after
CURVES = {  # metric -> (title, what it is)
    "reward": ("Reward of each trained batch", "mean over the batch; 1 is success"),
    "explained_variance": ("Explained variance of the critic", "on returns it has not been trained on; 1 is perfect"),
    "entropy": ("Entropy", "nats per sampled token"),
    "staleness_mean": ("Staleness", "versions between the oldest sampled token and the learner, mean of a batch"),
    "masked_share": ("Masked share", "sampled tokens whose ratio left the trusted range"),
    "mismatch_k3": ("Engine against learner", "KL estimate k3 of their log-probabilities, in nats"),
    "grad_norm": ("Gradient norm", "before clipping"),
    "wait_seconds": ("Waiting for episodes", "seconds of each step"),
}


def write(recipe: Recipe, paths: RunPaths, progress: Progress) -> Record:
    """Writes both files and returns the summary. `progress` must hold a ledger."""
    numbers = summary(progress, paths, recipe)
    tokenizer = Tokenizer.from_file(str((recipe.model.path or paths.model) / "tokenizer.json"))
    samples = _samples(progress, paths)
    data = {
        "name": recipe.name,
        "summary": numbers,
        "success": _thinned(progress.curve),
        "curves": [_curve(progress, key, *words) for key, words in CURVES.items()],
        "value": [record.get("explained_variance") for record in progress.series("value")],
        "supervised": [record.get("loss") for record in progress.series("supervised")],
        "transcripts": {"before": _transcripts(samples[:1], tokenizer), "after": _transcripts(samples[-1:], tokenizer)},
    }
    embedded = json.dumps(data).replace("</", "<\\/")  # so that no transcript can end the script element
    page = TEMPLATE.read_text().replace("{{name}}", escape(recipe.name)).replace("{{data}}", embedded)
    write_whole(paths.report, page)
    write_whole(paths.summary, json.dumps(numbers, indent=2) + "\n")
    return numbers


def _curve(progress: Progress, key: str, title: str, unit: str) -> dict[str, Any]:
    points = [(record["step"], record.get(key)) for record in progress.series("policy")]
    return {"title": title, "unit": unit, "points": [point for point in points if point[1] is not None]}


def _thinned(curve: list[tuple[float, float]], most: int = 400) -> list[tuple[float, float]]:
    """Seconds since the first point; at most so many points."""
    begun = curve[0][0] if curve else 0.0
    return [(round(time - begun, 1), value) for time, value in curve[:: len(curve) // most + 1]]


def _samples(progress: Progress, paths: RunPaths) -> list[Path]:
    """The files of sampled batches in order, without those of steps that were undone and never done again."""
    last = max(progress.steps["policy"], default=0)
    files = {int(file.stem.removeprefix("step-")): file for file in paths.samples.glob("step-*.jsonl")}
    return [files[step] for step in sorted(files) if step <= last]


def _transcripts(files: list[Path], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Some trajectories of sampled batches, each token with its text and who wrote it."""
    lines = [line for file in files for line in file.read_text().splitlines()[:SHOWN]]
    return [_transcript(json.loads(line), tokenizer) for line in lines]


def _transcript(sample: Record, tokenizer: Tokenizer) -> dict[str, Any]:
    windows = []
    for trace in sample["traces"]:
        writers = _writers(trace)
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in trace["tokens"]]
        columns = zip(
            texts, writers, trace["values"], trace["advantages"], trace["logprobs"], trace["versions"], strict=True
        )
        windows.append([list(column) for column in columns])
    return {key: sample[key] for key in ("task", "reward", "status", "step")} | {"windows": windows}


def _writers(trace: Record) -> list[str]:
    """For each token: sampled, or the role of the message whose content it is, or template."""
    writers = ["template"] * len(trace["tokens"])
    for turn in trace["turns"]:
        for position in range(turn["start"], turn["end"]):
            writers[position] = turn["role"]
    return ["sampled" if sampled else writer for sampled, writer in zip(trace["sampled"], writers, strict=True)]
