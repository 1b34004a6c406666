"""Plans of moves that overlap in any way, run wave by wave, leave what reading all and then writing all leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the torch tier needs torch")

from gpu_on_cpu import HostRunner  # noqa: E402
from kv_views import DTYPES, LAYOUTS, SMALL, assert_same, rotation, twin, view  # noqa: E402

from spanflow.cidra.moves import Moves  # noqa: E402
from spanflow.cidra.plan import plan_moves  # noqa: E402
from spanflow.kernels.dispatch import best_runner  # noqa: E402
from spanflow.kernels.reference import KVView, run_slots  # noqa: E402
from spanflow.kernels.runner import Runner, TorchRunner  # noqa: E402

pytestmark = pytest.mark.torch

NUM_SLOTS = SMALL.num_blocks * SMALL.block_size
Rows = list[tuple[int, int, int, int]]
MakeRunner = Callable[[Sequence[KVView], int], Runner]


@pytest.fixture(scope="module", params=["torch", "CPU", "CUDA on the host"])
def make_runner(request: pytest.FixtureRequest) -> MakeRunner:
    """A runner on some layers with so many blocks of scratch."""
    match request.param:
        case "torch":
            return TorchRunner
        case "CPU":
            cache = request.getfixturevalue("kernel_cache")
            return lambda views, scratch_blocks: best_runner(views, cache, scratch_blocks)
        case _:
            library = request.getfixturevalue("gpu_on_cpu")
            return lambda views, scratch_blocks: HostRunner(library, views, scratch_blocks)


def check(runner: Runner, rows: Rows) -> None:
    wanted = [twin(view) for view in runner.views]
    moves = Moves.of(rows)
    run_slots(wanted, (), moves)
    plan = plan_moves(moves, runner.scratch_start, runner.scratch_tokens)
    runner.run_waves(plan.waves)
    assert_same(runner.views, wanted)


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    """Ranges whose targets do not overlap; many sources lie near their targets."""
    rows, target = [], 0
    while draw(st.booleans()):
        target += draw(st.integers(0, 40))
        count = draw(st.integers(0, 70))
        if target + count > NUM_SLOTS:
            break
        near = st.integers(-40, 40).map(lambda distance, target=target: target + distance)
        source = draw(st.one_of(near, st.just(target), st.integers(0, NUM_SLOTS)))
        rows.append((min(max(source, 0), NUM_SLOTS - count), target, count, draw(st.integers(-300, 300))))
        target += count
    return draw(st.permutations(rows))


@given(rows=some_rows(), layout=st.sampled_from(LAYOUTS), dtype=st.sampled_from(DTYPES), scratch=st.integers(1, 3))
def test_any_moves(make_runner: MakeRunner, rows: Rows, layout: str, dtype: torch.dtype, scratch: int) -> None:
    rope = rotation()
    check(make_runner([view(layout, dtype, rope, seed) for seed in range(2)], scratch), rows)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("distance", [-33, -16, -3, 1, 16, 50])
def test_a_span_shifted_in_place(make_runner: MakeRunner, layout: str, distance: int) -> None:
    runner = make_runner([view(layout, torch.float32, rotation())], 5)
    check(runner, [(64, 64 + distance, 100, distance)])


def test_spans_that_trade_places_in_a_cycle_and_one_turned_in_place(make_runner: MakeRunner) -> None:
    runner = make_runner([view("cpu", torch.bfloat16, rotation(), seed) for seed in range(3)], 4)
    check(runner, [(0, 40, 40, 40), (40, 80, 40, 40), (80, 0, 40, -80), (200, 200, 60, 17)])


def test_scratch_is_as_aligned_as_the_pool(make_runner: MakeRunner) -> None:
    for layout in LAYOUTS:
        runner = make_runner([view(layout, torch.bfloat16, rotation())], 2)
        for pages, spare in zip(
            (runner.views[0].keys, runner.views[0].values),
            (runner.scratch[0].keys, runner.scratch[0].values),
            strict=True,
        ):
            assert spare.shape == (2, *pages.shape[1:])
            assert spare.stride()[1:] == pages.stride()[1:]
            assert spare.data_ptr() % 256 == 0
            assert spare.stride(0) * spare.element_size() % 256 == 0


def test_layers_without_slots_in_common_are_refused() -> None:
    one, other = view("cpu", torch.float32, rotation()), view("token_major", torch.float32, rotation())
    with pytest.raises(ValueError, match=r"layers of \[\(12, 16\), \(24, 16\)\]"):
        TorchRunner([one, KVView(other.keys[:12], other.values[:12], other.rope)])
