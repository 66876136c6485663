"""Forum posts: reproducible, independent of order, and consistent with their facts."""

import re

import pytest

from kedge_lab.demo.words import (
    BYSTANDERS,
    CORE_SLOTS,
    LEXICON,
    OPENINGS,
    POSTSCRIPTS,
    RAMBLINGS,
    SLOTS,
    SUBREDDITS,
    TELLINGS,
)
from kedge_lab.demo.world import World, stated_facts


def test_a_post_is_a_function_of_seed_split_and_index() -> None:
    assert World(3).post(17) == World(3).posts(5, start=15)[2]
    assert World(3).post(17) != World(4).post(17)
    assert World(3).post(17) != World(3, "held-out").post(17)


def test_the_same_post_on_every_machine() -> None:
    """A fixed example: changing the language or the random draws changes all data and must be intentional."""
    post = World(0).post(0)
    assert post.title == "I need some advice"
    assert post.paragraphs[0] == "I found out that my roommate traded my lawnmower."
    assert post.facts["demand"] == "cheese"


@pytest.mark.parametrize("seed", [0, 1])
def test_a_post_states_all_its_facts_and_at_most_one_other(seed: int) -> None:
    for post in World(seed).posts(300):
        stated = stated_facts(post.text)
        assert set(post.facts.items()) <= stated
        assert len(stated) <= len(post.facts) + 1


def test_every_story_says_who_did_what_to_which_thing_and_lacks_little_else() -> None:
    posts = World(0).posts(500)
    assert all(set(CORE_SLOTS) <= set(post.facts) <= set(SLOTS) for post in posts)
    assert sum(len(post.facts) for post in posts) / len(posts) == pytest.approx(8.3, abs=0.2)
    assert all(post.facts["who"] in SUBREDDITS[post.subreddit] for post in posts)


def test_some_posts_are_long_and_their_facts_stand_before_what_truncation_cuts() -> None:
    long = [post for post in World(0).posts(500) if any(text in POSTSCRIPTS for text in post.paragraphs)]
    assert 30 < len(long) < 120
    for post in long:
        kept = "\n".join(text for text in post.paragraphs if text not in POSTSCRIPTS)
        assert set(post.facts.items()) <= stated_facts(kept)


def test_no_value_belongs_to_two_slots_and_no_other_sentence_has_one() -> None:
    values = [value for words in LEXICON.values() for value in words]
    assert len(values) == len(set(values))
    sentences = [*OPENINGS, *RAMBLINGS, *POSTSCRIPTS]
    sentences += [text for group in (TELLINGS, BYSTANDERS) for texts in group.values() for text in texts]
    blank = dict.fromkeys(SLOTS, "…")
    assert all(stated_facts(text.format(**blank)) == set() for text in sentences)


def test_a_value_is_found_whatever_its_case_and_never_inside_another_word() -> None:
    assert stated_facts("THE GYM! monday, Call for Help") == {
        ("place", "gym"), ("time", "Monday"), ("question", "call for help")
    }  # fmt: skip
    assert stated_facts("gymnastics, begymed, exit, recall for helpers") == set()


def test_the_word_before_a_value_in_a_summary_tells_its_slot() -> None:
    """No word precedes values of two slots."""
    before: dict[str, set[str]] = {}
    for post in World(2).posts(400):
        words = re.findall(r"[\w']+", World(2).reference(post))
        for slot, value in stated_facts(World(2).reference(post)):
            at = words.index(value.split()[0])
            before.setdefault(words[at - 1], set()).add(slot)
    assert all(len(slots) == 1 for slots in before.values())
