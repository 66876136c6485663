"""The language of the embedded world: possible facts of a story, and the sentences that state them.

A story has one fact per slot. The values of two slots never share a word, and no other sentence uses these words, so
that a single word identifies the fact it states. `{who}`, `{deed}` … are replaced by values.
"""

SUBREDDITS = {
    "family": ("sister", "brother", "cousin", "uncle", "aunt", "grandma", "nephew", "stepdad"),
    "relationships": ("boyfriend", "girlfriend", "husband", "wife", "fiance", "ex"),
    "jobs": ("boss", "coworker", "intern", "accountant"),
    "neighbors": ("roommate", "landlord", "neighbor", "plumber"),
    "advice": ("dentist", "barber", "teacher", "coach"),
}

LEXICON = {
    "who": tuple(person for people in SUBREDDITS.values() for person in people),
    "deed": ("sold", "lost", "broke", "hid", "borrowed", "ruined", "painted", "burned", "buried", "dropped", "stole",
             "licked", "mailed", "flattened", "traded", "shaved"),
    "object": ("guitar", "laptop", "bicycle", "couch", "piano", "camera", "cactus", "goldfish", "diary", "umbrella",
               "telescope", "violin", "suitcase", "lawnmower", "trumpet", "teapot", "skateboard", "passport", "canoe",
               "typewriter", "wig", "accordion", "kite", "toaster"),
    "place": ("gym", "airport", "office", "library", "beach", "wedding", "church", "zoo", "museum", "mall", "funeral",
              "casino", "bakery", "hospital", "theater", "aquarium"),
    "time": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "Christmas", "Easter",
             "Halloween", "Thanksgiving", "Valentine's"),
    "reason": ("bet", "dare", "rumor", "sandwich", "haircut", "crossword", "diet", "prank", "recipe", "joke",
               "horoscope", "coupon", "dream", "tattoo"),
    "demand": ("money", "flowers", "silence", "applause", "chocolate", "custody", "proof", "sympathy", "royalties",
               "respect", "cheese", "privacy", "pancakes", "gratitude"),
    "feeling": ("furious", "ashamed", "heartbroken", "confused", "relieved", "jealous", "embarrassed", "guilty",
                "amused", "numb", "proud", "lonely"),
    "question": ("move out", "call for help", "write poems", "take revenge", "start over", "say nothing", "apologize",
                 "laugh it off", "sue everyone", "forgive them", "cry in public", "change names"),
}  # fmt: skip

SLOTS = tuple(LEXICON)
CORE_SLOTS = SLOTS[:3]
"""Slots in every story and every reference summary: who did what to which thing."""
OPTIONAL_SLOTS = SLOTS[3:]
"""Slots that a story may lack and an author may leave out."""

TITLES = (
    "My {who} and my {object}",
    "What do I do about my {who}?",
    "I miss my {object}",
    "I need some advice",
    "This was a strange week",
    "Am I the unreasonable one here?",
)

OPENINGS = (
    "Long time reader, first post.",
    "Sorry for my English.",
    "This is a throwaway account.",
    "I am typing this on my phone.",
    "Please be kind to me.",
    "I never thought I would post here.",
)

TELLINGS = {
    "core": (
        "My {who} {deed} my {object}.",
        "I found out that my {who} {deed} my {object}.",
        "Believe it or not, my {who} {deed} my {object}.",
        "So my {who} {deed} my {object} without asking.",
    ),
    "place": (
        "It happened at the {place}.",
        "The whole {place} saw it.",
        "Picture the {place}, full of people.",
        "I was at the {place} too.",
    ),
    "time": (
        "This was on {time}.",
        "It was {time}, so I was tired.",
        "My {time} had been fine until then.",
    ),
    "reason": (
        "It all started with a {reason}.",
        "Apparently a {reason} was to blame.",
        "There was a {reason} involved.",
        "The cause was a {reason}, no less.",
    ),
    "demand": (
        "Now I am expected to pay with {demand}.",
        "And then I was asked for {demand}.",
        "There is even talk of {demand}.",
    ),
    "feeling": (
        "I have been {feeling} ever since.",
        "Honestly, I am just {feeling}.",
        "It is normal to be {feeling}, right?",
    ),
    "question": (
        "Part of me wants to {question}.",
        "Would it be wrong to {question}?",
        "My plan is to {question}, but I am not sure.",
    ),
}
"""Sentences that state each fact in a post."""

BYSTANDERS = {
    "who": ("Your {who} would never do that.", "Even the {who} of a friend was shocked."),
    "object": ("Nobody touched the {object}, though.", "The {object} of a friend is fine."),
    "place": ("I would rather have stayed away from any {place}.", "We had planned a trip to some {place} instead."),
    "time": ("Every {time} since has been quiet.", "I hope to sleep until {time}."),
    "feeling": ("Other people seem {feeling}.", "The internet was {feeling} about it."),
}
"""Sentences with a value that is not a fact of the story; a summary that repeats it is inaccurate."""

RAMBLINGS = (
    "The story is long.",
    "You would have laughed.",
    "We have known each other for years.",
    "I still cannot believe it.",
    "Our parrot Biscuit saw everything.",
    "The weather was lovely that day.",
    "I had soup for lunch.",
    "Nobody warned me about this.",
    "Life is strange, I guess.",
    "I could not sleep afterwards.",
)
"""Well-formed but irrelevant sentences: distractions in a post, padding by a rambling author."""

POSTSCRIPTS = (
    "EDIT: Wow, I did not expect so many replies. I am reading all of them with a cup of tea.",
    "EDIT 2: Many of you asked about our parrot. Biscuit is doing well and sends his regards.",
    "UPDATE: Nothing new so far. I will let you know when there is something to tell.",
    "EDIT: No, I did not make this up. I wish that I had the imagination for it.",
    "PS: Please stop sending me private messages about soup. I only mentioned it once.",
    "UPDATE: We had a long talk over dinner, and the weather was lovely again.",
)
"""Closing paragraphs of a long post, without facts, which truncation may cut."""

HEADLINE = "My {who} {deed} my {object}"
"""First sentence of a summary, extended by `ADJUNCTS` up to the period.

In a summary, the word before a value precedes values of that slot only, so a small model can learn within a minute
which fact to look up.
"""

ADJUNCTS = {
    "place": " at the {place}",
    "time": " on {time}",
    "reason": " over a {reason}",
    "demand": " and wants {demand}",
}

CLOSINGS = {
    "feeling": "Feeling {feeling}.",
    "question": "Time to {question}?",
}
