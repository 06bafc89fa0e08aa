"""Readable words that facts are made of. The tokenizer keeps them whole."""


def _split(words: str) -> list[str]:
    return words.split()


ADJECTIVES = _split("""
amber ancient azure blue bold brave bright broken bronze brown calm clever cold copper coral
crimson crystal curious dark deep distant dry dusty early eager electric emerald empty faint
famous fast fierce flat fragile frozen gentle giant gilded glass golden grand green grey happy
heavy hidden hollow honest humble hungry icy iron ivory jade jolly kind late lazy light little
lonely loud lucky lunar magic marble mellow misty modern narrow new noble northern old orange pale
patient pink plain polite proud purple quick quiet rapid rare red royal rusty sacred salty scarlet
secret shy silent silver simple sleepy slow small smooth soft solar southern spotted stone strange
strong sunny sweet swift tall thin tiny velvet violet warm western white wide wild wise wooden
yellow young
""")

NOUNS = _split("""
acorn anchor apple arrow badger barrel basket beacon bear bell bird boat bottle branch bread
bridge brook bucket butter button cabin camel candle canyon carpet castle cat cave chain chair
cherry circle clock cloud coin comet compass corn cradle crane crow crown desert diamond dog
dolphin door dragon drum eagle engine falcon farmer feather fence fern field finger fish flag
flame flower flute forest fox garden gate ghost glove goat grape hammer harbor hat hawk hill honey
horse hunter island jacket jar jungle kettle king kite knight ladder lake lamp lantern leaf lemon
letter lion lizard lock maple market meadow melon mirror monkey moon mountain mouse needle nest
oak ocean olive onion orchard otter owl paddle panda paper parrot path peach pearl pencil pepper
piano pigeon pillow pilot pine pirate plum pocket pond pony potato prince pumpkin puzzle queen
rabbit raven ribbon river robin rocket rope rose sailor salmon scarf shadow sheep shell ship shoe
sparrow spider spoon squirrel star statue stove storm sugar swan sword temple thunder ticket tiger
tower train tree trumpet tulip tunnel turtle umbrella valley village violin wagon walnut whale
wheel willow window wolf zebra
""")

NAMES = _split("""
Adam Alice Anna Arthur Ben Clara Daniel David Diana Edith Edward Emma Felix Frank George Grace
Hannah Harold Helen Henry Hugo Irene Isaac Jack James Jane Julia Karl Laura Leo Lucy Maria Martin
Mary Max Nina Oscar Paul Peter Robert Rose Ruth Sam Sarah Simon Sophie Thomas Victor Walter
""")

# No fact is made of these; they are kept whole so that a person may ask about colours.
COLOURS = _split("""
black blue brown gold green grey orange pink purple red silver violet white yellow
""")

WHOLE_WORDS = sorted({*ADJECTIVES, *NOUNS, *NAMES, *COLOURS})

# Words of the questions; shown to the tokenizer so that prompts stay short.
PROMPT_WORDS = _split("""
Question Answer What Who Where Which How Give List Let Record Key The secret code owner called
belong kept found hide opens sold coins cost eat food favourite contains everything number record
stored under near does was much many about nobody know place
""")
