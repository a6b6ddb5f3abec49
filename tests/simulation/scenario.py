"""What a simulated engine is asked to do: plain data, drawn from a seed, easy to make smaller."""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from nanoactor.messages.engine import TokenRules
from nanoactor.models.sampling.columns import pack

VOCABULARY = 50
EOS = 7


# All ways to sample; what is sampled is the oracle's, whatever they are.
_WAYS: tuple[dict[str, float], ...] = (
    dict(temperature=0.0),
    dict(),
    dict(top_k=20, min_p=0.1),
    dict(temperature=0.5, top_k=400),
    dict(top_p=0.9),
    dict(temperature=0.0, top_p=0.5),
)


_SEEDS = 1000
"""Between two answers to one request."""


def seed_of(position: int, answer: int) -> int:
    """The seed of an answer to the request that is asked at this position: it tells whose it is."""
    return position + answer * _SEEDS


def sampling_of(position: int, answer: int = 0) -> bytes:
    """The columns of the same."""
    return pack({**_WAYS[position % len(_WAYS)], "seed": seed_of(position, answer)})


def rules_of(seed: int) -> TokenRules | None:
    """The rules of a request, by its position or by a seed of its; every third has some, of ids
    that tell whose they are."""
    position = seed % _SEEDS
    if position % 3:
        return None
    ids = np.array([position, position + 1], np.int32)
    return TokenRules(ids + VOCABULARY, ids, ids.astype(np.float32), ids[:0], ids[:0])


IMAGE, VIDEO, START, END = range(VOCABULARY, VOCABULARY + 4)
"""Ids of placeholders; nothing samples them."""


@dataclasses.dataclass(frozen=True)
class Image:
    """What an image or a video shows, how large it is, and whether it can be told and decoded."""

    content: int
    height: int
    width: int
    fault: str = ""
    """"header", "pixels" or none."""
    frames: int = 0
    """Of a video; 0 for an image."""

    @property
    def rows(self) -> int:
        """What the tower gives for it."""
        return self.height * self.width * max(1, self.frames)

    @property
    def times(self) -> tuple[float, ...]:
        """Of a video's frames."""
        return tuple(map(float, range(self.frames)))

    @property
    def placeholder(self) -> int:
        """What stands for it in a prompt."""
        return VIDEO if self.frames else IMAGE


def time_text(time: float) -> str:
    """What a prompt says before a frame."""
    return f"<{time:.1f} seconds>"


def encode_text(text: str) -> list[int]:
    """The ids of such a text."""
    return [ord(letter) % VOCABULARY for letter in text]


@dataclasses.dataclass(frozen=True)
class Toy:
    """A grammar: see `reference.allowed`."""

    number: int
    fails_at: int = -1
    """The token of output for which it has no mask; -1: it always has one."""
    hangs: bool = False
    """Never says anything."""
    free: tuple[bool, int, int, int] | None = None
    """Of `FreeText`: what comes before it. Its own tokens are the tags, then those it allows."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """What a caller says of held answers, and how long it thinks."""

    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    after: float


@dataclasses.dataclass(frozen=True)
class Caller:
    """Of a request whose answers are held: what it says, one turn after the other."""

    rounds: tuple[Turn, ...]
    end: str
    """Behind the last: "stop", "abort" or "never", where it says no more."""
    wrong: bool = False
    """Whether it says before each turn what cannot be."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request, and when its user gives up on it."""

    at: float
    """Seconds of the virtual clock."""
    prompt: tuple[int, ...]
    max_tokens: int
    eos_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    priority: int = 0
    aborts: tuple[float, ...] = ()
    """Seconds after the request; the second and later ones must change nothing."""
    images: tuple[Image, ...] = ()
    """One for each placeholder in the prompt."""
    n: int = 1
    logprobs: int = -1
    prompt_logprobs: int = -1
    grammar: Toy | None = None
    caller: Caller | None = None
    """Of held answers."""
    pools: bool = False
    """Whether its answer is a vector."""

    @property
    def places(self) -> int:
        """How many of those that may wait it is."""
        return 1 if self.caller else self.n


@dataclasses.dataclass(frozen=True)
class Death:
    """Some actors die together; everybody begins anew."""

    at: float
    victims: tuple[str, ...]
    after: float
    """How long it takes until they are there again."""


@dataclasses.dataclass(frozen=True)
class Pause:
    """The engine's owner has no steps be planned for a while."""

    at: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Scenario:
    """The engine's options, how slow everything is, and all requests."""

    seed: int
    """Of the delays and the slow steps alone."""
    asks: tuple[Ask, ...]
    blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    max_model_len: int = 64
    depth: int = 2
    max_depth: int = 0
    """Steps in flight while they are short; 0: `depth`."""
    plan_lead: str = "eager"
    prefix_caching: bool = True
    priority_window: int = 1000
    tokenizers: int = 1
    max_waiting_requests: int = 1000
    max_waiting_tokens: int = 100_000
    chunk_bytes: int = 1 << 16
    step_seconds: float = 0.001
    token_seconds: float = 0.00002
    slow_chance: float = 0.0
    """How likely a step takes twenty times as long."""
    delay: float = 0.0
    """Mean delay of a message, in steps."""
    uneven: bool = False
    """Whether some edges are ten times slower than others."""
    capacity: int = 1_000_000
    """How many messages an edge between processes holds before its outbox must wait."""

    encoder_pages: int = 0
    """0: the model sees nothing."""
    vision_workers: int = 1
    vision_store: int = 1 << 20
    """Bytes of images that a worker keeps."""
    decode_steps: float = 1.0
    """Mean time to decode an image, in steps."""
    failures: float = 0.0
    """How likely a row's logits are not finite."""
    choiceless: float = 0.0
    """How likely a request's rules leave a row no token."""
    grammars: bool = False
    """Whether there is an actor for them."""
    runs_from: int = 1 << 30
    """Steps of so many decode rows may have several of one constrained answer."""
    freezes: bool = True
    """Whether the device freezes slots behind watched tokens."""
    slot_state: bool = False
    """Whether layers keep something of each slot that no block holds."""
    compile_steps: float = 1.0
    """Mean time to compile a grammar, in steps."""
    pooling: str = ""
    """How the model pools; empty: it does not."""
    hold_seconds: float = 1.0
    """How long callers may think."""
    wire: bool = False
    """Whether messages travel as bytes, overwritten as soon as they were handled."""
    deaths: tuple[Death, ...] = ()
    pauses: tuple[Pause, ...] = ()
    resets: tuple[float, ...] = ()
    """Moments at which the prefix index is to be forgotten."""

    @property
    def most_in_flight(self) -> int:
        """Steps planned and not done, however short they are."""
        return max(self.depth, self.max_depth)

    @property
    def tokens(self) -> int:
        """An upper bound of what it computes, without preemptions."""
        images = sum(image.rows for ask in self.asks for image in ask.images)
        return images + sum(ask.n * (len(ask.prompt) + ask.max_tokens) for ask in self.asks)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """A kind of load."""

    stem: int
    """How long shared beginnings are at most."""
    outputs: tuple[int, ...]
    """Lengths of output to choose from."""
    gaps: tuple[float, ...]
    """Mean steps between two arrivals to choose from; 0 is all at once."""
    aborts: float
    """Share of the requests that are aborted."""
    priorities: tuple[int, ...] = (0, 0, 0, 0, 1, -1, 3)
    stops: float = 0.2
    """Share of the requests that have stop strings."""
    scarce: bool = False
    """Whether there are few blocks for many sequences."""
    hasty: bool = False
    """Whether much happens while a step is computed: a deep pipeline, fast messages."""


TRAFFIC = (
    Traffic(stem=250, outputs=(1, 2, 8, 40, 100), gaps=(0.0, 2.0, 20.0), aborts=0.25),
    Traffic(stem=250, outputs=(1, 2, 8, 40, 100), gaps=(0.0, 2.0), aborts=0.25),
    # Outputs outgrow the cache: sequences starve, and are preempted, again and again.
    Traffic(stem=10, outputs=(40, 100, 100), gaps=(0.0, 2.0), aborts=0.1, scarce=True),
    # The same with long prompts in common: matches bring large refunds, for late arrivals first.
    Traffic(
        stem=250,
        outputs=(2, 40, 100),
        gaps=(0.5, 2.0),
        aborts=0.2,
        priorities=(0, -1, -2, -3),
        scarce=True,
    ),
    # Come, hit the prefix of one that has hardly left, and go.
    Traffic(stem=30, outputs=(1, 2, 3), gaps=(0.5, 2.0), aborts=0.6, hasty=True),
    # Ends that the scheduler cannot foresee, many at once.
    Traffic(stem=60, outputs=(40, 100), gaps=(0.0, 2.0), aborts=0.1, stops=0.8),
)


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed)
    traffic = rng.choice(TRAFFIC)
    block_size = rng.choice([1, 2, 4, 4, 4, 5, 8])
    max_model_len = rng.choice([24, 64, 200, 300])
    needed = -(-max_model_len // block_size)
    seqs = rng.choice([4, 8, 16] if traffic.scarce else [1, 2, 4, 8, 16, 32])
    plenty = [needed, needed + 1, needed * 3 // 2, 3 * needed, 8 * needed]
    bounded = rng.random() < 0.1
    scenario = Scenario(
        seed,
        (),
        blocks=needed + rng.choice([0, 1, seqs]) if traffic.scarce else rng.choice(plenty),
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + rng.choice([0, 1, 7, 24, 100, 300]),
        max_model_len=max_model_len,
        depth=rng.choice([3, 4] if traffic.hasty else [1, 2, 2, 3, 4]),
        plan_lead=rng.choice(["eager", "late"]),
        prefix_caching=rng.random() < 0.9,
        priority_window=rng.choice([1, 5, 1000]),
        tokenizers=rng.choice([1, 2]),
        max_waiting_requests=5 if bounded else 1000,
        max_waiting_tokens=150 if bounded else 100_000,
        chunk_bytes=rng.choice([16, 64, 1 << 16]),
        slow_chance=0.2 if traffic.hasty else rng.choice([0.0, 0.05]),
        delay=rng.choice([0.0, 0.02] if traffic.hasty else [0.0, 0.02, 0.3, 3.0]),
        uneven=rng.random() < 0.5,
        capacity=rng.choice([1, 2, 8, 1_000_000]),
        wire=rng.random() < 0.15,
        # Of a generator of its own: what it draws changes nothing else of a seed.
        failures=random.Random(f"{seed} failures").choice([0, 0, 0, 0, 0.01, 0.05]),
        choiceless=random.Random(f"{seed} choiceless").choice([0, 0, 0, 0.02]),
        runs_from=random.Random(f"{seed} runs").choice([1, 1, 3, 1 << 30]),
        freezes=random.Random(f"{seed} freezes").random() < 0.8,
    )
    scenario = dataclasses.replace(scenario, asks=_draw_asks(rng, scenario, traffic))
    # Another name would mean other scenarios, and seeds are remembered.
    scenario = _with_images(random.Random(f"{seed} pictures"), scenario)
    scenario = _with_answers(random.Random(f"{seed} answers"), scenario)
    scenario = _with_grammars(random.Random(f"{seed} grammars"), scenario)
    scenario = _with_free_text(random.Random(f"{seed} free"), scenario)
    scenario = _with_callers(random.Random(f"{seed} callers"), scenario)
    scenario = _with_vectors(random.Random(f"{seed} vectors"), scenario)
    scenario = _with_short_steps(random.Random(f"{seed} short"), scenario)
    scenario = _with_deaths(random.Random(f"{seed} deaths"), scenario)
    scenario = _with_control(random.Random(f"{seed} control"), scenario)
    return _with_states(random.Random(f"{seed} states"), scenario)


def _with_states(rng: random.Random, scenario: Scenario) -> Scenario:
    """The same with layers that keep states, in some seeds; they forgive no step too many, so only
    where slots freeze. Then there is no index that could be forgotten. The tokenizer
    gives such models no free text (docs/models.md)."""
    if rng.random() < 0.85 or not scenario.freezes or scenario.resets:
        return scenario
    if any(ask.grammar is not None and ask.grammar.free for ask in scenario.asks):
        return scenario
    return dataclasses.replace(scenario, slot_state=True, prefix_caching=False, runs_from=1 << 30)


def _with_control(rng: random.Random, scenario: Scenario) -> Scenario:
    """The same with an owner who pauses the engine and has its index be forgotten, in some seeds;
    callers of held answers would be late."""
    if rng.random() < 0.85 or any(ask.caller is not None for ask in scenario.asks):
        return scenario
    step, last = scenario.step_seconds, max(ask.at for ask in scenario.asks)

    def moment() -> float:
        return rng.uniform(0, last) + rng.uniform(0, rng.choice([10, 100, 400])) * step

    pauses = [
        Pause(moment(), rng.choice([1.0, 20.0, 200.0]) * step) for _ in range(rng.choice([0, 1, 3]))
    ]
    resets = [moment() for _ in range(rng.choice([0, 1, 4]))]
    return dataclasses.replace(scenario, pauses=tuple(pauses), resets=tuple(resets))


def _with_deaths(rng: random.Random, scenario: Scenario) -> Scenario:
    """The same with actors that die, in some seeds; answers that a caller leads do not survive."""
    if rng.random() < 0.85 or any(ask.caller is not None for ask in scenario.asks):
        return scenario
    names = ["scheduler", "blocks", "runner.0", "detokenizer", "tokenizer.0"]
    names += ["grammar"] * scenario.grammars + ["vision.0"] * (scenario.encoder_pages > 0)
    step = scenario.step_seconds
    last = max(ask.at for ask in scenario.asks)
    deaths = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        victims = rng.sample(names, rng.choice([1, 1, 1, 2, 3]))
        at = rng.uniform(0, last) + rng.uniform(0, rng.choice([10, 100, 400])) * step
        deaths.append(Death(at, tuple(victims), rng.choice([0.0, 3.0, 100.0]) * step))
    return dataclasses.replace(scenario, deaths=tuple(sorted(deaths, key=lambda one: one.at)))


def _with_short_steps(rng: random.Random, scenario: Scenario) -> Scenario:
    """The same with a deeper pipeline for short steps, in some seeds; not all have short ones."""
    if rng.random() < 0.85:
        return scenario
    deeper = scenario.depth + rng.choice([1, 2])
    seconds = rng.choice([0.0002, 0.0004, 0.003])
    return dataclasses.replace(scenario, max_depth=deeper, step_seconds=seconds)


def _with_vectors(rng: random.Random, scenario: Scenario) -> Scenario:
    """The same with requests for vectors, in some seeds; their prompts may be as long as the
    context."""
    if rng.random() < 0.9:
        return scenario
    share = rng.choice([0.1, 0.5, 1.0])
    asks = [
        _pooled(rng, ask, scenario)
        if rng.random() < share and not ask.images and ask.caller is None
        else ask
        for ask in scenario.asks
    ]
    return dataclasses.replace(
        scenario, asks=tuple(asks), pooling=rng.choice(["last", "mean", "cls"])
    )


def _pooled(rng: random.Random, ask: Ask, scenario: Scenario) -> Ask:
    missing = scenario.max_model_len - len(ask.prompt)
    whole = rng.random() < 0.1 and missing > 0
    prompt = ask.prompt + tuple(_tokens(rng, missing)) if whole else ask.prompt
    return Ask(ask.at, prompt, max_tokens=0, priority=ask.priority, aborts=ask.aborts, pools=True)


def _with_callers(rng: random.Random, scenario: Scenario) -> Scenario:
    """The same with answers that are held for their callers, in some seeds."""
    if rng.random() < 0.75:
        return scenario
    share, most = rng.choice([0.1, 0.4, 1.0]), rng.choice([1, 3, 6, 12])
    fork, faults = rng.choice([0.2, 0.6]), rng.choice([0.0, 0.0, 0.3])
    asks = [
        _held(rng, ask, rng.randint(1, most), fork, faults)
        if rng.random() < share and not ask.images
        else ask
        for ask in scenario.asks
    ]
    return dataclasses.replace(scenario, asks=tuple(asks))


def _held(rng: random.Random, ask: Ask, answers: int, fork: float, faults: float) -> Ask:
    thinks = rng.choice([0.0, 0.0, 0.001, 0.03])
    living, rounds = set(range(answers)), []
    for _ in range(rng.randint(0, min(20, ask.max_tokens - 1))):
        parents = [-1] * answers
        for index in sorted(living):
            parents[index] = rng.choice(sorted(living)) if rng.random() < fork else index
        if len(living) > 1 and rng.random() < 0.05:
            parents[rng.choice(sorted(living))] = -1
        living = {index for index in living if parents[index] >= 0}
        # Copies of one answer go on with different tokens, as a rule.
        tokens = [rng.randrange(VOCABULARY) for _ in range(answers)]
        late = faults and rng.random() < 0.1
        after = rng.uniform(0.8, 3.0) if late else thinks * rng.random()
        rounds.append(Turn(tuple(parents), tuple(tokens), after))
    end = rng.choice(["stop", "stop", "abort", "never"] if faults else ["stop"])
    return dataclasses.replace(
        ask,
        n=answers,
        eos_ids=(),
        stop_ids=(),
        min_tokens=0,
        stop=(),
        logprobs=rng.randint(0, 2),
        prompt_logprobs=-1,
        grammar=None,
        caller=Caller(tuple(rounds), end, wrong=rng.random() < faults),
    )


def _with_grammars(rng: random.Random, scenario: Scenario) -> Scenario:
    """The same with answers that follow a grammar, in some seeds."""
    if rng.random() < 0.6:
        return scenario
    share, faults = rng.choice([0.1, 0.4, 1.0]), rng.choice([0.0, 0.0, 0.1])
    asks = [
        dataclasses.replace(ask, grammar=_draw_toy(rng, faults)) if rng.random() < share else ask
        for ask in scenario.asks
    ]
    return dataclasses.replace(
        scenario, asks=tuple(asks), grammars=True, compile_steps=rng.choice([0.0, 1.0, 30.0])
    )


def _with_free_text(rng: random.Random, scenario: Scenario) -> Scenario:
    """The same with free text before some grammars, in some seeds."""
    if not scenario.grammars or rng.random() < 0.6:
        return scenario
    asks = [
        _freed(rng, ask, scenario) if ask.grammar and rng.random() < 0.7 else ask
        for ask in scenario.asks
    ]
    return dataclasses.replace(scenario, asks=tuple(asks))


def _freed(rng: random.Random, ask: Ask, scenario: Scenario) -> Ask:
    """With tags, and an end-of-sequence id, among what it would say by itself."""
    from tests.simulation.reference import answer

    plain = answer(dataclasses.replace(ask, grammar=None, caller=None), scenario)
    assert ask.grammar is not None
    if plain is None or ask.grammar.hangs or ask.grammar.fails_at >= 0:
        return ask
    said = [*plain.tokens[plain.prompt_length :]]
    first, close = said[0], rng.choice(said[: rng.choice([1, 3, 8, 30])])
    call = rng.choice([token for token in said if token != close] or [close ^ 1])
    free = rng.choice(
        [
            (True, -1, close, -1),
            (False, first, close, -1),
            (False, rng.randrange(VOCABULARY), close, -1),
            (True, -1, close, call),
            (False, first, close, call),
            (False, -1, -1, call),
        ]
    )
    ends = (rng.choice(said),) if rng.random() < 0.4 else ask.eos_ids
    grammar = dataclasses.replace(ask.grammar, free=free)
    return dataclasses.replace(ask, grammar=grammar, eos_ids=ends)


def _draw_toy(rng: random.Random, faults: float) -> Toy:
    fault, number = rng.random(), rng.randrange(1 << 40)
    if fault < faults / 4:
        return Toy(number, hangs=True)
    return Toy(number, fails_at=rng.choice([0, 1, 5]) if fault < faults else -1)


def _with_answers(rng: random.Random, scenario: Scenario) -> Scenario:
    """The same with several answers to some requests, and log-probabilities, in some seeds."""
    most = min(rng.choice([1, 1, 1, 2, 4, 12]), scenario.max_waiting_requests)
    scored = rng.choice([0.0, 0.0, 0.2, 0.8])
    asks = [
        dataclasses.replace(
            ask,
            n=rng.randint(1, most) if rng.random() < 0.5 else 1,
            logprobs=rng.randint(0, 3) if rng.random() < scored else -1,
            prompt_logprobs=rng.randint(0, 3) if rng.random() < scored / 2 else -1,
        )
        for ask in scenario.asks
    ]
    return dataclasses.replace(scenario, asks=tuple(asks))


def _with_images(rng: random.Random, scenario: Scenario) -> Scenario:
    """The same, of a model that sees, in some of the seeds."""
    if rng.random() < 0.75:
        return scenario
    largest = rng.choice([2, 4, 7])
    pool = [
        Image(number, rng.randint(1, largest), rng.randint(1, largest), rng.choice(_FAULTS))
        for number in range(rng.choice([1, 2, 6, 20]))
    ]
    # Shapes of equal area, and others of the same content: their rows are not the same.
    pool += [dataclasses.replace(p, height=p.width, width=p.height) for p in pool[:3]]
    pool += [dataclasses.replace(p, frames=rng.randint(1, 4)) for p in pool[1:4]]
    share = rng.choice([0.2, 0.6, 1.0])
    impatient = rng.choice([0.0, 0.3])
    asks = [
        _with_some(rng, ask, pool, scenario.max_model_len, impatient)
        if rng.random() < share
        else ask
        for ask in scenario.asks
    ]
    return dataclasses.replace(
        scenario,
        asks=tuple(asks),
        encoder_pages=rng.choice([1, 2, 4, 8, 50]),
        vision_workers=rng.choice([1, 1, 2]),
        vision_store=rng.choice([0, 0, 200, 1 << 20]),
        decode_steps=rng.choice([0.0, 1.0, 1.0, 30.0]),
    )


_FAULTS = ("",) * 18 + ("header", "pixels")


def _with_some(
    rng: random.Random, ask: Ask, pool: list[Image], max_model_len: int, impatient: float
) -> Ask:
    prompt, images = list(ask.prompt), []
    for at in sorted(rng.randint(0, min(len(prompt), 12)) for _ in range(rng.choice([1, 1, 2, 3]))):
        images.append(rng.choice(pool))
        prompt.insert(at + len(images) - 1, images[-1].placeholder)
    said = sum(len(time_text(time)) + 2 for image in images for time in image.times)
    shown = sum(image.rows for image in images) + said
    room = max(1, max_model_len - len(prompt) + len(images) - shown)
    return dataclasses.replace(
        ask,
        prompt=tuple(prompt),
        images=tuple(images),
        max_tokens=min(ask.max_tokens, room),
        min_tokens=min(ask.min_tokens, room),
        # While an image is on its way: others may wait for the same.
        aborts=ask.aborts or ((rng.expovariate(100),) if rng.random() < impatient else ()),
    )


def _draw_asks(rng: random.Random, scenario: Scenario, traffic: Traffic) -> tuple[Ask, ...]:
    stems = [tuple(_tokens(rng, traffic.stem)) for _ in range(3)]
    gap = rng.choice(traffic.gaps) * scenario.step_seconds
    asks: list[Ask] = []
    now = 0.0
    for _ in range(rng.choice([12, 40, 100])):
        if rng.random() < 0.7:  # else it comes together with the one before
            now += rng.expovariate(1 / gap) if gap else 0.0
        prompt = _draw_prompt(rng, scenario, stems, asks)
        asks.append(_draw_ask(rng, scenario, traffic, now, prompt))
    return tuple(asks)


def _draw_ask(
    rng: random.Random, scenario: Scenario, traffic: Traffic, at: float, prompt: tuple[int, ...]
) -> Ask:
    room = scenario.max_model_len - len(prompt)
    stops = (
        [_letters(rng) for _ in range(rng.choice([1, 1, 3]))]
        if rng.random() < traffic.stops
        else []
    )
    return Ask(
        at,
        prompt,
        max_tokens=min(room, rng.choice(traffic.outputs)) if room > 0 else 1,
        eos_ids=(EOS,) if rng.random() < 0.5 else (),
        stop_ids=(rng.randrange(VOCABULARY),) if rng.random() < 0.2 else (),
        min_tokens=min(max(room, 0), rng.choice([0, 0, 0, 3, 9])),
        stop=tuple(stops),
        include_stop=rng.random() < 0.5,
        priority=rng.choice(traffic.priorities),
        aborts=_draw_aborts(rng, scenario) if rng.random() < traffic.aborts else (),
    )


def _draw_aborts(rng: random.Random, scenario: Scenario) -> tuple[float, ...]:
    """At once, after about a step, 30 or 150 steps; sometimes twice."""
    step = scenario.step_seconds
    mean = rng.choice([0.0, step, 30 * step, 150 * step])
    first = rng.expovariate(1 / mean) if mean else 0.0
    return (first, first + rng.random() * step) if rng.random() < 0.3 else (first,)


def _draw_prompt(
    rng: random.Random, scenario: Scenario, stems: list[tuple[int, ...]], asks: list[Ask]
) -> tuple[int, ...]:
    """Refused, the same as one before, as long as can be, or on a shared stem."""
    limit = scenario.max_model_len
    kind = rng.random()
    if kind < 0.03:
        return (rng.choice([-1, VOCABULARY, 3]),) * rng.choice([1, limit, limit + 1])
    if kind < 0.13 and asks:
        return rng.choice(asks).prompt
    if kind < 0.18:
        return tuple(_tokens(rng, limit - 1))
    stem = rng.choice(stems)
    stem = stem[: rng.randrange(0, min(len(stem), limit - 1))]
    return (stem + tuple(_tokens(rng, rng.choice([1, 1, 2, 5, 12]))))[: limit - 1]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def _letters(rng: random.Random) -> str:
    return "".join(rng.choice("abcde") for _ in range(rng.choice([1, 2, 3, 3])))
