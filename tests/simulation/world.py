"""The engine's own actors, wired as in production, on a virtual clock in one thread.

Everything between the actors is simulated: edges that keep order and delay at random, and
outboxes that fill up. Nothing inside an actor is, but for the forward pass (`device.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from nanoactor.actors.blocks import BlockManagerActor
from nanoactor.actors.detokenizer import DetokenizerActor
from nanoactor.actors.frontend import FrontendActor
from nanoactor.actors.scheduler import SchedulerActor
from nanoactor.errors import EngineOverloaded
from nanoactor.messages.engine import RequestSpec, Stopping, Submit, TextOptions, Tokens
from nanoactor.model_files.files import ModelFiles
from nanoactor.model_files.generation_config import GenerationConfig
from nanoactor.models.sampling.columns import DEFAULTS
from nanoactor.options.config import EngineConfig
from nanoactor.options.pooling import PoolingConfig
from nanoactor.placement.topology import engine_topology
from nanoactor.recovery.journal import Entry
from nanoactor.requests.outputs import RequestOutputKind
from nanoactor.runtime.actor import RECREATE, Actor, Context
from nanoactor.runtime.codec import copy_arrays, decode, encode
from nanoactor.runtime.errors import OutboxOverflow, PeerBroken
from nanoactor.runtime.recovery import Death as NodeDeath
from nanoactor.runtime.topology import EdgeSpec
from nanoactor.scheduling.steps.planned import as_int32
from nanoactor.setup.actors import ActorConfig
from tests.simulation.callers import Callers
from tests.simulation.device import SimulatedRunner
from tests.simulation.grammar import SimulatedGrammar, SimulatedTokenizer, text_of
from tests.simulation.oracle import Oracle
from tests.simulation.reference import SALT, LetterDecoders
from tests.simulation.scenario import VOCABULARY, Ask, Death, Scenario, rules_of, sampling_of
from tests.simulation.vision import IMAGES, Letters, SimulatedVision, media_of, vision_config

M = TypeVar("M")

# More events than any scenario needs: past it, something goes round in circles.
_EVENTS_PER_TOKEN = 400


class Stuck(AssertionError):
    """Requests are not over, and nothing will happen any more; or too much happens."""


class VirtualLoop:
    """What actors see of an event loop: a clock, and calls that come due."""

    def __init__(self, seed: int) -> None:
        self._now = 0.0
        self._due: list[tuple[float, float, int, Callable[[], None]]] = []
        self._count = 0
        self._random = random.Random(seed)

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def call_at(self, when: float, function: Callable[..., None], *arguments: Any) -> None:
        """Calls that are due at the same moment come in random order."""
        self._count += 1
        entry = (when, self._random.random(), self._count, lambda: function(*arguments))
        heapq.heappush(self._due, entry)

    def call_later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """As asyncio's."""
        self.call_at(self._now + seconds, function, *arguments)

    def call_soon_threadsafe(self, function: Callable[..., None], *arguments: Any) -> None:
        """As asyncio's, but immediate calls keep no order among themselves."""
        self.call_at(self._now, function, *arguments)

    def step(self) -> bool:
        """Make the next call; False where none is due, ever."""
        if not self._due:
            return False
        self._now, _, _, call = heapq.heappop(self._due)
        call()
        return True


class SimulatedContext(Context):
    """A context on the virtual clock, in which every failure is raised at once."""

    def __init__(self, name: str, loop: VirtualLoop, outboxes: dict[str, Edge]) -> None:
        super().__init__(name, loop, outboxes, _raise)  # type: ignore[arg-type]

    def now(self) -> float:
        """Virtual seconds."""
        return self.loop.time()

    def owned_copy(self, message: M) -> M:
        """A copy, always: what was read in place is overwritten after its handler."""
        return copy_arrays(message)


def _raise(error: BaseException) -> None:
    raise error


class Edge:
    """An outbox and the transport behind it: in order, late, and of bounded capacity."""

    def __init__(self, world: World, spec: EdgeSpec, capacity: int) -> None:
        self.label = spec.label
        self.source = spec.source
        (self._target,) = spec.targets
        self._world = world
        self._bound = spec.bound
        self._capacity = capacity
        self._random = random.Random(f"{world.scenario.seed} {spec.source} {spec.label}")
        slow = 10.0 if world.scenario.uneven and self._random.random() < 0.25 else 1.0
        self._mean = world.scenario.delay * slow * world.scenario.step_seconds
        self._last_due = 0.0
        self.is_cut = False
        """Whether somebody has died since: nothing arrives."""
        self._transit: deque[Any] = deque()
        self._waiting: deque[Any] = deque()

    def send(self, message: Any) -> None:
        """Send, or wait for room, within the edge's bound."""
        if self.is_cut:
            raise PeerBroken(f"{self.source} -> {self.label} was cut")
        self._world.oracle.sent(self.source, message)
        if self._world.scenario.wire:
            message = _Record(message)
        if not self._waiting and len(self._transit) < self._capacity:
            self._enter(message)
            return
        self._waiting.append(message)
        if self._bound is not None and len(self._waiting) > self._bound:
            raise OutboxOverflow(f"{self.source} -> {self.label}: more than {self._bound} wait")

    @property
    def ready(self) -> bool:
        """As a real outbox: whether nothing waits."""
        return not self._waiting

    @property
    def messages(self) -> list[Any]:
        """What was sent and has not arrived."""
        there = [*self._transit, *self._waiting]
        return [m.message if isinstance(m, _Record) else m for m in there]

    def _enter(self, message: Any) -> None:
        loop = self._world.loop
        delay = self._random.expovariate(1 / self._mean) if self._mean else 0.0
        self._last_due = max(self._last_due, loop.time() + delay)
        self._transit.append(message)
        loop.call_at(self._last_due, self._arrive)

    def _arrive(self) -> None:
        if self.is_cut:
            return
        message = self._transit.popleft()
        if isinstance(message, _Record):
            self._world.deliver(self.source, self._target, message.message)
            message.poison()
        else:
            self._world.deliver(self.source, self._target, message)
        full = bool(self._waiting)
        while self._waiting and len(self._transit) < self._capacity:
            self._enter(self._waiting.popleft())
        if full and not self._waiting:
            self._world.actors[self.source].on_ready(self)


class _Record:
    """A message as bytes, read in place, and worthless once it was handled."""

    def __init__(self, message: Any) -> None:
        self._bytes = encode(message, inline=0).to_bytes(0)
        self.message = decode(self._bytes, 0)

    def poison(self) -> None:
        """Overwrite the bytes, under the eyes of whoever kept a view of them."""
        self._bytes[:] = b"\xdb" * len(self._bytes)


class World:
    """One scenario being played."""

    def __init__(self, scenario: Scenario, record: bool = False) -> None:
        self.scenario = scenario
        self.loop = VirtualLoop(scenario.seed)
        config = ActorConfig(_config(scenario), _files(scenario), SALT)
        topology = engine_topology(self._with_tokenizer(config) if scenario.grammars else config)
        specs = {spec.name: spec.config for spec in topology.actors}
        make = functools.partial
        self._makers: dict[str, Callable[[], Actor]] = {
            "frontend": make(FrontendActor, specs["frontend"]),
            "scheduler": make(SchedulerActor, specs["scheduler"]),
            "blocks": make(BlockManagerActor, specs["blocks"]),
            "runner.0": make(SimulatedRunner, specs["runner.0"], self),
            "detokenizer": make(DetokenizerActor, config),
        }
        if scenario.grammars:
            self._makers["grammar"] = make(SimulatedGrammar, specs["grammar"], self)
        for index in range(scenario.vision_workers if scenario.encoder_pages else 0):
            name = f"vision.{index}"
            self._makers[name] = make(SimulatedVision, specs[name], self, index)
        for index in range(scenario.tokenizers):
            self._makers[f"tokenizer.{index}"] = make(SimulatedTokenizer, config)
        self.actors: dict[str, Actor] = {}
        self._ready: dict[str, Any] = {}
        self._edge_specs = topology.edges
        self.cuts = 0
        self.entries: dict[int, Entry] = {}
        """By position in the scenario: what the journal has of each request."""
        self.refused: set[int] = set()
        """Positions of requests for which there was no room."""
        self.uid_of: dict[int, int] = {}
        self.oracle = Oracle(self, record)
        self._callers = Callers(self)
        for name in self._makers:
            self._set_up(name)
        self._start()
        for death in scenario.deaths:
            self.loop.call_at(death.at, self._die, death)
        for pause in scenario.pauses:
            self.loop.call_at(pause.at, self._control, "pause", True)
            self.loop.call_at(pause.at + pause.seconds, self._control, "pause", False)
        for moment in scenario.resets:
            self.loop.call_at(moment, self._control, "forget_index")
        for position, ask in enumerate(scenario.asks):
            self.loop.call_at(ask.at, self._submit, position, ask)

    def _with_tokenizer(self, config: ActorConfig) -> ActorConfig:
        """What the topology has a grammar for; nobody opens it."""
        files = dataclasses.replace(config.files, tokenizer_directory=Path())
        return dataclasses.replace(config, files=files)

    def _set_up(self, name: str) -> None:
        actor: Any = self._makers[name]()
        self.actors[name], self._ready[name] = actor, actor.setup()
        if isinstance(actor, DetokenizerActor):
            actor._decoders = LetterDecoders()  # type: ignore[assignment]
            actor._delta_bytes = self.scenario.chunk_bytes
            actor.reset()
        if isinstance(actor, SimulatedTokenizer):
            actor._encoder = Letters()  # type: ignore[assignment]

    def _die(self, death: Death, told: NodeDeath | None = None) -> None:
        """Some actors are gone, and with them all that was under way; the others are told."""
        self.cuts += 1
        for actor in self.actors.values():
            actor.context.retire()
        for edge in self.edges.values():
            edge.is_cut = True
        self.oracle.cut()
        frontend: Any = self.actors["frontend"]
        frontend.begin_restart([told or self._told(death.victims[0])])
        self.loop.call_later(death.after, self._begin_anew, death.victims, self.cuts)
        self._dead |= set(death.victims)

    def _told(self, actor: str) -> NodeDeath:
        """How the death of an actor is told; in most seeds so that anybody may have caused it, in
        some of the others as if it had come from outside."""
        anywhere = self.scenario.seed % 4 or actor in ("scheduler", "blocks")
        outside = self.scenario.seed % 8 == 4
        node = "control" if anywhere else actor
        return NodeDeath(node, "signal SIGSEGV", is_evidence=not outside)

    def _begin_anew(self, victims: tuple[str, ...], cuts: int) -> None:
        """As a node does, unless somebody else has died meanwhile."""
        if cuts != self.cuts:
            return
        for name, actor in list(self.actors.items()):
            ready = RECREATE if name in self._dead else actor.reset()
            self._ready[name] = ready
            if ready is RECREATE:
                self._set_up(name)
        self._dead.clear()
        self._start()
        self.oracle.resumes()
        frontend: Any = self.actors["frontend"]
        frontend.finish_restart()

    def _start(self) -> None:
        self._dead: set[str] = set()
        self.edges: dict[tuple[str, str], Edge] = {}
        for spec in self._edge_specs:
            between = {spec.source, *spec.targets}
            # By default these two share a node, where nothing waits.
            same_node = between == {"scheduler", "blocks"} and self.scenario.seed % 2 == 0
            capacity = 1_000_000 if same_node else self.scenario.capacity
            self.edges[spec.source, spec.label] = Edge(self, spec, capacity)
        self._handlers = {}
        for name, actor in self.actors.items():
            outboxes = {label: edge for (who, label), edge in self.edges.items() if who == name}
            context = SimulatedContext(name, self.loop, outboxes)
            context.send_self = functools.partial(self.deliver, name, name)
            actor.start(context, self._ready)
            self._handlers[name] = actor.handlers()
        self.oracle.attach()

    # -- the user -------------------------------------------------------------------------

    def _control(self, order: str, *arguments: Any) -> None:
        frontend: Any = self.actors["frontend"]
        getattr(frontend.control, order)(*arguments)
        self.oracle.counts[order] += 1

    def _submit(self, position: int, ask: Ask) -> None:
        frontend: Any = self.actors["frontend"]
        spec = RequestSpec(
            ask.priority,
            b"".join(sampling_of(position, answer) for answer in range(ask.n)),
            Stopping(ask.max_tokens, ask.min_tokens, ask.eos_ids, ask.stop_ids),
            TextOptions(ask.stop, ask.include_stop, True, ask.min_tokens),
            None if ask.pools else rules_of(position),
            logprobs=ask.logprobs,
            prompt_logprobs=ask.prompt_logprobs,
            grammar=text_of(ask.grammar) if ask.grammar else "",
            pools=ask.pools,
            held=ask.caller is not None,
        )

        def make(uid: int) -> Entry:
            self.uid_of[position] = uid
            for answer in range(ask.n):
                self.oracle.submitted(uid + answer, position, answer)
            media = [media_of(image) for image in ask.images]
            submit = Submit(
                uid,
                spec,
                text=None,
                chat=None,
                chat_options="",
                token_ids=as_int32(ask.prompt),
                item_times=tuple(one.times for one in media),
            )
            return Entry(str(uid), submit, RequestOutputKind.CUMULATIVE, media, ask.n)

        try:
            self.entries[position] = frontend.submit(make)
        except EngineOverloaded:
            self.refused.add(position)
            self.oracle.check_overload(ask.places)
            return
        self.oracle.check_door(self.entries[position].charge)
        for after in ask.aborts:
            self.loop.call_later(after, self._abort, self.entries[position])

    def _abort(self, entry: Entry) -> None:
        """As a stream that is closed does, or in some seeds as `AsyncLLM.abort`."""
        frontend: Any = self.actors["frontend"]
        over = entry.is_over
        frontend.abort(entry)
        if self.scenario.seed % 4 == 2 and not over:
            frontend.end_for_reader(entry)
            self.oracle.counts["ended for the reader"] += 1
            assert entry.is_over

    # -- the course of events -------------------------------------------------------------

    def deliver(self, source: str, target: str, message: Any) -> None:
        """Let an actor handle a message, then look whether all is well."""
        if self._is_killed_by(message):
            self.oracle.counts["killed by a request"] += 1
            step = self.scenario.step_seconds
            evidence = NodeDeath("detokenizer", "signal SIGSEGV", is_evidence=True)
            self._die(Death(self.loop.time(), ("detokenizer",), step), evidence)
            return
        self.oracle.arrives(source, target, message)
        self._handlers[target][type(message)](message)
        self.oracle.handled(target, message)
        if target == "frontend":
            self._callers.look()

    def _is_killed_by(self, message: Any) -> bool:
        """Whether the detokenizer dies of it: in some seeds with deaths one request kills that with
        a certain token, each time it gets there."""
        scenario = self.scenario
        if not isinstance(message, Tokens) or not scenario.deaths or scenario.seed % 3:
            return False
        poison = self.uid_of.get(scenario.seed // 3 % len(scenario.asks))
        kills = (message.uids == poison) & (message.indices >= scenario.seed % 4)
        return poison is not None and bool(kills.any())

    def play(self) -> Oracle:
        """Until nothing happens any more; raises where anything is wrong."""
        limit = 20_000 + _EVENTS_PER_TOKEN * self.scenario.tokens
        for _ in range(limit):
            if not self.loop.step():
                break
        else:
            raise Stuck(f"no end after {limit} events")
        self.oracle.conclude()
        return self.oracle


def _config(scenario: Scenario) -> EngineConfig:
    return EngineConfig(
        "simulated",
        max_num_seqs=scenario.max_num_seqs,
        max_num_batched_tokens=scenario.max_num_batched_tokens,
        pipeline_depth=scenario.depth,
        max_pipeline_depth=scenario.most_in_flight,
        plan_lead=scenario.plan_lead,  # type: ignore[arg-type]
        # The engine itself must know that states are found in no block.
        enable_prefix_caching=scenario.prefix_caching or scenario.slot_state,
        priority_window=scenario.priority_window,
        num_tokenizers=scenario.tokenizers,
        max_waiting_requests=scenario.max_waiting_requests,
        max_waiting_tokens=scenario.max_waiting_tokens,
        block_size=scenario.block_size,
        num_kv_blocks=scenario.blocks,
        skip_tokenizer_init=True,
        num_vision_workers=scenario.vision_workers,
        hold_timeout=scenario.hold_seconds,
        prefix_salt=SALT,
    )


def _files(scenario: Scenario) -> ModelFiles:
    sees = scenario.encoder_pages > 0
    vision = vision_config() if sees else None
    sizes: Any = SimpleNamespace(vocab_size=VOCABULARY + 4 * sees, vision=vision, hidden_size=2)
    kind: Any = scenario.pooling
    return ModelFiles(
        directory=Path(),
        config=sizes,
        generation=GenerationConfig(DEFAULTS),
        eos_token_ids=(),
        max_model_len=scenario.max_model_len,
        tokenizer_directory=None,
        hf_tokenizer_directory=Path(),
        images=IMAGES if sees else None,
        pooling=PoolingConfig(kind) if kind else None,
        has_slot_state=scenario.slot_state,
    )
