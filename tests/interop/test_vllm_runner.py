"""Which of vLLM's runners drafts, and what its second runner records. vLLM's configuration is a stub of 0.26.0's."""

import os
import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Literal, get_args

import pytest

from redrafter.errors import ConfigError
from redrafter.interop.vllm import Proposer, ProposerConfig, speculator
from redrafter.interop.vllm.capture_sizes import capture_sizes
from redrafter.interop.vllm.measured_depths import MeasuredDepths
from redrafter.interop.vllm.speculator import PROPOSER, wanted

FORCED = "VLLM_USE_V2_MODEL_RUNNER"
DEPTH = 4
COMPILATION = {"cudagraph_capture_sizes": None, "max_cudagraph_capture_size": None, "cudagraph_mode": None}


def make_config_class(known: ModuleType) -> type:
    """The part of vLLM's configuration that chooses a runner, with its rules."""

    class VllmConfig:
        def __init__(self, **changed) -> None:
            spec = SimpleNamespace(method="custom_class", model=PROPOSER, num_speculative_tokens=DEPTH)
            given = {
                "speculative_config": spec,
                "additional_config": {},
                "parallel_config": SimpleNamespace(world_size_across_dp=1),
                "scheduler_config": SimpleNamespace(
                    max_num_seqs=32, max_num_batched_tokens=2048, async_scheduling=None
                ),
                "compilation_config": SimpleNamespace(**COMPILATION),
                "other_features": [],
            }
            vars(self).update(given | changed)
            self.__post_init__()

        def __post_init__(self) -> None:
            spec = self.speculative_config
            self.scheduler_config.async_scheduling = spec is None or spec.method in get_args(known.NgramGPUTypes)
            self.seen = vars(self.compilation_config).copy()

        def _get_v2_model_runner_unsupported_features(self) -> list[str]:
            method = None if self.speculative_config is None else self.speculative_config.method
            return [*self.other_features, *([] if method is None else [f"speculative method '{method}'"])]

        @property
        def use_v2_model_runner(self) -> bool:
            if FORCED in os.environ:
                return os.environ[FORCED] == "1"
            return not self._get_v2_model_runner_unsupported_features()

    return VllmConfig


@pytest.fixture
def vllm(monkeypatch):
    """A stub of vLLM 0.26.0 on CUDA, with the plug-in. `replaced` counts how often the runner was to be changed."""
    vllm, config, inner, platforms = (
        ModuleType(f"vllm{name}") for name in ("", ".config", ".config.vllm", ".platforms")
    )
    vllm.__version__, inner.NgramGPUTypes = "0.26.0+cu130", Literal["ngram_gpu"]
    config.VllmConfig = make_config_class(inner)
    platforms.current_platform = SimpleNamespace(is_cuda=lambda: True)
    for module in (vllm, config, inner, platforms):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv(FORCED, raising=False)
    replaced = []
    monkeypatch.setattr(speculator, "_replace", lambda: replaced.append(1))
    speculator.register()
    return SimpleNamespace(
        Config=config.VllmConfig, platform=platforms.current_platform, inner=inner, replaced=replaced
    )


def settings(**section) -> dict:
    return {"redrafter": section}


def uses_second(vllm, config) -> bool:
    """All that belongs together, or nothing of it."""
    sizes = config.seen["cudagraph_capture_sizes"]
    found = {
        wanted(config),
        config.use_v2_model_runner,
        config.scheduler_config.async_scheduling,
        sizes == capture_sizes(32, DEPTH + 1, 2 * 32 * (DEPTH + 1)),
        sizes is not None,
        bool(vllm.replaced),
        ProposerConfig.of(config.additional_config).runner == 2,
    }
    assert len(found) == 1
    return found.pop()


class TestChoice:
    @pytest.mark.parametrize(
        "additional", [{}, settings(runner="auto"), settings(least=0, width=2), settings(runner=2)]
    )
    def test_the_second_where_it_is_known_to_work(self, vllm, additional):
        before = str(additional)
        config = vllm.Config(additional_config=additional)
        assert uses_second(vllm, config)
        assert config.additional_config["redrafter"] == {**additional.get("redrafter", {}), "runner": 2}
        assert str(additional) == before
        assert get_args(vllm.inner.NgramGPUTypes) == ("ngram_gpu",), "for the next engine in this process"

    @pytest.mark.parametrize(
        "changed",
        [
            {"additional_config": settings(runner=1)},
            {"additional_config": settings(least=0.3)},
            {"parallel_config": SimpleNamespace(world_size_across_dp=2)},
            {"other_features": ["prompt embeds"]},
        ],
    )
    def test_else_the_first(self, vllm, changed):
        assert not uses_second(vllm, vllm.Config(**changed))

    def test_on_cuda_only(self, vllm):
        vllm.platform.is_cuda = lambda: False
        assert not uses_second(vllm, vllm.Config())
        assert uses_second(vllm, vllm.Config(additional_config=settings(runner=2)))

    def test_the_first_if_the_environment_says_so(self, vllm, monkeypatch):
        monkeypatch.setenv(FORCED, "0")
        assert not uses_second(vllm, vllm.Config())
        monkeypatch.setenv(FORCED, "1")
        assert uses_second(vllm, vllm.Config())

    def test_is_kept(self, vllm):
        """vLLM gives each copy of a data-parallel engine a configuration that speaks of one GPU."""
        config = vllm.Config(parallel_config=SimpleNamespace(world_size_across_dp=4))
        config.parallel_config.world_size_across_dp = 1
        assert not uses_second(vllm, config)
        config.__post_init__()
        assert not uses_second(vllm, config)

    @pytest.mark.parametrize(
        "given",
        [
            None,
            SimpleNamespace(method="eagle3", model=PROPOSER),
            SimpleNamespace(method="custom_class", model="another.Class"),
        ],
    )
    @pytest.mark.parametrize("additional", [{}, settings(runner=2), settings(unknown=1)])
    def test_other_engines_stay_as_they_are(self, vllm, given, additional):
        before = str(additional)
        config = vllm.Config(speculative_config=given, additional_config=additional)
        assert config.additional_config is additional
        assert str(additional) == before
        assert config.seen["cudagraph_capture_sizes"] is None
        assert config.use_v2_model_runner is (given is None)
        assert not vllm.replaced
        assert not wanted(config)

    def test_refuses_other_runners(self, vllm):
        for wrong in (0, 3, "second", None):
            with pytest.raises(ConfigError, match="runner must be"):
                vllm.Config(additional_config=settings(runner=wrong))


class TestRecordings:
    def sizes(self, vllm, **compilation):
        seen = vllm.Config(compilation_config=SimpleNamespace(**COMPILATION | compilation)).seen
        return {name: value for name, value in seen.items() if name != "cudagraph_mode"}

    def test_the_users_sizes_stay(self, vllm):
        given = {"cudagraph_capture_sizes": [7, 14], "max_cudagraph_capture_size": None}
        assert self.sizes(vllm, **given) == given

    def test_the_users_bound_counts(self, vllm):
        """vLLM refuses a bound that is not the largest size."""
        assert self.sizes(vllm, max_cudagraph_capture_size=37) == {
            "cudagraph_capture_sizes": [1, 2, 4, 5, 10, 20, 25, 30, 32, 35],
            "max_cudagraph_capture_size": 35,
        }

    @pytest.mark.parametrize("mixed", [False, True])
    def test_steps_that_read_prompts_are_recorded_or_not(self, vllm, mixed):
        mode = SimpleNamespace(mixed_mode=lambda: mixed)
        assert self.sizes(vllm, cudagraph_mode=mode)["max_cudagraph_capture_size"] == 160 * (1 + mixed)

    def test_no_more_tokens_than_a_step_can_have(self, vllm):
        scheduler = SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=64, async_scheduling=None)
        assert vllm.Config(scheduler_config=scheduler).seen["max_cudagraph_capture_size"] == 60
        scheduler.max_num_batched_tokens = 8192
        assert vllm.Config(scheduler_config=scheduler).seen["max_cudagraph_capture_size"] == 510

    def unrecorded(self, sizes: list[int], requests: int, width: int) -> list[tuple[int, int]]:
        """Steps, as (tokens per request, requests), for which vLLM's second runner finds no recording."""
        found = defaultdict(set, {size: set() for size in sizes})  # tokens -> (tokens per request, requests)
        for size in sizes:
            for each in (1, width):
                rows = -(-size // each)
                if rows <= requests and rows * each <= sizes[-1]:
                    found[rows * each].add((each, rows))
        steps = [(each, rows) for each in (1, width) for rows in range(1, requests + 1) if each * rows <= sizes[-1]]
        next_larger = {step: min(t for t in found if t >= step[0] * step[1]) for step in steps}
        return [(w, n) for (w, n), t in next_larger.items() if not any(w == e and n <= rows for e, rows in found[t])]

    @pytest.mark.parametrize("width", [2, 3, 4, 5, 8, 11])
    def test_every_step_is_recorded(self, width):
        for requests in (*range(1, 20), 32, 60, 128, 1024):
            for most in {37, min(2 * requests * width, 512)}:
                sizes = capture_sizes(requests, width, most)
                assert not self.unrecorded(sizes, requests, width), (requests, most)
                assert most - width < sizes[-1] <= most
                assert len(sizes) <= 56, "vLLM's own sizes up to 512 are 51"

    def test_every_step_twin(self):
        """vLLM's own sizes leave steps without a recording."""
        usual = [1, 2, 4, *range(8, 256, 8), *range(256, 321, 16)]
        assert (1, 5) in self.unrecorded(usual, 32, 5)


@pytest.fixture
def scheduler(monkeypatch):
    """The class of vLLM's scheduler as a stub: it asks how many guesses to make after each step."""

    class Scheduler:
        num_spec_tokens, dynamic_sd_lookup, counts = DEPTH, None, (("a", 5),)

        def __init__(self, vllm_config) -> None:
            self.vllm_config = vllm_config

        def schedule(self):
            asked = DEPTH if self.dynamic_sd_lookup is None else self.dynamic_sd_lookup[1]
            return SimpleNamespace(num_scheduled_tokens=dict(self.counts), num_spec_tokens_to_schedule=asked)

        def make_spec_decoding_stats(self, **counts):
            return counts

    module = ModuleType("vllm.v1.core.sched.scheduler")
    module.Scheduler = Scheduler
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Scheduler


@pytest.mark.parametrize(
    ("changed", "measures"),
    [
        ({}, True),
        ({"additional_config": settings(adaptive=False)}, False),
        ({"additional_config": settings(runner=1)}, False),
        ({"speculative_config": None}, False),
    ],
)
def test_a_scheduler_made_before_the_plug_in_was_asked(vllm, scheduler, changed, measures):
    made = scheduler(vllm.Config(**changed))
    speculator._replace_depths()
    made.schedule()
    assert isinstance(made.dynamic_sd_lookup, MeasuredDepths) is measures
    depths = made.dynamic_sd_lookup
    made.schedule()
    assert made.dynamic_sd_lookup is depths
    counts = {"num_draft_tokens": 4, "num_accepted_tokens": 2}
    assert made.make_spec_decoding_stats(**counts) == counts


@pytest.mark.parametrize(("tokens", "timed"), [(DEPTH + 1, True), (DEPTH + 2, False)])
def test_what_the_scheduler_tells(vllm, scheduler, tokens, timed):
    """Steps are timed, those with a prompt are not; of four guesses, one was right."""
    made = scheduler(vllm.Config())
    made.counts = (("a", 1), ("b", tokens))
    speculator._replace_depths()
    for _ in range(6):
        made.schedule()
        made.make_spec_decoding_stats(num_draft_tokens=4, num_accepted_tokens=1)
    assert bool(made.dynamic_sd_lookup.chooser.times) is timed
    assert made.dynamic_sd_lookup.chooser.guessed[0] == 1


def test_the_runner_gets_our_drafter(vllm, monkeypatch):
    """Once the model's weights are there. Other engines of this process keep theirs."""

    class Runner:
        speculator, done = None, ()

        def load_model(self, *given, **named) -> None:
            self.done = (*self.done, "loaded", given, named)

    ours = SimpleNamespace(attach=lambda runner: setattr(runner, "done", (*runner.done, "attached")))
    module = ModuleType("vllm.v1.worker.gpu.model_runner")
    module.GPUModelRunner, module.init_speculator = Runner, lambda *given: given
    packages = [ModuleType(module.__name__.rsplit(".", i)[0]) for i in (3, 2, 1)]
    for package in (*packages, module):
        monkeypatch.setitem(sys.modules, package.__name__, package)
    packages[-1].model_runner = module
    monkeypatch.setattr(speculator, "make_speculator", lambda: lambda config, device: ours)
    speculator._replace_speculator()
    config, other = vllm.Config(), vllm.Config(speculative_config=None)
    assert module.init_speculator(other, "cuda", "more") == (other, "cuda", "more")
    assert module.init_speculator(config, "cuda", "more") is ours
    runner = Runner()
    runner.load_model(1, dummy=True)
    assert runner.done == ("loaded", (1,), {"dummy": True})
    runner.speculator = ours
    runner.load_model()
    assert runner.done[-1] == "attached"
    assert runner.done.count("loaded") == 2


def test_other_versions_are_left_as_they_are(monkeypatch):
    """A stub without anything that `register` replaces: the version that is known would fail here."""
    vllm = ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.delitem(sys.modules, "vllm.config", raising=False)
    vllm.__version__ = "0.32.0"
    speculator.register()
    vllm.__version__ = "0.26.0+cu130"
    with pytest.raises(ImportError):
        speculator.register()


def test_the_first_runner_refuses_to_stand_in_for_the_second(monkeypatch, caplog):
    vllm = ModuleType("vllm")
    vllm.__version__ = "0.32.0"
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    with pytest.raises(ConfigError, match="vLLM uses its first runner"):
        Proposer(SimpleNamespace(additional_config=settings(runner=2)))
    assert "redrafter: vLLM uses its first runner" in caplog.text
    for open_or_first in ({}, settings(runner=1)):
        Proposer(SimpleNamespace(additional_config=open_or_first))
