import collections

import pytest
from argosy.actors.settings import EngineSettings, Mixture, TaskSource


def sources(**weights: float) -> list[TaskSource]:
    return [TaskSource(name=name, env="x:Y", weight=weight) for name, weight in weights.items()]


def test_mixture_keeps_the_shares_and_counts_seeds_without_gaps():
    mixture = Mixture(sources(a=1, b=2, c=7))
    tasks = [mixture(index) for index in range(5000)]
    counts = collections.Counter(task.source for task in tasks)
    assert counts == {"a": 500, "b": 1000, "c": 3500}
    for name, count in counts.items():
        assert [task.seed for task in tasks if task.source == name] == list(range(count))
    assert len({task.id for task in tasks}) == len(tasks)
    # at no point is a source far from its share
    seen: collections.Counter[str] = collections.Counter()
    for index, task in enumerate(tasks, 1):
        seen[task.source] += 1
        assert abs(seen["c"] - 0.7 * index) <= 1.5


def test_mixture_depends_on_the_index_alone():
    assert [Mixture(sources(a=1, b=3))(i) for i in (7, 123456, 7)] == [
        Mixture(sources(a=1, b=3))(i) for i in (7, 123456, 7)
    ]
    assert Mixture(sources(only=3))(41).id == "only/41"


def test_mixture_wants_sources_with_different_names():
    with pytest.raises(ValueError, match="no task source"):
        Mixture([])
    with pytest.raises(ValueError, match="different names"):
        Mixture([*sources(a=1), *sources(a=2)])


@pytest.mark.parametrize("argument", ["--preferred-sampling-params", '--preferred-samp={"top_p": 0.9}'])
def test_an_engine_samples_from_the_whole_distribution(argument):
    with pytest.raises(ValueError, match="another distribution"):
        EngineSettings(arguments=("--tp-size", "2", argument))
