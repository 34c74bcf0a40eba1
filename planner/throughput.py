"""Throughput: a plan's step in the units of whoever plans a training: tokens, utilisation, hours and cost.

A step takes s seconds for a batch of B samples, of t tokens each, on n devices. Together these compute P operations per
second at their peak, draw W watts, and cost C per hour. Forward and backward of a sample have F operations. Then

    samples per second         B / s
    tokens per second          t B / s
    model FLOPs utilisation    F B / (s P)
    N samples take             N s / B seconds,  n N s / (3600 B) device hours,  W N s / (3.6e6 B) kWh,
                               and cost  C N s / (3600 B)

Each rate is also one per device, divided by n. F counts products of matrices, convolutions and attention, two
operations for each multiplication: forwards and backwards each once, however often a plan runs forwards again.
Attention counts whole, as torch counts it, also where a causal mask leaves half of it out. So it is the utilisation of
Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.

What is not known is left out, and nothing is guessed in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from autopar.errors import UsageError
from autopar.formats.cluster import Cluster, Device
from autopar.formats.plan import Plan
from autopar.formats.prediction import Throughput, Training
from autopar.formats.profile import Precision, Profile
from autopar.hardware.gpus import find, power_of
from autopar.hardware.kinds import kinds_of
from autopar.hardware.topology import devices_of
from autopar.options.plan import PlanOptions

UNIT_TOKENS, UNIT_SAMPLES = 1e9, 1e6
"""What hours and cost are told of, unless a length is said."""
_INTEGERS = {"int64": 8, "int32": 4}
_SIZES = {**_INTEGERS, "bool": 1}
"""Bytes of a number of the types that tokens have, and with them masks."""
_SCALAR_BYTES = 8
"""Of other types: what has more is more than a single number."""
_HOUR_S = 3600.0


def tokens_of(profile: Profile) -> int | None:
    """Return the tokens of a sample, padded ones included; None where samples are no sequences, or none of one length.

    They are a sequence where all inputs of more than one number are integers or masks, and as long as each other.
    """
    if profile.model.sequence is not None:
        return profile.model.sequence
    inputs = [tensor for tensor in profile.tensors if tensor.producer is None]
    if any(each.dtype not in _SIZES and each.bytes_per_sample > _SCALAR_BYTES for each in inputs):
        return None
    integers, every = (
        {each.bytes_per_sample // sizes[each.dtype] for each in inputs if each.dtype in sizes} - {0, 1}
        for sizes in (_INTEGERS, _SIZES)
    )
    return integers.pop() if len(integers) == len(every) == 1 else None


def flops_per_sample(profile: Profile) -> int | None:
    """Return the operations of a sample's forward and backward; None where the profile does not count all layers'."""
    known = [layer.flops_per_sample for layer in profile.layers if layer.flops_per_sample is not None]
    return sum(known) if len(known) == len(profile.layers) else None


def check_length(profile: Profile, options: PlanOptions) -> None:
    """Refuse a length in tokens of samples of which nobody knows how many they have.

    Raises:
        UsageError: says what to pass.
    """
    if options.tokens is not None and options.tokens_per_sample is None and tokens_of(profile) is None:
        raise UsageError(
            f"`tokens={options.tokens:g}`: the inputs of {profile.model.source} are not integers of one length, so "
            "nothing says how many tokens a sample has; pass `tokens_per_sample`, too, or `samples` in place of "
            "`tokens`"
        )


def throughput_of(
    profile: Profile, devices: Sequence[Device], batch: int, step_s: float, options: PlanOptions
) -> Throughput | None:
    """Return what a step of some length is; None where it takes no time, or nothing is known but its samples.

    Args:
        profile: of the model; its inputs tell the tokens of a sample, its layers their operations.
        devices: those that the plan uses.
        batch: samples of a step.
        step_s: seconds of a step, predicted or measured.
        options: say how long training is, and which kind's times stand for others.
    """
    tokens, flops = options.tokens_per_sample or tokens_of(profile), flops_per_sample(profile)
    sums = _sums(profile, devices, options.times_of)
    used = None if flops is None else sums.peak_flops_per_s
    known = (tokens, used, sums.power_w, sums.price_per_hour, options.samples)
    if step_s <= 0 or all(each is None for each in known):
        return None
    count, rate = len(devices), batch / step_s
    training = partial(_training, devices=count, samples_per_s=rate, tokens_per_sample=tokens, sums=sums)
    asked = options.samples if options.tokens is None or tokens is None else options.tokens / tokens
    return Throughput(
        devices=count,
        samples_per_s=rate,
        samples_per_s_per_device=rate / count,
        tokens_per_sample=tokens,
        tokens_per_s=None if tokens is None else tokens * rate,
        tokens_per_s_per_device=None if tokens is None else tokens * rate / count,
        model_flops=None if flops is None else batch * flops,
        flops_utilisation=None if flops is None or used is None else flops * rate / used,
        **sums._asdict(),
        unit=training(UNIT_SAMPLES if tokens is None else UNIT_TOKENS / tokens),
        whole=None if asked is None else training(asked),
    )


class _Sums(NamedTuple):
    """What devices have together; None where one's is not known."""

    peak_flops_per_s: float | None
    power_w: float | None
    price_per_hour: float | None


def _sums(profile: Profile, devices: Sequence[Device], times_of: str | None) -> _Sums:
    names = kinds_of(profile, devices, times_of).names
    named = [device.model_copy(update={"type": names[device.type]}) for device in devices]
    peak = partial(_peak_flops_per_s, precision=profile.precision)
    return _Sums(*(_sum_of(named, value) for value in (peak, power_of, attrgetter("price_per_hour"))))


def _training(
    samples: float, *, devices: int, samples_per_s: float, tokens_per_sample: int | None, sums: _Sums
) -> Training:
    seconds, power_w, price = samples / samples_per_s, sums.power_w, sums.price_per_hour
    return Training(
        samples=samples,
        tokens=None if tokens_per_sample is None else float(round(samples * tokens_per_sample)),
        duration_s=seconds,
        device_hours=devices * seconds / _HOUR_S,
        energy_kwh=None if power_w is None else power_w / 1000 * seconds / _HOUR_S,
        cost=None if price is None else price * seconds / _HOUR_S,
    )


def _sum_of(devices: Sequence[Device], value: Callable[[Device], float | None]) -> float | None:
    """Return a value of all devices together; None where one's is not known."""
    known = [each for each in map(value, devices) if each is not None]
    return sum(known) if len(known) == len(devices) else None


def _peak_flops_per_s(device: Device, precision: Precision) -> float | None:
    try:
        return find(device.type).flops_per_s(precision)
    except UsageError:
        return None


def plan_throughput(plan: Plan, profile: Profile, cluster: Cluster, options: PlanOptions) -> Throughput | None:
    """Return :func:`throughput_of` a plan's predicted step; None where it is 0.

    Of ``options``, only the length of training counts.
    """
    every = devices_of(cluster, max(plan.devices) + 1)
    used, asked = [every[device] for device in plan.devices], replace(options, times_of=plan.times_of)
    return throughput_of(profile, used, plan.step_samples, plan.predicted.step_s, asked)


def with_throughput(plan: Plan, throughput: Throughput | None) -> Plan:
    """Return a plan that records what its step is."""
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"throughput": throughput})})


def measured_throughput(predicted: Throughput, times: float) -> Throughput:
    """Return what a step is that takes so many times as long as predicted; a run counts its operations itself."""
    rates = ("samples_per_s", "samples_per_s_per_device", "tokens_per_s", "tokens_per_s_per_device")
    known = {name: getattr(predicted, name) for name in rates}
    slower = {name: None if rate is None else rate / times for name, rate in known.items()}
    lengths = {name: _longer(getattr(predicted, name), times) for name in ("unit", "whole")}
    counted_otherwise = dict.fromkeys(("model_flops", "flops_utilisation", "peak_flops_per_s"))
    return predicted.model_copy(update={**slower, **lengths, **counted_otherwise})


def _longer(training: Training | None, times: float) -> Training | None:
    if training is None:
        return None
    known = {name: getattr(training, name) for name in ("duration_s", "device_hours", "energy_kwh", "cost")}
    return training.model_copy(update={name: None if each is None else each * times for name, each in known.items()})
