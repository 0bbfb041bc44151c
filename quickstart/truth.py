"""The truth about a summary of a generated post: a judge and a gold reward that cost nothing.

    from truth import score, judge
    score(post, summary)               # at most 1: every fact of the post stated and nothing else wrong
    judge(post, summary, reference)    # 1, 0.5 or 0: the summary is better, as good, worse

A post of `posts.py` hides four to six facts: one value of some of the kinds in FACTS. Both functions are pure functions
of their texts, so that any summary of any generated post can be scored: a person's, a model's, a reference.
They label the comparisons of `posts.py` and fill the tables of `report.py`; no training stage reads them.
"""

import re

# fmt: off
FACTS = {
    "person": ["sister", "brother", "mother", "father", "cousin", "uncle", "aunt", "roommate", "boss", "coworker",
               "girlfriend", "boyfriend", "landlord", "neighbor", "teacher", "wife", "husband", "stepmom", "grandpa",
               "grandma", "nephew", "professor", "classmate", "babysitter"],
    "age": [str(age) for age in range(18, 60)],
    "event": ["broke", "lost", "sold", "stole", "hid", "burned", "scratched", "smashed", "flooded", "painted", "buried",
              "dropped", "pawned", "ruined", "donated", "traded", "stained", "crushed", "kicked", "damaged", "returned",
              "locked", "melted", "borrowed"],
    "object": ["laptop", "bike", "car", "phone", "guitar", "couch", "jacket", "camera", "piano", "ring", "necklace",
               "backpack", "tablet", "wallet", "scooter", "drum", "mirror", "lamp", "carpet", "helmet", "violin",
               "tent", "kayak", "printer", "fridge", "blender", "diary", "passport", "skateboard", "telescope"],
    "feeling": ["angry", "sad", "scared", "confused", "guilty", "tired", "jealous", "hurt", "ashamed", "anxious",
                "annoyed", "lonely", "shocked", "embarrassed", "bitter", "worried", "upset", "furious", "helpless",
                "betrayed"],
    "question": ["move out", "call the police", "demand an apology", "forgive them", "ask for money", "see a lawyer",
                 "stay quiet", "get revenge", "write a letter", "cut contact", "buy a new one", "talk it over",
                 "set a trap", "tell everyone", "let it go", "take a break", "wait a month", "start a fight",
                 "pretend nothing happened", "find a therapist"],
}
# fmt: on
FREE_WORDS = 24  # a summary of up to so many words has no length penalty
WORD_PENALTY = 0.02  # for each word beyond
REPEAT_PENALTY = 0.1  # for each run of three words that the summary already had


def find_facts(text: str) -> dict[str, set[str]]:
    """Return the values of each kind of fact that a text mentions."""
    text = text.lower()
    mentions = {kind: set(re.findall(rf"\b(?:{'|'.join(values)})\b", text)) for kind, values in FACTS.items()}
    mentions["age"] = set(re.findall(r"\b\d\d(?!\d)", text)) & set(FACTS["age"])  # also 24F and 24yo
    return mentions


def score(post: str, summary: str) -> float:
    """Return the true score of a summary, any text, with n facts in the post (an error where there are none):

    (covered - wrong) / n - WORD_PENALTY for each word beyond FREE_WORDS - REPEAT_PENALTY for each repeated three words

    A fact is covered when post and summary name the same value, and wrong when only the summary names it."""
    truth, said = find_facts(post), find_facts(summary)
    n = sum(len(values) for values in truth.values())
    if n == 0:
        raise ValueError(f"no fact in the post, so that no summary of it can be scored: {post[:80]!r}")
    covered = sum(len(said[kind] & truth[kind]) for kind in FACTS)
    wrong = sum(len(said[kind] - truth[kind]) for kind in FACTS)
    words = re.findall(r"\w+", summary.lower())
    runs = list(zip(words, words[1:], words[2:], strict=False))
    length = WORD_PENALTY * max(0, len(words) - FREE_WORDS)
    return (covered - wrong) / n - length - REPEAT_PENALTY * (len(runs) - len(set(runs)))


def judge(post: str, summary: str, other: str) -> float:
    """Return 1 where the truth prefers `summary` to `other`, 0 where it prefers `other`, 0.5 where they score the
    same."""
    gap = score(post, summary) - score(post, other)
    return 0.5 if abs(gap) < 1e-9 else float(gap > 0)
