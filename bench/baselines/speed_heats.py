"""Who is timed in turn with whom in ``bench.speed``: the heats of the chosen cases.

Everything that a user may have got wrong is found here, before a process is started.
"""

from bench.baselines import speed_cases as cases
from bench.baselines.layer_lineup import entries_of_size
from bench.baselines.lineup import check_typed
from bench.baselines.rivals import JUDGE, YARDSTICK, Memory
from bench.baselines.speed_cases import Heat, SpeedSettings
from bench.baselines.speed_entries import HELD, EntryMaker
from bench.baselines.steady import TrainerLoop
from harness.plan.settings import checked


def make_heats(settings: SpeedSettings, *, scratch: str) -> list[Heat]:
    """Heats that have all chosen cases.

    Args:
        scratch: a folder for what entrants write.

    Raises:
        ValueError: naming the key, the value and what is allowed.
    """
    check_typed({key: why.format(device=settings.device) for key, why in HELD.items()})
    maker = HeatMaker(settings, scratch=scratch)
    return maker.on_cuda() if settings.device == "cuda" else maker.on_cpu()


class HeatMaker:
    """Puts the chosen cases and their entries together."""

    def __init__(self, settings: SpeedSettings, *, scratch: str):
        self.settings, self.make = settings, EntryMaker(settings, scratch=scratch)
        self.sizes, self.layer = self.make.sizes, self.make.layer
        self.chosen = self._chosen()
        self._check_spans()

    def names(self) -> list[str]:
        """All cases of the device."""
        if self.settings.device == "cuda":
            return [cases.ON_CUDA]
        memories = [f"pkm_{number}" for number in self.layer.half_keys]
        return [*cases.WORKLOAD, "one_open", *memories, *cases.MATCHES, "trainer"]

    def on_cpu(self) -> list[Heat]:
        """All heats on a CPU that have a chosen case."""
        heats = [self._against_the_yardstick(), self._one_open()]
        heats += [self._memory(number) for number in self.layer.half_keys]
        heats += [self._long_context(), self._trainer()]
        return [heat for heat in heats if heat.cases]

    def on_cuda(self) -> list[Heat]:
        """A heat for each setting."""
        heats, s = [], self.sizes
        for position in cases.SETTINGS:
            long = self.make.ours(
                f"adaptive_span {position}", self.make.plan("adaptive_span", position=position), spans=s.spans
            )
            short = self.make.ours(f"mhsa {position}", self.make.plan("mhsa", position=position, span=s.short_span))
            case = cases.cuda_case(position, entrant=long.name, reference=short.name)
            heats.append(Heat(entries=[short, long], cases=[case]))
        return heats

    def _chosen(self) -> set[str]:
        allowed, asked = self.names(), self.settings.cases
        if asked is None:
            return set(allowed)
        if not asked or set(map(str, asked)) - set(allowed):
            raise ValueError(f"cases={asked}: must be a list of {', '.join(allowed)}, or null for all")
        return set(asked)

    def _check_spans(self) -> None:
        s, key = self.sizes, f"{self.settings.device}.spans"
        spans = [checked(span, int, key=key) for span in s.spans]
        if len(spans) != s.heads or not all(0 <= span <= s.span for span in spans):
            raise ValueError(f"{key}={spans}: must be {s.heads} integers from 0 to {s.span}, one a head")

    def _against_the_yardstick(self) -> Heat:
        s, heat = self.sizes, Heat(yardstick=YARDSTICK, judge=JUDGE)
        spans = {"fixed": None, "zero": [0] * s.heads, "mixed": s.spans, "persistent": s.spans}
        for name in cases.WORKLOAD:
            for position in cases.SETTINGS if name in self.chosen else ():
                case = cases.workload_case(name, position, reference=YARDSTICK)
                plan = self.make.plan(cases.VARIANTS[name], position=position)
                heat.cases.append(case)
                heat.entries.append(self.make.ours(case.entrant, plan, spans=spans[name]))
        cold = self.make.plan("mhsa", span=s.block, carry=False)
        if "mhsa_256" in self.chosen:
            heat.cases.append(cases.match_case("mhsa_256", reference=JUDGE))
            heat.entries.append(self.make.ours("mhsa_256", cold))
        if heat.cases:
            heat.entries[:0] = [self.make.peer(YARDSTICK, cold), self.make.peer(JUDGE, cold)]
        return heat

    def _one_open(self) -> Heat:
        heat, s = Heat(), self.sizes
        if "one_open" in self.chosen:
            far, learned = s.long_span, self.make.plan("adaptive_span", span=s.long_span)
            heat.entries[:] = [
                self.make.ours("one open", learned, spans=[*[s.near] * (s.heads - 1), far]),
                self.make.ours("all open", learned, spans=[far] * s.heads),
                self.make.ours("mhsa", self.make.plan("mhsa", span=far)),
            ]
            heat.cases.append(cases.one_open_case(entrant="one open", all_open="all open", fixed="mhsa"))
        return heat

    def _memory(self, half_keys: int) -> Heat:
        heat, name, asked = Heat(), f"pkm_{half_keys}", self.layer
        if name in self.chosen:
            memory = Memory(half_keys=half_keys, top_k=asked.top_k, heads=asked.heads, d_query=asked.d_query)
            sizes = {"d_model": asked.width, "layers": 2, "lanes": 1, "segment": asked.positions}
            plan = self.make.plan("product_key_memory", memory=memory, carry=False, **sizes)
            heat.entries[:] = entries_of_size(plan, memory, positions=asked.positions, verb="speed")
            alike, documented, ours = (entry.name for entry in heat.entries)
            heat.cases.append(cases.memory_case(name, entrant=ours, reference=alike))
            heat.cases.append(cases.memory_case(f"{name}_adam", entrant=ours, reference=documented))
        return heat

    def _long_context(self) -> Heat:
        heat, context = Heat(yardstick=YARDSTICK, judge=JUDGE), self.sizes.long_context
        if "mhsa_1024" in self.chosen:
            plan = self.make.plan("mhsa", span=context, segment=context, carry=False)
            peers = [self.make.peer(name, plan) for name in (YARDSTICK, JUDGE)]
            heat.entries[:] = [*peers, self.make.ours("mhsa_1024", plan)]
            heat.cases.append(cases.match_case("mhsa_1024", reference=JUDGE))
        return heat

    def _trainer(self) -> Heat:
        heat = Heat(longer=cases.LONGER_HEAT)
        if "trainer" in self.chosen:
            plan = self.make.plan("adaptive_span", every_steps=1)
            heat.entries.append(self.make.ours("bare loop", plan, spans=self.sizes.spans))
            heat.entries.append(self.make.ours("trainer", plan, spans=self.sizes.spans, make=TrainerLoop))
            heat.cases.append(cases.trainer_case(entrant="trainer", reference="bare loop"))
        return heat
