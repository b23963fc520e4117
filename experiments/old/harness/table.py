"""The experiments included in gradtrace, by name."""

from __future__ import annotations

from importlib.util import find_spec

EXPERIMENTS = {
    "layers": "gradtrace.experiments.layers",
    "branches": "gradtrace.experiments.branches",
    "competition": "gradtrace.experiments.competition",
    "planted-competition": "gradtrace.experiments.planted_competition",
    "branch-ablation": "gradtrace.experiments.branch_ablation",
    "planted": "gradtrace.experiments.planted",
    "induction": "gradtrace.experiments.induction",
    "treebank-scale": "gradtrace.experiments.treebank_scale",
    "language-model": "gradtrace.experiments.language_model",
    "shadow-cost": "gradtrace.experiments.shadow_cost",
    "shadow-cost-cpp": "gradtrace.experiments.shadow_cost_cpp",
    "programs": "gradtrace.experiments.programs",
    "variations": "gradtrace.experiments.variations",
    "checks": "gradtrace.experiments.checks",
    "first-token": "gradtrace.experiments.first_token",
    "path-entropy": "gradtrace.experiments.path_entropy",
    "memory": "gradtrace.experiments.memory",
}
"""The module of each experiment, imported on demand."""


def available() -> dict[str, str]:
    """The experiments that are installed."""
    return {name: place for name, place in EXPERIMENTS.items() if find_spec(place) is not None}
