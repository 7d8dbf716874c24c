"""The demo's input: sentences on six topics, of very different lengths, two of them paragraphs that span several tiles."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sentence:
    """A text to embed and the topic that its nearest neighbours should share. quick: kept in the short demo."""

    topic: str
    text: str
    quick: bool = False


SENTENCES = (
    Sentence("owls", "The keeper fed the owls because they were hungry after a long cold night.", quick=True),
    Sentence("owls", "An owl flies without a sound, so the mouse below never hears it coming.", quick=True),
    Sentence("owls", "Barn owls hunt voles in the dark by listening."),
    Sentence("bread", "Knead the dough for ten minutes, then let it rise until it has doubled.", quick=True),
    Sentence("bread", "My sourdough loaf came out of the oven with a crackling crust."),
    Sentence(
        "bread",
        "Bread is flour, water, salt and time. The flour brings starch and protein; water lets the proteins link into "
        "gluten, and folding the dough lines them up until it stretches like a thin sheet. Yeast and bacteria eat the "
        "sugars and breathe out gas, which the gluten holds. In the oven the bubbles swell once more, the crust browns, "
        "and a kitchen that was merely warm smells like morning.",
        quick=True,
    ),
    Sentence("space", "Jupiter's four largest moons can be seen with ordinary binoculars.", quick=True),
    Sentence("space", "The telescope photographed a galaxy whose light is twelve billion years old.", quick=True),
    Sentence(
        "space",
        "When a star much heavier than the Sun has burned its last nuclear fuel, nothing is left to hold its core up "
        "against its own gravity. The core collapses within a second, protons and electrons are pressed into neutrons, "
        "and the layers that fall onto it bounce back as a shock. For a few weeks the explosion outshines the whole "
        "galaxy around it. What stays behind is a neutron star as wide as a city, spinning many times a second, or, if "
        "the core was too heavy even for that, a black hole from which no light returns. The gas that was thrown out "
        "drifts on for thousands of years, glowing in the colours of hydrogen, oxygen and sulphur, until it meets other "
        "clouds. From such clouds new stars form, and with them planets: the iron in our blood and the calcium in our "
        "bones were made in stars that ended long before the Earth began.",
    ),
    Sentence("trains", "The night train to Vienna leaves from platform nine at half past ten.", quick=True),
    Sentence("trains", "Snow on the tracks delayed every train through the mountain pass.", quick=True),
    Sentence("trains", "Commuters waited on the railway platform."),
    Sentence("music", "She tuned her cello while the orchestra settled into silence.", quick=True),
    Sentence("music", "The violinist played the slow movement from memory.", quick=True),
    Sentence("music", "The choir rehearsed the hymn in four voices."),
    Sentence(
        "computing", "A graphics processor hides the latency of memory by running thousands of threads.", quick=True
    ),
    Sentence("computing", "The compiler keeps the inner loop in registers and never spills.", quick=True),
    Sentence(
        "computing", "Caches make a slow memory look fast, as long as the program reads the same data again soon."
    ),
)


def chosen(quick: bool) -> tuple[Sentence, ...]:
    """All sentences, or those of the short demo."""
    return tuple(sentence for sentence in SENTENCES if sentence.quick or not quick)
