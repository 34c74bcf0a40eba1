"""Flushes: what takes a flush at the end of every step, and why a plan that has none refuses it.

In: the name of what is asked for. Out: the words of a refusal, in which `{name}` is the plan's weight policy. Which
policies go with something nevertheless is said by each (:attr:`autopar.policies.Policy.supports`).
"""

_INSTEAD = "leave it out, or plan with `policy='sync'`"
TAKES_A_FLUSH = {
    "commands": "the plan is never flushed (weight policy {name}), and is carried out by `autopar run`, `autopar "
    "worker` and `autopar verify` alone; plan with `policy='sync'`, and no other objective than `objective='step'`",
    "clip_norm": "`clip_norm` takes a flush, which weight policy {name} has none of; leave it out, or clip each stage "
    "by its own norm (`clip='stage'`), or plan with `policy='2bw'`",
    "deferred_batch_norm": f"`deferred_batch_norm` takes a flush, which weight policy {{name}} has none of; {_INSTEAD}",
    "sync_batch_norm": f"`sync_batch_norm` takes a flush, which weight policy {{name}} has none of; {_INSTEAD}",
    "compile": f"`compile` takes a flush, which weight policy {{name}} has none of; {_INSTEAD}",
    "fp16": "fp16 scales losses for all stages alike, which weight policy {name} does not; plan with `policy='2bw'`, "
    "or profile with bf16",
    "bf16": "bf16 keeps weights as forwards have cast them for backwards, which see others under weight policy {name}; "
    "plan with `policy='stash'`, or profile with `precision='fp32'`",
    "replicate_state": "layers write buffers that replicas make alike after a step, which weight policy {name} has "
    "none of; plan with `max_stages`, or stages, whose replicas write none",
    "frozen": "between steps is not followed under `policy='{name}'`",
    "watched_loss": "a scheduler watches the loss, which stages do not see in step under weight policy {name}; plan "
    "with `policy='sync'`",
    "written_parameters": "writes parameters, of which there are versions under weight policy {name}; plan with "
    "`policy='sync'`",
    "uneven_counts": "loss() returns sums and counts, which replicas of the last stage that split mini-batches add up "
    "too late where others take turns under weight policy {name}; plan with `policy='sync'`",
    "ema_decay": f"`ema_decay` averages weights of whole steps, which weight policy {{name}} has none of; {_INSTEAD}",
    "outputs": f"`outputs=True` is of one version of the weights; weight policy {{name}} has several; {_INSTEAD}",
    "eval_every": f"`eval_every` takes a flush, which weight policy {{name}} has none of; {_INSTEAD}",
    "faults": "what is lost is counted for `policy='sync'` alone",
    "recalibrate": "a run under weight policy {name} recalibrates nothing; run a plan of `policy='sync'`",
    "update_profile": "what a run under weight policy {name} measures is not taken over",
    "critical_path": "no step has a critical path of its own under weight policy {name}",
    "export": "its pipeline is never flushed (policy {name}), and other trainers' are; plan with `policy='sync'`",
    "reprice": "a pipeline of `policy='{name}'` is never flushed, and not priced again; plan one anew",
    "shard": "no versions are kept of what replicas divide",
}
"""What takes a flush, by its name, and why it is refused without one."""
