"""Parameters on servers: prices against steps played message by message, closed forms, and what devices hold."""

import random
from collections.abc import Callable

import pytest
import torch

from autopar.formats.cluster import Cluster, Link
from autopar.formats.profile import Profile
from autopar.hardware.topology import Place
from autopar.ownership import even_shares
from autopar.planner import PlanOptions
from autopar.planner.candidate import Candidate, CandidateStage, divisors
from autopar.planner.comparison import compare
from autopar.planner.costs.model import CostModel
from autopar.planner.peers.servers import BUFFER_BYTES, ServedStep, central, data_parallel, sharded, ways_to_serve
from autopar.planner.simulator.simulate import Simulator
from priced import nodes_of
from random_problems import gpt_profile, hierarchy, local_cluster, random_cluster, random_profile, two_kinds


def on_gpus(profile: Profile) -> Profile:
    """The same on what torch's DataParallel takes; adding gradients takes time."""
    layers = tuple(each.model_copy(update={"accumulate_s": each.update_s / 3}) for each in profile.layers)
    device = profile.device.model_copy(update={"type": "cuda"})
    return profile.model_copy(update={"layers": layers, "device": device})


def costs_of(seed: int, sizes: tuple[int, ...], **options: int) -> CostModel:
    """Return random layers on nodes of some sizes, every other time of two kinds of devices."""
    profile = on_gpus(random_profile(seed, batches=(4, 6, 8, 12)))
    cluster = nodes_of(random_cluster(seed, sum(sizes)), sizes)
    if seed % 2:
        nodes = [device.node for device in cluster.devices]
        profile, cluster = two_kinds(profile, cluster, seed)
        devices = zip(cluster.devices, nodes, strict=True)
        kept = tuple(device.model_copy(update={"node": node}) for device, node in devices)
        cluster = cluster.model_copy(update={"devices": kept})
    return CostModel(profile, cluster, PlanOptions(**options))


def passes_s(costs: CostModel, device: int, rows: int, adding: float) -> tuple[float, float]:
    layers = costs.layers[costs.kind_of[device]]
    return layers.sums("forward_s", rows)[-1], layers.sums("backward_s", rows, adding)[-1]


def added_s(costs: CostModel, device: int) -> float:
    return sum(layer.accumulate_s for layer in costs.layers[costs.kind_of[device]].layers)


def trained_bytes(costs: CostModel) -> int:
    profile = costs.profile
    tied = sum(each.bytes * (len(each.layers) - 1) for each in profile.tied if each.trainable)
    return sum(layer.trainable_bytes for layer in profile.layers) - tied


def output_bytes(costs: CostModel, rows: int) -> int:
    layers = costs.layers[0]
    tensors = {each.name for each in costs.profile.tensors}
    kept = [size for name, size in layers.saved_at(costs.layer_count - 1, rows).items() if name not in tensors]
    return max([layers.bytes_at(costs.layer_count - 1, "output_bytes", rows), *kept])


def buffers(size: int) -> list[int]:
    found = []
    while size > 0:
        found.append(min(size, BUFFER_BYTES))
        size -= found[-1]
    return found


def played_data_parallel(costs: CostModel, micro_batches: int) -> float:
    """Return a step of DataParallel: copies of device 0 one by one, and no replica computes before all may."""
    rows, profile, tied = costs.batch // micro_batches, costs.profile, costs.profile.tied
    shares = [len(part) for part in torch.arange(rows).chunk(len(costs.devices))]
    others = range(1, len(shares))
    held = sum(layer.parameters_bytes + layer.buffers_bytes for layer in profile.layers)
    held -= sum(each.bytes * (len(each.layers) - 1) for each in tied)
    first = (micro_batches - 1) / micro_batches
    passes = [passes_s(costs, at, share, 0.0 if at else first) for at, share in enumerate(shares)]
    now_s, trained = profile.step_overhead_s, buffers(trained_bytes(costs))
    for _ in range(micro_batches):
        inputs = [tensor.bytes_per_sample for tensor in profile.tensors if tensor.producer is None]
        now_s += sum(costs.message_s(shares[device] * size, 0, device) for size in inputs for device in others)
        now_s += sum(costs.message_s(size, 0, device) for size in buffers(held) for device in others)
        ends_s = [now_s + forward_s for forward_s, _ in passes]
        outputs_s = [costs.message_s(output_bytes(costs, shares[device]), 0, device) for device in others]
        now_s = ends_s[0]
        for end_s, output_s in zip(ends_s[1:], outputs_s, strict=True):
            now_s = max(now_s, end_s) + output_s
        now_s += sum(outputs_s) + max(backward_s for _, backward_s in passes)
        for size in trained:
            added = added_s(costs, 0) * size / sum(trained)
            now_s += sum(costs.message_s(size, 0, device) + added for device in others)
    return now_s + costs.layers[costs.kind_of[0]].update_sums[-1]


def test_data_parallels_step_is_that_of_its_copies_played_one_by_one() -> None:
    kinds = 0
    for seed in range(80):
        costs = costs_of(seed, (random.Random(seed).randint(1, 6),))
        if trained_bytes(costs) == 0:
            continue
        kinds += len(set(costs.kind_of)) > 1
        for micro_batches in divisors(costs.batch):
            found = data_parallel(costs, micro_batches)
            if costs.batch // micro_batches < len(costs.devices):
                assert "has a sample for each of" in str(found)
                continue
            assert isinstance(found, ServedStep)
            assert found.step_s == pytest.approx(played_data_parallel(costs, micro_batches), rel=1e-9), f"seed {seed}"
    assert kinds > 20


def played_server(costs: CostModel, holder: int, micro_batches: int) -> tuple[float, float]:
    """Return a step of a central server whose link takes pushes in their order, from the nearest level on.

    And one in which an all-reduce takes the place of pushes and pulls, which no server is quicker than.
    """
    devices, size = range(len(costs.devices)), trained_bytes(costs)
    shares = sorted(even_shares(costs.batch // micro_batches, len(costs.devices)), reverse=True)
    adding = (micro_batches - 1) / micro_batches
    whole = {
        at: sum(layer[-1] for layer in costs.seconds.running(float(costs.batch), 1.0, costs.kind_of[at]))
        for at in devices
    }
    fastest = sorted(devices, key=lambda at: (whole[at], at))
    rows = dict(zip(fastest, shares, strict=True)) if len(set(costs.kind_of)) > 1 else None
    rows = rows or dict(enumerate(even_shares(costs.batch // micro_batches, len(costs.devices))))
    done_s = {device: micro_batches * sum(passes_s(costs, device, rows[device], adding)) for device in devices}
    levels = [("node", "rack", "network").index(costs.links.topology.pair(holder, device)) for device in devices]
    order = sorted((each for each in devices if each != holder), key=lambda at: (levels[at], done_s[at]))
    now_s = done_s[holder]
    for device in order:
        now_s = max(now_s, done_s[device]) + costs.message_s(size, holder, device) + added_s(costs, holder)
    update_s = costs.layers[costs.kind_of[holder]].update_sums[-1]
    now_s += update_s + sum(costs.message_s(size, holder, device) for device in order)
    reduced_s = costs.links.collective_s("all_reduce", size, costs.links.place(devices))
    begin_s = costs.profile.step_overhead_s
    return begin_s + now_s, begin_s + max(done_s.values()) + reduced_s + update_s


def test_a_central_servers_step_is_that_of_its_pushes_and_pulls_played_one_by_one_and_its_holder_suits_it_best() -> (
    None
):
    several = floors = 0
    for seed in range(80):
        sizes = ((2,), (4,), (2, 2), (1, 3), (2, 1, 1))[seed % 5]
        costs = costs_of(seed, sizes)
        steps = []
        for micro_batches in divisors(costs.batch):
            if costs.batch // micro_batches < len(costs.devices):
                assert "has a sample for each" in str(central(costs, 0, micro_batches))
                continue
            for holder in range(len(costs.devices)):
                found = central(costs, holder, micro_batches)
                assert isinstance(found, ServedStep)
                expected, reduced_s = played_server(costs, holder, micro_batches)
                floors += expected < reduced_s
                expected = max(expected, reduced_s)
                assert found.step_s == pytest.approx(expected, rel=1e-9), f"seed {seed}: {micro_batches}, {holder}"
                steps.append(found.step_s)
        row = next(each for each in ways_to_serve(costs, PlanOptions()) if each.name == "parameter server, central")
        if len(sizes) == 1 and steps:
            assert row.step is not None
            assert row.step.step_s == pytest.approx(min(steps), rel=1e-12)
            several += 1
    assert min(several, floors) > 10


def flat(devices: int, latency_s: float, bytes_per_s: float) -> Cluster:
    cluster = local_cluster(devices)
    link = Link(level="node", latency_s=latency_s, bytes_per_s=bytes_per_s)
    return cluster.model_copy(update={"links": (link,), "curves": ()})


@pytest.mark.parametrize("latency_s", [0.0, 1e-4])
def test_data_parallel_and_a_central_server_grow_with_devices_as_a_ring_and_a_sharded_one_do_not(
    latency_s: float,
) -> None:
    def costs_on(devices: int) -> CostModel:
        profile = on_gpus(gpt_profile(batch=4 * devices))
        return CostModel(profile, flat(devices, latency_s, 1e9), PlanOptions(micro_batches=1))

    def link_s(way: Callable[[CostModel], ServedStep | str], devices: int) -> float:
        found = way(costs_on(devices))
        assert isinstance(found, ServedStep)
        assert found.link_s < found.step_s
        return found.link_s

    one = costs_on(2)
    size = trained_bytes(one)
    for devices in range(2, 12):
        ring_s = one.links.collective_s("all_reduce", size, Place(devices))
        assert link_s(lambda costs: data_parallel(costs, 1), devices) == pytest.approx(
            (devices - 1) * link_s(lambda costs: data_parallel(costs, 1), 2), rel=1e-9
        )
        messages_s = (devices - 1) * 2 * (latency_s + size / 1e9)
        expected = messages_s + (devices - 1) * added_s(one, 0)
        assert link_s(lambda costs: central(costs, 0, 1), devices) == pytest.approx(expected, rel=1e-9)
        assert link_s(lambda costs: sharded(costs, 1), devices) == pytest.approx(ring_s, rel=1e-9)
        assert ring_s <= 2 * size / 1e9 + 2 * (devices - 1) * latency_s


def test_a_sharded_servers_messages_are_those_of_the_slowest_device_of_several_nodes() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        sizes = [rng.randint(1, 3) for _ in range(rng.randint(2, 4))]
        cluster = hierarchy(seed, sizes, racks=rng.randint(1, 2))
        profile = on_gpus(random_profile(seed, batches=(12,)))
        costs = CostModel(profile, cluster, PlanOptions())
        found = sharded(costs, 1)
        assert isinstance(found, ServedStep)
        devices = range(len(costs.devices))
        part = trained_bytes(costs) / len(devices)
        sent = [sum(costs.message_s(part, one, other) for other in devices if other != one) for one in devices]
        floor_s = costs.links.collective_s("all_reduce", trained_bytes(costs), costs.links.place(devices))
        link_s = max(2 * max(sent), floor_s)
        assert found.link_s == pytest.approx(link_s, rel=1e-9)
        computing = max(sum(passes_s(costs, at, rows, 0.0)) for at, rows in enumerate(even_shares(12, len(devices))))
        update_s = costs.layers[0].update_sums[-1] + (len(devices) - 1) * added_s(costs, 0)
        expected = costs.profile.step_overhead_s + computing + link_s + update_s / len(devices)
        assert found.step_s == pytest.approx(expected, rel=1e-9)


def test_a_device_alone_uses_what_others_leave_of_a_link_that_they_share() -> None:
    profile = on_gpus(gpt_profile(batch=18))
    alone, shared = (
        CostModel(
            profile,
            Cluster(
                devices=nodes_of(flat(9, 0.0, 1e9), (3, 3, 3)).devices,
                links=(
                    Link(level="node", latency_s=0.0, bytes_per_s=1e15),
                    Link(level="network", latency_s=0.0, bytes_per_s=1e9, shared_by=shared_by),
                ),
            ),
            PlanOptions(),
        )
        for shared_by in (1, 3)
    )
    steps = [central(costs, 0, 1) for costs in (alone, shared)]
    assert all(isinstance(step, ServedStep) for step in steps)
    # Six others on two nodes: three messages at once, each at a third of the bandwidth.
    assert steps[0].link_s == pytest.approx(steps[1].link_s, rel=1e-6)  # type: ignore[union-attr]
    # All send at once in a sharded one.
    each = [sharded(costs, 1) for costs in (alone, shared)]
    assert each[1].link_s == pytest.approx(3 * each[0].link_s, rel=1e-4)  # type: ignore[union-attr]


def test_the_first_device_of_data_parallel_holds_outputs_gradients_and_optimizer_and_binds() -> None:
    for seed in range(0, 80, 2):
        costs = costs_of(seed, (3,))
        layers, tied = costs.profile.layers, sum(each.bytes for each in costs.profile.tied)
        gradients, states = trained_bytes(costs), sum(layer.optimizer_bytes for layer in layers) - 2 * tied
        held = sum(layer.parameters_bytes for layer in layers) - tied
        inputs = sum(each.bytes_per_sample for each in costs.profile.tensors if each.producer is None)
        for micro_batches in (each for each in divisors(costs.batch) if costs.batch // each >= 3):
            found = data_parallel(costs, micro_batches)
            assert isinstance(found, ServedStep)
            shares = [len(part) for part in torch.arange(costs.batch // micro_batches).chunk(3)]
            outputs = sum(output_bytes(costs, rows) for rows in shares)
            earlier = gradients if micro_batches > 1 else 0
            # Of its own share it holds what plain training of one micro-batch does.
            parts = costs.memory[0].parts(0, costs.layer_count, shares[0])
            computing = int(parts.first_peak) + earlier + 2 * outputs
            reducing = 2 * gradients + earlier + min(gradients, BUFFER_BYTES)
            updating = gradients + max(layer.update_bytes for layer in layers)
            expected = held + states + costs.batch * inputs + max(computing, reducing, updating)
            assert found.peak_bytes[0] == expected, f"seed {seed}"
            assert all(found.peak_bytes[0] >= found.peak_bytes[other] for other in range(1, len(shares)))
            for other in range(1, len(shares)):
                alone = costs.memory[0].parts(0, costs.layer_count, shares[other])
                assert found.peak_bytes[other] == held + shares[other] * inputs + max(int(alone.first_peak), gradients)


def test_servers_hold_the_optimizers_state_whole_or_in_parts_beside_what_a_plan_holds() -> None:
    for seed in range(0, 80, 2):
        costs = costs_of(seed, (4,))
        rows = even_shares(costs.batch, 4)
        gradients = trained_bytes(costs)
        optimizer = int(costs.memory[0].parts(0, costs.layer_count, 1).optimizer)
        whole, parted = central(costs, 1, 1), sharded(costs, 1)
        assert isinstance(whole, ServedStep)
        assert isinstance(parted, ServedStep)
        for device, share in enumerate(rows):
            stage = CandidateStage(0, costs.layer_count, (device,), (share,), 1)
            (plain,) = costs.peak_bytes(Candidate(1, share, "1f1b", (stage,)))
            inputs = sum(each.bytes_per_sample for each in costs.profile.tensors if each.producer is None)
            parameters = int(costs.memory[0].parts(0, costs.layer_count, 1).parameters)
            pushed = parameters + share * inputs + gradients
            if device == 1:
                assert whole.peak_bytes[device] == max(plain, pushed + optimizer + gradients), f"seed {seed}"
            else:
                assert whole.peak_bytes[device] == plain - optimizer
            # Its part of the parameters is beside those that it works with.
            part = -(-parameters // 4) + -(-optimizer // 4)
            assert parted.peak_bytes[device] == max(plain - optimizer, pushed + -(-gradients // 4)) + part


def test_with_too_little_memory_a_row_says_which_device_lacks_how_much() -> None:
    profile = on_gpus(gpt_profile(batch=8))
    asked = PlanOptions(micro_batches=1)
    for name in ("torch.nn.DataParallel", "parameter server, central", "parameter server, sharded"):
        for less in (0, 1, 3 * 2**20):
            costs = CostModel(profile, local_cluster(4), asked)
            step = next(each.step for each in ways_to_serve(costs, asked) if each.name == name)
            assert step is not None
            options = PlanOptions(micro_batches=1, memory_bytes=max(step.peak_bytes.values()) - less)
            found = next(
                each
                for each in ways_to_serve(CostModel(profile, local_cluster(4), options), options)
                if each.name == name
            )
            if less == 0:
                assert (found.reason, found.step) == (None, step)
            else:
                size = "1 B" if less == 1 else "3.00 MiB"
                assert f" needs {size} more than " in str(found.reason)
                assert str(found.reason).endswith(f"({less} bytes)")
                assert str(found.reason).startswith("device 0 needs ")


def test_what_cannot_be_is_said_why_by_name() -> None:
    profile = on_gpus(gpt_profile(batch=8))

    def reasons(profile: Profile, cluster: Cluster, **options: int) -> list[str | None]:
        asked = PlanOptions(**options)
        return [each.reason for each in ways_to_serve(CostModel(profile, cluster, asked), asked)]

    spread = nodes_of(random_cluster(1, 4), (2, 2))
    one_node = "it is of one node, and these are on 2"
    assert reasons(profile, spread) == [one_node, None, None]
    assert reasons(gpt_profile(batch=8), flat(4, 0.0, 1e9))[0] == "it is of GPUs, and these are CPUs"
    assert reasons(profile, flat(1, 0.0, 1e9)) == ["there is one device, and nothing to share"] * 3
    few = "no micro-batch of a batch of 8 has a sample for each of 4"
    assert reasons(profile, flat(4, 0.0, 1e9), micro_batches=4) == [few] * 3
    whole = profile.model_copy(update={"indivisible": "it says so"})
    said = "the optimizer cannot step parts of parameters: it says so"
    assert reasons(whole, flat(4, 0.0, 1e9)) == [None, None, said]
    first = profile.layers[0].model_copy(update={"least_samples": 8})
    limited = profile.model_copy(update={"layers": (first, *profile.layers[1:])})
    assert all("and a replica is given" in str(each) for each in reasons(limited, flat(4, 0.0, 1e9)))


def test_compare_has_a_row_of_each_that_says_what_the_step_is_spent_on() -> None:
    profile, cluster = on_gpus(gpt_profile(blocks=2, batch=8)), flat(4, 1e-5, 1e8)
    listed = compare(profile, cluster, PlanOptions()).rows
    rows = {row.name: row for row in listed}
    assert [row.priced is None for row in listed] == [True] * (len(listed) - 3) + [False] * 3
    assert [row.step_s for row in listed[-3:]] == sorted(row.step_s or 0.0 for row in listed[-3:])
    costs = CostModel(profile, cluster, PlanOptions())
    for each in ways_to_serve(costs, PlanOptions()):
        row, step = rows[each.name], each.step
        assert step is not None
        assert (row.step_s, row.micro_batches, row.stages, row.schedule) == (
            step.step_s,
            step.micro_batches,
            None,
            None,
        )
        assert row.peak_bytes == max(step.peak_bytes.values())
        assert row.priced == f"{100 * step.link_s / step.step_s:.0f} % on {step.link}"
        assert row.as_dict()["priced"] == row.priced
    assert rows["autopar"].priced is None
    assert "priced" not in rows["autopar"].as_dict()


def test_on_one_device_nothing_is_exchanged_and_a_step_is_plain() -> None:
    for seed in range(20):
        costs = costs_of(seed, (1,))
        for turns in divisors(costs.batch):
            rows = costs.batch // turns
            plain = Candidate(turns, rows, "1f1b", (CandidateStage(0, costs.layer_count, (0,), (rows,), 1),))
            for found in (data_parallel(costs, turns), central(costs, 0, turns), sharded(costs, turns)):
                assert isinstance(found, ServedStep)
                assert found.step_s == pytest.approx(Simulator(costs).step_s(plain), rel=1e-9)
                assert found.link_s == 0.0
