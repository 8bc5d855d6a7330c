"""Ages along the learner's lineage, by the definition and in Redis."""

import random

from argosy.buffer import Lineage


def test_what_a_checkpoint_sampled_is_no_older_under_its_new_version() -> None:
    lineage = Lineage().repeat(9, 4)  # 5 to 8 are lost
    ages = [lineage.age(sampled, 11) for sampled in (2, 3, 4, 5, 8, 9, 10, 11, 12)]
    assert ages == [4, 3, 2, 2, 2, 2, 1, 0, 0]
    assert lineage.age(3, 6) == 3  # when 6 was the newest, nothing was lost
    assert Lineage.of([[9, 4]]) == lineage and Lineage().age(2, 11) == 9


def test_learners_that_die_before_they_train_leave_one_repeat() -> None:
    assert Lineage().repeat(9, 4).repeat(10, 9).repeat(13, 10) == Lineage(((13, 4),))


def test_what_lies_beyond_the_bound_is_forgotten() -> None:
    lineage = Lineage().repeat(9, 4).repeat(20, 12)
    assert lineage.within(3, 20) == lineage  # 20 is 12, three versions after 9
    assert lineage.within(2, 20) == lineage.within(0, 20) == Lineage(((20, 12),))
    assert lineage.within(5, 26) == Lineage()


def test_ages_are_those_of_a_walk_back_through_all_versions() -> None:
    """Random histories: at each point some learners go on, others go back to an ancestor."""
    random_ = random.Random(5)
    for _ in range(300):
        before, lineages, now = {0: 0}, {0: Lineage()}, 0
        depth, lost = {0: 0}, {}
        for version in range(1, 25):
            if random_.random() < 0.3:
                older = now
                for _ in range(random_.randrange(4)):
                    older = before[older]
                before[version], depth[version] = older, depth[older]
                lineages[version] = lineages[older].repeat(version, older).within(5, version)
            else:
                before[version], depth[version] = now, depth[now] + 1
                lineages[version] = lineages[now].within(5, version)
            now = version
        ancestors, walk = [now], now
        while walk:
            walk = before[walk]
            ancestors.append(walk)
        for sampled in range(now + 1):
            lost = depth[now] - depth[max(v for v in ancestors if v <= sampled)]
            age = lineages[now].age(sampled, now)
            assert age == lost if lost <= 5 else age > 5
